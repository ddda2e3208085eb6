"""Reads the dataset with the queries, and reads and writes profiles. The first line of a profile has the settings. Each
further line has the result of one finished query.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Row = dict[str, Any]


@dataclass(frozen=True)
class Record:
    """The result of profiling one query. A completion whose reward is None or NaN does not count as a sample."""

    index: int
    successes: int
    samples: int
    mean_reward: float | None


def load_profile(path: str | PathLike[str]) -> tuple[Tensor, Tensor]:
    """Reads each query's numbers of successes and samples from a file that ``d3s profile`` has written.

    A completion that the reward function could not score is not a sample, so a query may have fewer samples than
    others, or none. :func:`plan_rollouts` refuses queries without samples. If there are such queries, pass
    ``successes[samples > 0]`` and ``samples[samples > 0]`` to :func:`plan_rollouts`, and use only these rows of the
    dataset.

    Args:
        path: a finished profile.

    Returns:
        Two int64 tensors ``[queries]``, in the order of the dataset: the arguments of :func:`plan_rollouts`.

    Raises:
        ValueError: the file is not a profile, is damaged, or lacks queries.

    Example:
        >>> import pathlib, tempfile, d3s_kernels as d3s
        >>> path = pathlib.Path(tempfile.mkdtemp(), "profile.jsonl")
        >>> _ = path.write_text('''{"settings": {"queries": 2}}
        ... {"index": 0, "successes": 1, "samples": 8, "mean_reward": 0.125}
        ... {"index": 1, "successes": 5, "samples": 8, "mean_reward": 0.625}
        ... ''')
        >>> d3s.plan_rollouts(*d3s.load_profile(path)).group_size
        tensor([8, 2])
    """
    settings, records = _parse(Path(path), Path(path).read_bytes())
    queries = settings["queries"]
    if len(records) != queries:
        raise ValueError(f"path: {path} has {len(records)} of {queries} queries; the command that wrote it goes on")
    successes = [records[index].successes for index in range(queries)]
    samples = [records[index].samples for index in range(queries)]
    return torch.tensor(successes, dtype=torch.int64), torch.tensor(samples, dtype=torch.int64)


class ProfileFile:
    """A profile that is open for writing: a new file, or a file that is continued. ``done`` has the indices of the
    queries that the file contains.

    An incomplete last line, which a crash may leave, is removed. A profile with other settings, or a file that is not a
    profile, is refused and not changed.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        first = json.dumps({"settings": settings}) + "\n"
        content = path.read_bytes() if path.exists() else b""
        complete = content[: content.rfind(b"\n") + 1]
        self.done: set[int] = set()
        if complete:
            written, records = _parse(path, complete)
            wanted = json.loads(first)["settings"]  # through JSON, as in the file, so that both can be compared
            for name in sorted({*written, *wanted}):
                if written.get(name) != wanted.get(name):
                    raise ValueError(
                        f"{path} was written with {name} {written.get(name)!r}; got {wanted.get(name)!r}: takes the "
                        "same, or another file"
                    )
            self.done.update(records)
        elif not first.encode().startswith(content):
            raise ValueError(f"{path} is no profile; takes one, or a new file")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.truncate(len(complete))
        self._file = path.open("a", encoding="utf-8", newline="\n", buffering=1)  # flushed line by line
        if not complete:
            self._file.write(first)

    def write(self, record: Record) -> None:
        self._file.write(json.dumps(asdict(record)) + "\n")
        self.done.add(record.index)

    def __enter__(self) -> ProfileFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _parse(path: Path, content: bytes) -> tuple[dict[str, Any], dict[int, Record]]:
    """Returns the settings, and the records by query index."""
    lines = content.splitlines()
    try:
        settings: dict[str, Any] = json.loads(lines[0])["settings"]
        queries = range(settings["queries"])
    except (IndexError, KeyError, TypeError, ValueError):
        raise ValueError(f"{path} is no profile: its first line has no settings") from None
    records: dict[int, Record] = {}
    for number, line in enumerate(lines[1:], 2):
        try:
            record = Record(**json.loads(line))
        except (TypeError, ValueError):
            raise ValueError(f"{path} is damaged: line {number} is no record of a query") from None
        if record.index not in queries or record.index in records:
            raise ValueError(f"{path} is damaged: line {number} has query {record.index}, which is too many")
        records[record.index] = record
    return settings, records


def load_queries(dataset: str, subset: str | None, split: str, prompt_column: str) -> list[Row]:
    """Returns all rows of a JSONL file, or of a dataset that the datasets library loads by name. Each row has all
    columns. ``prompt_column`` is renamed to ``prompt``, as in TRL, and replaces any other column with the name
    ``prompt``.
    """
    if Path(dataset).is_file():
        rows = _json_lines(Path(dataset))
    else:
        try:
            from datasets import load_dataset
        except ImportError:
            raise ValueError(
                f"dataset: {dataset} is no file; a name takes the package datasets, which is missing"
            ) from None
        rows = [dict(row) for row in load_dataset(dataset, subset, split=split)]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    if not rows:
        raise ValueError(f"dataset: {dataset} has no rows")
    if prompt_column not in columns:
        raise ValueError(f"prompt-column: got {prompt_column!r}; takes one of {', '.join(map(repr, columns))}")
    for number, row in enumerate(rows):
        if not row.get(prompt_column):
            raise ValueError(f"dataset: {dataset} has no {prompt_column} in row {number}")
    others = [name for name in columns if name not in (prompt_column, "prompt")]
    return [{"prompt": row[prompt_column], **{name: row.get(name) for name in others}} for row in rows]


def _json_lines(path: Path) -> list[Row]:
    rows = []
    # splitlines() would also split at characters that a JSON string may contain unescaped.
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise ValueError(f"dataset: {path} has no JSON object in line {number}")
        rows.append(row)
    return rows
