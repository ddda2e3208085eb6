"""``d3s profile``, or ``python -m d3s_kernels.planning.profile``: samples a model on every query of a dataset and
counts successes.

Such a profile is the first step of sGPO (arXiv 2606.08854). The command writes one line of JSON for each finished
query. If it is interrupted, the same command continues the profile, and the result is the same as without the
interruption. Each completion has its own random numbers, so another batch size or device changes only rounding, which
in rare cases changes a sampled token.

    d3s profile --model Qwen/Qwen2.5-0.5B-Instruct --dataset prompts.jsonl \\
        --reward rewards.py:is_correct --out profile.jsonl
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .files import ProfileFile, Row, load_profile, load_queries

_PROG = "python -m d3s_kernels.planning.profile"


def _arguments(prog: str = _PROG) -> argparse.ArgumentParser:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=prog, description=__doc__, formatter_class=layout)
    add = parser.add_argument
    add("--model", required=True, help="a folder, or a name on the Hugging Face hub")
    add("--dataset", required=True, help="a JSONL file, or a name that the datasets library knows")
    add("--reward", required=True, help="module:function or file.py:function, called as TRL calls reward functions")
    add("--out", required=True, type=Path, help="the profile to write; an unfinished one is continued")
    add("--subset", help="of a dataset given by name")
    add("--split", default="train", help="of a dataset given by name (train)")
    add("--prompt-column", default="prompt", help="text, or messages for the chat template (prompt)")
    add("--chat-template-kwargs", type=json.loads, default={}, help="JSON, for the chat template ({})")
    add("--samples", type=int, default=8, help="completions of each query (8)")
    add("--temperature", type=float, default=1.0, help="(1.0)")
    add("--max-new-tokens", type=int, default=512, help="(512)")
    add("--batch-size", type=int, default=64, help="completions generated at a time (64)")
    add("--threshold", type=float, default=1.0, help="a reward of at least this is a success (1.0)")
    add("--seed", type=int, default=0, help="(0)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(%(default)s)")
    add("--dtype", default="auto", help="float32, bfloat16, float16; auto: the checkpoint's, on a CPU slow (auto)")
    return parser


def _check(options: argparse.Namespace) -> None:
    for name in ("samples", "max_new_tokens", "batch_size"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name.replace('_', '-')}: got {getattr(options, name)}; takes at least 1")
    if not 0 < options.temperature < math.inf:
        raise ValueError(f"temperature: got {options.temperature}; takes a positive number")
    if not isinstance(options.chat_template_kwargs, dict):
        raise ValueError(f"chat-template-kwargs: got {options.chat_template_kwargs!r}; takes a JSON object")
    if math.isnan(options.threshold):
        raise ValueError("threshold: got nan; takes a number")


def _settings(options: argparse.Namespace, rows: list[Row]) -> dict[str, Any]:
    """Returns the settings that determine the result, and a hash of the rows. A file is continued only if its settings
    and its hash are the same.
    """
    settings = {name: value for name, value in vars(options).items() if name not in ("out", "batch_size", "device")}
    # If JSON cannot express a value, only the value's type is hashed.
    text = json.dumps(rows, sort_keys=True, default=lambda value: type(value).__name__)
    return {**settings, "queries": len(rows), "digest": hashlib.sha256(text.encode()).hexdigest()[:16]}


def main(arguments: Sequence[str] | None = None, prog: str = _PROG) -> int:
    parser = _arguments(prog)
    options = parser.parse_args(arguments)
    try:
        from .run import load_reward, profile
    except ImportError as error:
        parser.error(f"{error}; profiling needs transformers and tqdm")
    try:
        _check(options)
        rows = load_queries(options.dataset, options.subset, options.split, options.prompt_column)
        reward = load_reward(options.reward)
        file = ProfileFile(options.out, _settings(options, rows))
    except ValueError as error:
        parser.error(str(error))
    try:
        with file:
            profile(options, rows, reward, file)
    except KeyboardInterrupt:
        print(f"stopped after {len(file.done)} of {len(rows)} queries; the same command goes on", file=sys.stderr)
        return 130
    successes, samples = load_profile(options.out)
    never, always = int((successes == 0).sum()), int((successes == samples).sum())
    print(f"{options.out}: {len(rows)} queries, {never} never solved, {always} always")
    return 0


if __name__ == "__main__":
    sys.exit(main())
