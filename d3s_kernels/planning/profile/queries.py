"""The queries of a dataset: a JSONL file, or a name that the datasets library knows."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def load_queries(dataset: str, subset: str | None, split: str, prompt_column: str) -> list[Row]:
    """All rows, each with all columns. The prompt's column is renamed to ``prompt``, as in TRL, and replaces any other
    column of that name.
    """
    rows = _from_file(Path(dataset)) if Path(dataset).is_file() else _by_name(dataset, subset, split)
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


def digest(rows: list[Row]) -> str:
    """A hash that differs for other rows. Of a value that JSON cannot express, only the type is hashed."""
    text = json.dumps(rows, sort_keys=True, default=lambda value: type(value).__name__)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _from_file(path: Path) -> list[Row]:
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


def _by_name(name: str, subset: str | None, split: str) -> list[Row]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError(f"dataset: {name} is no file; a name takes the package datasets, which is missing") from None
    return [dict(row) for row in load_dataset(name, subset, split=split)]
