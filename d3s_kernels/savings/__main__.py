"""Counts how much of TRL's update D3S would save, for your model and batch, without a GPU.

Example:
    >>> from d3s_kernels.savings.__main__ import counted, options_of
    >>> llama = "--layers 2 --hidden 64 --intermediate 128 --heads 4 --kv-heads 2 --vocab 1000"
    >>> choices = counted(options_of(f"{llama} --prompt-length 8 --lengths 12,32".split()))["choices"]
    >>> {name: round(row["update"], 2) for name, row in choices.items() if "+" not in name and "tokens" not in name}
    {'TRL as it is': 1.0, 'nothing dropped': 0.61, 'rollouts': 0.29, 'random prefixes': 0.39}
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from .._lm_head.tiles import SIZES
from ..selection.options import RATIO, ROLLOUTS, Takes, whole
from .counts import CHOICES, NOTHING, PARTS, SIGMA, TRL, drawn, lengths_of, number, update
from .model import NUMBERS, from_config

PROG = "python -m d3s_kernels.savings"
DRAWS = 16  # the number of batches that are drawn, each from a fixed seed
NOTES = f"""\
These are counts, not times: operations of matrix products as in TRL 1.16, two for each multiply-add. They are means
of {DRAWS} batches of one process, which are drawn with independent lengths, rewards and entropies. Attention counts as
full squares: a causal kernel computes half of them, one with a window less. Not counted: norms and all else between
products, how efficient kernels are (for attention, or for few rows), an adapter's products, a reference model, the
optimizer, communication and the host. A step is --generation-share, 0 if it is not given, plus the rest of it times
the update's share. The largest micro-batch is that of all batches, in positions (rows x columns): the memory of
activations grows with it. Rows are in D3STrainer's micro-batches of equal work; for loss_type bnpo, an entropy bonus or
a router loss, it keeps TRL's. Random prefixes (token_rule="prefix") are half of the tokens.
What is learnt is not counted either. In our small experiment (experiments/learning/README.md), training on 8 of 32
rollouts was as good as on all 32 in the same priced time. It was ahead of generating only 8 where successes were rare,
prompts few and generation nearly free; where generation cost 0.4 of an update or more, generating 8 had the higher
mean. Leaving out tokens gained nothing."""
BELOW_1 = Takes(lambda value: type(value) in (int, float) and 0 <= value < 1, "a number in [0, 1)")
BETWEEN = Takes(lambda value: BELOW_1.fits(value) and value > 0, "a number in (0, 1)")
OPTIONS: dict[str, tuple[Takes, float | None, str]] = {
    "--prompts": (whole(1), 8, "of a generation batch"),
    "--group-size": (whole(2), 8, "rollouts of a prompt"),
    "--micro-batch": (whole(1), 8, "per_device_train_batch_size"),
    "--prompt-length": (whole(1), None, "tokens of each prompt"),
    "--rollouts-kept": (ROLLOUTS, 0.5, "a share of a group or a number; D3S goes from 0.25 to 1"),
    "--token-share": (RATIO, 0.1, "D3S goes from 0.05 to 0.2"),
    "--off-policy": (BELOW_1, 0.0, "share of the tokens that vLLM's correction leaves out; implies --passes vllm"),
    "--success": (BETWEEN, 0.3, "mean rate of rewards of 1, else 0"),
    "--generation-share": (BELOW_1, 0.0, "share of the time of TRL's step that is no update: generation, rewards"),
}


def options_of(arguments: Sequence[str] | None, prog: str = PROG) -> argparse.Namespace:
    """Reads the command line. In the result, ``model`` is a :class:`Model`, and ``lengths`` is a function that draws
    the length of a completion.
    """
    parser = argparse.ArgumentParser(prog=prog, description=(__doc__ or "").partition("\n")[0], epilog=NOTES)
    add = parser.add_argument
    add("config", nargs="?", help="a Hugging Face config.json, or its folder. In place of it or of its values:")
    for key, name in NUMBERS.items():
        add(name, dest=key, type=number, metavar="N", help=key)
    for name, (_, default, text) in OPTIONS.items():
        text += "" if default is None else f" ({default})"
        add(name, type=number, default=default, metavar="N", help=text, required=default is None)
    text = f'number or JSON with a "length"; or MEAN,MAXIMUM, for log-normal ones with a sigma of {SIGMA}'
    add("--lengths", required=True, help=f"tokens of completions: a file with one a line, {text}")
    text = "log-probabilities that TRL computes before an update: old, for several updates; vllm, for its correction"
    add("--passes", choices=("none", "old", "vllm"), default="none", help=f"{text} (none)")
    add("--no-checkpointing", action="store_true", help="gradient_checkpointing=False; TRL's default is True")
    add("--lora", action="store_true", help="the weights of body and head are frozen")
    add("--frozen-head", action="store_true", help="the head's weight is frozen")
    add("--json", action="store_true", help="one JSON object, for programs")
    options = parser.parse_args(arguments)
    numbers = {key: value for key in NUMBERS if (value := vars(options)[key]) is not None}
    switches = "--lengths", "--passes", "--no-checkpointing", "--lora", "--frozen-head"
    options.values = values = {name: vars(options)[name[2:].replace("-", "_")] for name in (*OPTIONS, *switches)}
    try:
        config: Any = {"model_type": "mixtral" if "num_local_experts" in numbers else "llama"}
        if options.config or not numbers:
            file = Path(options.config or "no config")
            file = file / "config.json" if file.is_dir() else file
            config = number(file.read_text(encoding="utf-8", errors="replace")) if file.is_file() else None
            if not isinstance(config, dict):
                raise ValueError(f"config: got {file}; takes a config.json, its folder, or else a model's numbers")
        for name, (takes, *_) in OPTIONS.items():
            if not takes.fits(value := values[name]):
                raise ValueError(f"{name}: got {value!r}; takes {takes.words}")
        if (rollouts := options.prompts * options.group_size) % options.micro_batch:
            raise ValueError(f"--micro-batch: got {options.micro_batch}; takes a divisor of {rollouts}, all rollouts")
        if options.off_policy and options.passes == "old":
            raise ValueError(f"--passes: got 'old' with --off-policy {options.off_policy}; takes vllm")
        options.model, options.lengths = from_config(config, numbers), lengths_of(options.lengths)
    except ValueError as error:
        parser.error(f"argument {error}")
    options.passes = values["--passes"] = "vllm" if options.off_policy else options.passes
    return options


def _sentences(steps: dict[str, float]) -> list[str]:
    """Returns sentences that say what is saved if nothing is dropped, which choice saves most, and which choices save
    little. ``steps`` has the time of each choice's step, as a share of the time of TRL's step.
    """
    more = {name: steps["rollouts" if " + " in name else NOTHING] - step for name, step in steps.items()}
    pays = [name for name, part in more.items() if part >= 0.1] or [NOTHING]
    best = min(pays, key=steps.__getitem__)
    little = [f"{name} ({round(100 * part)} %)" for name, part in more.items() if name not in (TRL, NOTHING, *pays)]
    return [
        f"Nothing dropped (keep_all=True): a step is {steps[NOTHING]:.2f}x of TRL's. Its gradient is TRL's up to "
        "rounding, so this needs no claim about learning.",
        f"Pays most: {best}. A step is {steps[best]:.2f}x of TRL's, {steps[best] / steps[NOTHING]:.2f}x of that with "
        "nothing dropped.",
        f"Does not pay: {'; '.join(little) or 'nothing'}. A percentage is what a choice saves of TRL's step beyond "
        "nothing dropped, or beyond rollouts alone. It pays from 10 % on.",
    ]


def counted(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the JSON object. For each choice, ``operations`` has the numbers of operations of an update on one
    generation batch, by part. The other values are shares: ``shares`` and ``update`` of TRL's update, ``step`` of TRL's
    step, and ``padding`` of the operations of the body's forward. ``largest_micro_batch`` is a number of positions.
    """
    totals = {choice: Counter[str]() for choice in CHOICES if options.off_policy or choice != "off-policy tokens"}
    largest, rows = dict.fromkeys(totals, 0), {}
    for seed in range(DRAWS):
        batch = drawn(seed, options)
        for choice, total in totals.items():
            counts, positions = update(options, batch, choice)
            total.update(counts)
            largest[choice] = max(largest[choice], positions)
    of_trl, other = sum(totals[TRL][part] for part in PARTS), options.generation_share
    for choice, total in totals.items():
        share = sum(total[part] for part in PARTS) / of_trl
        rows[choice] = {
            "operations": {part: total[part] / DRAWS for part in PARTS}, "update": share,
            "shares": {part: total[part] / of_trl for part in PARTS}, "step": other + (1 - other) * share,
            "padding": total["padding"] / total["body forward"], "largest_micro_batch": largest[choice],
        }  # fmt: skip
    tokens = largest[TRL] - options.micro_batch * options.prompt_length
    vocabulary = options.model.vocabulary
    logits = {  # most bytes at a time; TRL has a bfloat16 tile of 4,096 tokens x 32,768 ids; our tile is float32
        "in TRL (bfloat16)": 2 * min(tokens, 4096) * 32768,
        "in ours (float32)": min(SIZES["cuda"].workspace_bytes, 4 * tokens * vocabulary),
        "if all were stored (bfloat16)": 2 * tokens * vocabulary,
    }
    return {
        "schema": 1, "model": options.model._asdict(), "options": options.values, "choices": rows, "notes": NOTES,
        "logits_bytes": logits, "sentences": _sentences({choice: row["step"] for choice, row in rows.items()}),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None, prog: str = PROG) -> int:
    options = options_of(arguments, prog)
    found = counted(options)
    if options.json:
        print(json.dumps(found, indent=2, allow_nan=False))
        return 0
    heads = ["of TRL's", "step", "update", *PARTS, "padding", "largest micro-batch"]  # one word per line
    table = [*zip_longest(*(head.split()[::-1] for head in heads), fillvalue="")][::-1]
    for choice, row in found["choices"].items():
        times = [f"{row[name]:.3f}x" for name in ("step", "update")]
        shares = [f"{100 * share:.1f} %" for share in (*row["shares"].values(), row["padding"])]
        table.append((choice, *times, *shares, f"{row['largest_micro_batch']:,}"))
    widths = [max(map(len, column)) + 1 for column in zip(*table, strict=True)]
    for cells in table:
        print(cells[0].ljust(widths[0]) + "".join(map(str.rjust, cells[1:], widths[1:])))
    of_trl = sum(found["choices"][TRL]["operations"].values())
    logits = ", ".join(f"{number / 2**20:,.0f} MiB {name}" for name, number in found["logits_bytes"].items())
    print("", *found["sentences"], "", sep="\n")
    print("With", *(f"{name} {value}" for name, value in found["options"].items()))
    print(f"TRL's update has {of_trl:.4g} operations. Logits that a micro-batch holds at a time: {logits}.")
    print("", NOTES, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
