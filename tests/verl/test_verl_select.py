"""The lines of docs/verl.md that choose the rows of a batch in a loop of your own, on verl's own ``DataProto``."""

import math
import re
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("verl.protocol", reason="needs verl (make test-verl)")

from verl.protocol import DataProto

import d3s_kernels as d3s
from d3s_kernels.selection import choose_rollouts

UIDS = [str(uuid.uuid4()) for _ in range(3)]
PAGE = (Path(__file__).parents[2] / "docs" / "verl.md").read_text(encoding="utf-8")


def rows_to_keep(batch: Any, keep: int, multiple_of: int = 1) -> Tensor:
    """The page's function, with another number of rollouts."""
    (lines,) = re.findall(r"```python\n(import d3s_kernels as d3s\n.*?def rows_to_keep.*?)\n\n\n", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(lines, names)
    names["selection"] = d3s.Selection(rollouts_start=keep, rollouts_end=keep)
    found: Tensor = names["rows_to_keep"](batch, 0.5, multiple_of)
    return found


def make_batch(**tensors: Tensor) -> Any:
    """Twelve rollouts of groups of 3, 4 and 5, shuffled."""
    uids = np.array([UIDS[i] for i in (2, 1, 0, 1, 2, 2, 0, 1, 2, 0, 1, 2)], dtype=object)
    tensors = {"row": torch.arange(12)[:, None], **tensors}
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": uids})


def test_advantages_in_the_batch_travel_with_the_rows() -> None:
    """Equal advantages tie for responses of any length."""
    lengths = torch.randint(1, 50, (12,))
    mask = torch.arange(50) < lengths[:, None]
    advantages = torch.tensor([0.1, -0.1]).repeat(6)
    beyond = torch.where(mask, 0.0, math.nan)  # values outside the mask are not read
    batch = make_batch(advantages=advantages[:, None] + beyond, response_mask=mask.long())
    rows, uids = rows_to_keep(batch, 2), batch.non_tensor_batch["uid"]
    assert rows.tolist() == choose_rollouts(advantages, 2, groups=uids).nonzero().flatten().tolist()
    assert [len(rows_to_keep(batch, 2, multiple)) for multiple in (1, 4, 12)] == [6, 8, 12]
    kept = batch.select_idxs(rows)
    assert kept.batch["row"].flatten().tolist() == rows.tolist()
    assert kept.non_tensor_batch["uid"].tolist() == [uids[row] for row in rows]
    for row, mask_of, values in zip(rows, kept.batch["response_mask"], kept.batch["advantages"], strict=True):
        assert (values[mask_of.bool()] == advantages[row]).all()
