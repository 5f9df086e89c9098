"""Models of a few megabytes with random weights, whose answers depend on all of their context.

`make` writes one in a process of its own, `python -m tests.engines.tiny KIND TOKENIZER FOLDER`, because transformers
warns about much, and warnings are errors in tests.

Nobody trained them, so their scale is chosen such that they still tell contexts apart: queries and keys are so large
that a token attends to a few others rather than to the mean of all, and every layer passes on what it sees amplified. A
test shows that they do.
"""

import os
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Any

from kvflow.embedded import prepare

MAX_MODEL_LEN = 4096
LAYERS = 6
END_OF_TURN = 2
"""Token id of `<|im_end|>`."""
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Tokens of their own in Qwen3's vocabulary, which parsers look for there."""

TEMPLATE = r"""
{%- set last = namespace(user=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- if tools -%}{{- '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' -}}{%- endif -%}
{%- if documents -%}{{- '<|im_start|>documents\n' + (documents | tojson) + '<|im_end|>\n' -}}{%- endif -%}
{%- for m in messages -%}
  {{- '<|im_start|>' + m.role + '\n' -}}
  {%- set said = m.content if m.content is string else '' -%}
  {%- if m.role == 'assistant' -%}
    {%- set thought = m.reasoning or m.reasoning_content or '' -%}
    {%- if '</think>' in said -%}
      {%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') -%}
      {%- set said = said.split('</think>')[-1].lstrip('\n') -%}
    {%- endif -%}
    {%- if thought and loop.index0 > last.user -%}{{- '<think>\n' + thought + '\n</think>\n\n' -}}{%- endif -%}
    {{- said -}}
    {%- for call in m.tool_calls or [] -%}
      {{- '<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' -}}
    {%- endfor -%}
  {%- elif m.content is string -%}{{- said -}}
  {%- else -%}{%- for part in m.content or [] -%}{{- part.text -}}{%- endfor -%}
  {%- endif -%}
  {{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\n' + ('<think>\n' if enable_thinking else '') -}}
{%- endif -%}
"""
"""Does with thinking what Qwen3's and GLM's templates do: of earlier turns it is left out, and the tag that opens it
stands in the generation prompt, but not in front of the same answer in a history."""


class Kind(StrEnum):
    QWEN3 = "qwen3"
    LATENT = "latent"
    """DeepSeek's latent attention: one compressed KV vector per token."""


def make(kind: Kind, folder: Path) -> Path:
    command = [sys.executable, "-m", "tests.engines.tiny", kind, str(prepare()), str(folder)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    made = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert made.returncode == 0, made.stderr[-3000:]
    return folder


def _write(kind: Kind, tokenizer_folder: str, folder: str) -> None:
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.add_tokens(list(TAGS))
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(1)
    build = {Kind.QWEN3: _qwen3, Kind.LATENT: _latent}[kind]
    model = build(len(tokenizer)).float()
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0, 1)
        model.lm_head.weight.normal_(0, 0.25)
    model.generation_config.eos_token_id = END_OF_TURN
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _qwen3(vocabulary: int) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = Qwen3ForCausalLM(
        Qwen3Config(vocab_size=vocabulary, head_dim=64, num_key_value_heads=1, intermediate_size=256, **_size())
    )
    for layer in model.model.layers:
        layer.self_attn.q_norm.weight.data.fill_(4)
    return model


def _latent(vocabulary: int) -> Any:
    """512 + 64 dimensions of compressed KV are the only ones that vLLM's kernel for CPUs knows."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        vocab_size=vocabulary,
        num_key_value_heads=2,
        intermediate_size=256,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
        first_k_dense_replace=LAYERS,
        n_routed_experts=2,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        **_size(),
    )
    return DeepseekV2ForCausalLM(config)


def _size() -> dict[str, Any]:
    return {
        "hidden_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "max_position_embeddings": MAX_MODEL_LEN,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": END_OF_TURN,
    }


if __name__ == "__main__":
    _write(Kind(sys.argv[1]), sys.argv[2], sys.argv[3])
