"""Measurements that need more than a test. None of them is installed with kvflow."""
