"""Asks vLLM's own parser: a JSON list of words on each line of standard input, what came of it on standard output."""

import contextlib
import io
import json
import os
import sys
from dataclasses import asdict
from typing import Any

from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.launchers.launcher import validate_api_server_args
from vllm.utils.argparse_utils import FlexibleArgumentParser


def parse(words: list[str]) -> dict[str, Any]:
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            args = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
            validate_parsed_serve_args(args)
            args.structured_outputs_config.reasoning_parser = args.reasoning_parser  # as the engine does, later
            validate_api_server_args(args)
    except (SystemExit, KeyError, TypeError, ValueError) as e:
        return {"error": complaint.getvalue() or str(e)}
    transfer = asdict(args.kv_transfer_config)
    asked = json.loads(words[words.index("--kv-transfer-config") + 1])
    return {
        "model": args.model,
        "middleware": args.middleware,
        "enable_prefix_caching": args.enable_prefix_caching,
        "kv_transfer_config": {key: transfer[key] for key in asked},
    }


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to standard output
    for line in sys.stdin:
        print(json.dumps(parse(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
