"""From GGUF to what vLLM loads: tokenizer, configuration and weights in bfloat16.

`convert` does it in a process of its own, because torch and transformers have no business in the router's. As a
script, `python -m kvflow.embedded.convert GGUF FOLDER`, this module is that process; it prints its steps.
"""

import sys
from pathlib import Path

from kvflow.embedded import child
from kvflow.embedded.progress import Progress
from kvflow.errors import ModelError

_STEP = "step: "
_END_OF_TURN = "<|im_end|>"


def convert(gguf: Path, into: Path, progress: Progress) -> None:
    """Write the model to the folder `into`. Half a minute, 1 GB of memory, 280 MB of disk."""

    def heard(line: str) -> None:
        if line.startswith(_STEP):
            progress(f"Converting the model: {line.removeprefix(_STEP)}")

    env = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        child.run("kvflow.embedded.convert", str(gguf), str(into), env=env, heard=heard)
    except child.ChildError as e:
        why = str(e).rstrip(".")
        raise ModelError(
            f"The embedded model could not be converted: {why}; kvflow[cpu] and kvflow[gpu] bring what it takes."
        ) from None


def _convert(gguf: Path, into: Path) -> None:
    """The values are four bits wide in the GGUF; bfloat16 changes none of the choices that the model makes."""
    _say("loading transformers")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    _say("reading the weights")
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    _say("reading the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = model.config.max_position_embeddings
    _check(tokenizer.chat_template, tokenizer.convert_tokens_to_ids(_END_OF_TURN), model.generation_config.eos_token_id)
    _say("writing")
    model.save_pretrained(into)
    tokenizer.save_pretrained(into)


def _check(chat_template: str | None, end_of_turn: int, eos: int | list[int]) -> None:
    """Another version of transformers might read less out of a GGUF; the model would then never stop talking."""
    if not chat_template or _END_OF_TURN not in chat_template:
        sys.exit("transformers found no chat template in the GGUF")
    if end_of_turn not in (eos if isinstance(eos, list) else [eos]):
        sys.exit(f"transformers did not take {_END_OF_TURN} for the end of a turn")


def _say(step: str) -> None:
    print(_STEP + step, flush=True)


if __name__ == "__main__":
    _convert(Path(sys.argv[1]), Path(sys.argv[2]))
