"""A process of two that train together: the folder of the model is its argument."""

from __future__ import annotations

import math
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from tiny_swift import GROUP, STEPS, after, train

KEPT, SHARE, RANKS = 3, 0.3, 2


def main(folder: Path) -> None:
    found: list[tuple[list[int], list[float], list[float]]] = []  # rows, entropies of kept and of dropped tokens

    def watch(trainer: Any) -> None:
        def kept(result: Any, samples: Any) -> None:
            both = trainer._kept_advantages.view(RANKS, -1).tolist()
            trainer._kept_here = both[trainer.accelerator.process_index]

        def chosen(result: None, samples: Any, parts: list[Any]) -> None:
            everyone = torch.stack([one.advantages for one in samples]).tolist()
            assert everyone == trainer._kept_here
            rows = [len(part.completion_mask) for part in parts]
            kept = torch.cat([part.d3s_entropy[part.d3s_kept.tokens] for part in parts])
            dropped = [part.d3s_entropy[part.completion_mask.bool() & ~part.d3s_kept.tokens] for part in parts]
            found.append((rows, kept.tolist(), torch.cat(dropped).tolist()))

        after(trainer, "_keep_rollouts", kept)
        after(trainer, "_choose_tokens", chosen)

    rollouts = {"rollouts_start": KEPT, "rollouts_end": KEPT}
    run = train(folder, rollouts, before=watch, top_entropy_quantile=SHARE)
    groups = RANKS * STEPS  # a group for each micro-batch
    multiple = RANKS * STEPS
    expected = -(-KEPT * groups // multiple) * multiple
    everyone = gather_object([found])
    for step in range(2):
        rows, kept, dropped = zip(*(of_rank[step] for of_rank in everyone), strict=True)
        of_both, left = list(chain(*kept)), list(chain(*dropped))
        assert rows[0] == rows[1] == [expected // multiple] * STEPS
        assert len(of_both) == math.ceil(SHARE * len(of_both + left))
        assert min(of_both) >= max(left)
        assert max(map(min, kept)) > min(of_both)  # the bound is not each rank's own
    for value in run.weights.values():
        of_ranks = run.trainer.accelerator.gather(value.flatten()).view(RANKS, -1)
        assert torch.equal(of_ranks[0], of_ranks[1])
    assert GROUP > KEPT
    print("both ranks agree", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
