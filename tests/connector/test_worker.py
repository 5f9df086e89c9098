import importlib
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest

from tests.net import free_ports


def test_an_engine_that_is_gone_is_found_out_at_once(vllm: Any) -> None:  # noqa: ARG001
    worker: Any = importlib.import_module("kvflow.connector.worker").KvflowWorker
    with pytest.raises(ConnectionRefusedError):
        worker._nixl_handshake(worker.__new__(worker), "127.0.0.1", free_ports(1)[0], 1, "engine")


class Network:
    """As much of NIXL as a worker asks for what other engines have sent."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        sent, self.sent = self.sent, []
        return {"peer": [s.encode() for s in sent]}


class TestReleases:
    @pytest.fixture
    def worker(self, vllm: Any) -> Any:  # noqa: ARG002
        """One without a model, to which two turns are known that are kept."""
        kind: Any = importlib.import_module("kvflow.connector.worker").KvflowWorker
        worker = kind.__new__(kind)
        worker.nixl_wrapper, worker.transfer_topo = Network(), object()
        worker._reqs_to_process, worker._reqs_to_send = {"a", "b"}, {"a": 1e9, "b": 1e9}
        worker.consumer_notification_counts_by_req = defaultdict(int)
        worker.expected_consumer_notifications_by_req = {}
        worker._released = set()
        worker.xfer_stats = SimpleNamespace(record_notification_after_expiry=lambda: None)
        return worker

    def test_a_release_is_reported_once_and_forgotten(self, worker: Any) -> None:
        worker._released |= {"a", "stranger"}
        assert [worker._get_new_notifs(), worker._get_new_notifs()] == [{"a"}, set()]
        assert (worker._reqs_to_process, set(worker._reqs_to_send), worker._released) == ({"b"}, {"b"}, set())

    def test_what_was_pulled_in_the_meantime_is_not_reported_twice(self, worker: Any) -> None:
        worker._released.add("a")
        worker.nixl_wrapper.sent = ["a:1", "b:1"]
        assert [worker._get_new_notifs(), worker._get_new_notifs()] == [{"a", "b"}, set()]
        worker._released.add("b")
        assert worker._get_new_notifs() == set()

    def test_a_notification_that_comes_too_late_is_none(self, worker: Any) -> None:
        worker.nixl_wrapper.sent = ["a:2"]  # one of two readers
        worker._released.add("a")
        assert worker._get_new_notifs() == {"a"}
        worker.nixl_wrapper.sent = ["a:2"]
        assert worker._get_new_notifs() == set()
        assert not worker.consumer_notification_counts_by_req
