"""What the trainer knows in each part of a step.

TRL calls our methods one after the other, and passes none of our values from one call to the next. So the trainer
stores all values that a later call needs in one attribute: a :class:`Now`, which is replaced and never changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._lm_head.forward import HostNumber
from ...support.recorder import Recorded
from .batch import FIELDS, Batch
from .head import OurHead, ScoredModel
from .page import PageOfBatch

Scores = tuple[Tensor, Tensor | None, Tensor | None]  # log-probabilities, entropies, router loss
OLD, REFERENCE = "old_per_token_logps", "ref_per_token_logps"  # batch fields with results of passes without gradient
RATIO = "importance_sampling_ratio"  # a batch field: TRL's factors where it corrects vLLM's probabilities


class UnknownTRL(RuntimeError):
    """The error if TRL, or a subclass of our trainer, does something that the selection does not support."""


class Passes:
    """The passes without gradient over one generation batch. Some are postponed until the rollouts are chosen."""

    def __init__(self, names: list[str]) -> None:
        self.names = names  # the passes that TRL has not asked for yet, each named after the batch field that it fills
        self.postponed: dict[str, Tensor] = {}  # the placeholders that were returned to TRL, by the name of the pass
        self.entropy: Tensor | None = None

    def next(self, of_reference: bool) -> str:
        """Returns the name of the pass that TRL asks for now, and removes it from ``names``."""
        name = REFERENCE if of_reference and REFERENCE in self.names else self.names[0]
        self.names.remove(name)
        return name

    def postpone(self, name: str, rows: int, columns: int) -> Tensor:
        """Postpones a pass, and returns a placeholder for the pass's result. A plain tensor on the meta device would
        not be enough: torch adds such a tensor to another tensor in place without an error.
        """
        self.postponed[name] = torch.empty(rows, columns, device="meta").as_subclass(_Postponed)
        return self.postponed[name]

    def without_postponed(self, batch: Batch) -> Batch:
        """Returns TRL's batch without the placeholders of postponed passes. Raises an UnknownTRL in three cases: TRL
        skipped a pass; TRL put the result of a pass into another field; or the batch has a field whose padding side is
        unknown.
        """
        if self.names:
            raise UnknownTRL(
                f"_generate_and_score_completions: no pass came for {' and '.join(self.names)}, which the loss needs; "
                "TRL makes its passes under other conditions than those in D3STrainer._pass_names"
            )
        for name, placeholder in self.postponed.items():
            if batch.get(name) is not placeholder:
                raise UnknownTRL(
                    f"{name}: the batch of _generate_and_score_completions does not have there what the pass for it "
                    "returned"
                )
        if unknown := sorted(batch.keys() - FIELDS):
            raise UnknownTRL(
                f"_generate_and_score_completions: its batch has {', '.join(unknown)}, which is not known; rows of it "
                "cannot be chosen, since nothing says on which side it is padded"
            )
        return {name: value for name, value in batch.items() if name not in self.postponed}


class _Postponed(Tensor):
    """The placeholder for log-probabilities that are not computed yet. Any use of it raises an error."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", str(function))
        raise UnknownTRL(
            f"_generate_and_score_completions: {name} reads log-probabilities before the rollouts are chosen; these "
            "are scored afterwards, since neither rewards nor advantages need them in the versions that were tested"
        )


class Call(NamedTuple):
    """A call of TRL's method that scores tokens."""

    method: Callable[..., Scores]
    head: OurHead
    model: Any
    sets: Tensor | None  # the sets that the tokens were drawn from, for the last columns
    needed: Tensor | None  # marks which of the last columns' tokens are scored; None: all tokens
    tokens: Tensor
    attention: Tensor
    columns: int  # the number of scored columns, which are the last columns of ``tokens``
    more: tuple[Any, ...]  # further arguments; the first one is the number of rows that TRL scores at a time
    options: dict[str, Any]  # further arguments by name: what to compute, and images

    def scores(self) -> Scores:
        model = ScoredModel(self.model, self.head, self.sets, self.needed)
        return self.method(model, self.tokens, self.attention, self.columns, *self.more, **self.options)

    def is_like(self, other: Call) -> bool:
        """Whether both calls ask for the same scores, of the same number of rows and columns."""

        def asked(call: Call) -> dict[str, Any]:
            return {name: value for name, value in call.options.items() if value is not None and value is not False}

        ours, theirs = asked(self), asked(other)
        return (
            self.columns == other.columns
            and self.model is other.model
            and self.more == other.more
            and ours.keys() == theirs.keys()
            and all(value is theirs[name] for name, value in ours.items())
            and self.tokens.shape == other.tokens.shape  # comparing the tokens would cause a host sync
        )


# ---- what is known when ----------------------------------------------------------------------------------------------


@dataclass
class Generating:
    """Known while TRL makes a generation batch. Our methods add values when TRL calls them."""

    passes: Passes
    recorded: Recorded | None = None  # the sets of the tokens, if they are recorded
    rewards: Tensor | None = None  # all processes' rewards, by function; None if a subclass does not compute them


class Generated(NamedTuple):
    """A generation batch, before any rollout is dropped."""

    batch: Batch
    rewards: Tensor | None
    postponed: tuple[str, ...]  # the passes that are made over the chosen rollouts


class Choice(NamedTuple):
    """Which tokens of a batch get a gradient."""

    kept: Tensor
    threshold: Tensor
    weight: Tensor | float  # the factor of each token's gradient
    trusted: Tensor  # marks the tokens whose loss has a weight above 0


class Loss(NamedTuple):
    """Known while TRL computes the loss of a micro-batch."""

    call: Call  # what TRL asks for
    scores: Scores | None  # the result of the call; None: TRL has already received it
    inputs: Batch  # what TRL's loss reads
    clip_range: tuple[Any, Any]  # TRL's epsilons: numbers; with ESPO, a tensor with a value for each token
    # Numbers of tokens over all processes: of kept tokens, of all tokens, of tokens whose loss has a weight above 0,
    # and of kept tokens whose loss has a weight above 0.
    counted: HostNumber


class OptimizerStep(NamedTuple):
    """How far the current optimizer step is."""

    done: int = 0  # the number of micro-batches that TRL has received
    waiting: tuple[Batch, ...] = ()  # divided micro-batches that TRL has not received yet


class Now(NamedTuple):
    """All that the trainer knows between two of TRL's calls."""

    rollouts_chosen: bool = False  # whether rollouts were chosen from a generation batch, to train on them
    page: PageOfBatch | None = None  # the page of this generation batch; several steps may train on the batch
    optimizer_step: OptimizerStep = OptimizerStep()
    within: Generating | Loss | None = None  # the part of TRL's code that runs
    last_page: int | None = None  # the step of the latest page in this run
    selections: int = 0  # how many gradients were restricted to the kept tokens
