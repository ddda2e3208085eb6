"""Stand-ins of trainers: packages that are written from the tables of what our hooks assume about them.

A function has the parameters of its table and makes the calls of its table. Where the table has only calls, its
parameters are the names in them. So a test that runs such a function calls our hooks as the table says that the trainer
does.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from d3s_kernels.integrations import _assumptions
from d3s_kernels.integrations._assumptions import Assumption

# What functions return that our hooks call; {calls} stands for a tuple of the calls of the table.
RETURNED = {
    "get_reward_value": "self.reward",
    "policy_loss_function": "(sum_of_sample_mean(__import__('torch').cat(batch['advantages'])), {'seen': batch})",
    "get_parallel_state": "STATE",
    # OpenRLHF
    "get_strategy": "args",
    "compute_advantages_and_returns": "[setattr(e, 'advantages', e.rewards * 2) for e in experiences] and experiences",
    "training_step": "(lambda action_log_probs, old_action_log_probs, advantages: "
    "{'metrics': {'loss': {calls}[0]}, 'weights': {}})"
    "(self.actor(experience)[0], experience.action_log_probs, experience.advantages)",
    # prime-rl
    "iter_trainable_traces": "((episode, trace) for episode in episodes for trace in episode.traces)",
    "assign_advantages": "[setattr(node, 'advantages', [values] * node.size) for node in trace.nodes]",
    "shift_tensor_right": "__import__('torch').cat([t.new_full((1, 1), pad_value), t[:, :-1]], 1)",
    "compute_loss": "(sum((t * a)[m].sum() for t, a, m in zip(trainer_logprobs, advantages, loss_mask)) / rl_scale, "
    "{'seen': trainer_logprobs})",
}
INITIALISER = "def __init__(self, **fields): self.__dict__ |= fields"


def write(folder: Path, rows: Sequence[Assumption], moved: bool = False) -> None:
    """Writes the packages of the rows into a folder; ``moved`` takes the last of a row's places, not the first."""
    modules: dict[str, dict[str, list[Assumption]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        module, _, name = row.place.split(" or ")[-1 if moved else 0].partition(":")
        modules[module][name].append(row)
    for module, rows_of in modules.items():
        path = folder.joinpath(*module.split("."))
        for package in [path.parent, *path.parent.parents]:
            if package.is_relative_to(folder) and package != folder:
                package.mkdir(parents=True, exist_ok=True)
                (package / "__init__.py").touch()
        path.with_suffix(".py").write_text("\n".join(_lines(rows_of)) + "\n", encoding="utf-8")


def _lines(rows_of: dict[str, list[Assumption]]) -> Iterator[str]:
    """The lines of a module."""
    begun = set(rows_of)
    for name, rows in sorted(rows_of.items()):  # a class comes before its methods
        owner, _, method = name.rpartition(".")
        if owner and owner not in begun:
            begun.add(owner)
            yield f"class {owner}:"
        if name == "":
            yield from (
                f"{defined} = None" for row in rows if row.kind == "defines" for defined in row.expected.split()
            )
            yield from (str(row.expected.split()) for row in rows if row.kind == "reads")
            yield from (_function(f"call_{i}", [row]) for i, row in enumerate(rows) if row.kind == "calls")
        elif rows[0].kind == "defines":
            yield f"class {name}:\n    {INITIALISER}"
            yield from (f"    {field}: object" for row in rows for field in row.expected.split())
        else:
            yield f"{'    ' if owner else ''}{_function(method, rows)}"


def _function(name: str, rows: Sequence[Assumption]) -> str:
    calls = [row.expected for row in rows if row.kind == "calls"]
    used = {part.id for call in calls for part in ast.walk(ast.parse(call)) if isinstance(part, ast.Name)}
    takes = next((row.expected for row in rows if row.kind == "takes"), f"({', '.join(sorted(used))})")
    results = RETURNED.get(name, "{calls}").replace("{calls}", f"({''.join(f'{call}, ' for call in calls)})")
    words = [f"{row.expected.split()}; " for row in rows if row.kind == "reads"]
    return f"def {name}{takes}: {''.join(words)}return {results}"


@contextmanager
def installed(folder: Path, rows: Sequence[Assumption], moved: bool = False) -> Iterator[None]:
    """The packages of the rows are installed while the context lasts."""
    write(folder, rows, moved)
    packages = {row.place.split(".")[0] for row in rows}

    def forget() -> None:
        for name in [name for name in sys.modules if name.split(".")[0] in packages]:
            del sys.modules[name]
        for cached in (_assumptions.require, _assumptions.load, _assumptions._parsed):
            cached.cache_clear()

    with pytest.MonkeyPatch.context() as patch:
        forget()
        patch.syspath_prepend(str(folder))
        try:
            yield
        finally:
            forget()
