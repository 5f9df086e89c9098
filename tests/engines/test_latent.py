"""A model with latent attention, which vLLM's engine for CPUs gets wrong as soon as KV comes from elsewhere."""

from pathlib import Path

import pytest

from tests.engines import serving, tiny

pytestmark = pytest.mark.engine


def test_on_cpus_it_is_refused_before_it_answers_wrongly(tmp_path: Path) -> None:
    model = tiny.make(tiny.Kind.LATENT, tmp_path / "model")
    overrides = (f"model.path={model}", f"model.max_model_len={tiny.MAX_MODEL_LEN}")
    started = serving.start(tmp_path / "serve.log", *overrides, "+cluster.engine_args.enforce_eager=true")
    try:
        assert started.process.wait(serving.READY_S) != 0
    finally:
        if started.process.poll() is None:
            started.process.kill()
            started.process.wait()
    logs = [log.read_text() for log in (tmp_path / "serve").glob("*.log")]
    assert any("takes no model with latent attention on CPUs" in log for log in logs)
