"""While transformers generates, records the set of ids from which each token is drawn. For TRL and your own loop.

transformers runs its own top-k, top-p and min-p after all processors that are passed to ``generate``. So the recorder
is added to the list that ``_get_logits_processor`` returns: at the end of this list, the recorder sees the scores that
are sampled from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

NO_TOKEN = -1  # pads the sets
# Processors that only drop ids and do not change the other scores: the support records their whole effect.
_CUTS = {
    "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper", "TopHLogitsWarper", "TypicalLogitsWarper",
    "EpsilonLogitsWarper", "EtaLogitsWarper", "SuppressTokensLogitsProcessor",
}  # fmt: skip
_STEPS_AT_ONCE = 64  # after this many steps, unused columns of the sets are cut off


class Recorded(NamedTuple):
    """The record of a batch of completions. Each completion is padded on the right."""

    sets: Tensor
    """int32 ``[rows, tokens, width]``: the ids that could be drawn, padded with -1."""
    logprob: Tensor
    """float32 ``[rows, tokens]``: the log-probability of the drawn token among the tokens of its set."""
    log_mass: Tensor
    """float32 ``[rows, tokens]``: the log-probability of the whole set, before the other ids were dropped."""

    def in_columns(self, columns: int) -> Recorded:
        """Returns the same record with completions padded to ``columns`` tokens."""
        more = columns - self.logprob.shape[1]
        sets = pad(self.sets, (0, 0, 0, more), value=NO_TOKEN)
        return Recorded(sets, pad(self.logprob, (0, more)), pad(self.log_mass, (0, more)))


class Recorder:
    """Two logits processors: one runs before transformers' own processors, one after them. The two only read the
    scores.
    """

    def __init__(self, max_kept: int) -> None:
        self._max_kept = max_kept
        self._temperature = 1.0
        self._scores: Tensor | None = None  # the scores of the current step, until its token is drawn
        self._whole: list[Tensor] = []  # for each step, float32 [rows]: logsumexp over the vocabulary
        self._kept: list[Tensor] = []  # for each step, float32 [rows]: logsumexp over the set
        self._drawn: list[Tensor] = []  # for each finished step, float32 [rows]: the drawn token's score
        self._sizes: list[Tensor] = []  # for each step, int64 [rows]: the size of the set
        self._sets: list[Tensor] = []  # for each step since the last _narrow(), int32 [rows, max_kept]: the sets
        self._narrowed: list[Tensor] = []  # int32 [rows, steps, width]: the sets of all earlier steps

    def around(self, processors: list[Any]) -> list[Any]:
        """Inserts the recorder's processors at both ends of ``processors``, the list for one generation. Refuses
        processors whose effects cannot be recorded.
        """
        self._temperature, others = 1.0, []
        for processor in processors:
            name = type(processor).__name__
            if name == "TemperatureLogitsWarper":
                self._temperature *= processor.temperature
            elif name not in _CUTS:
                others.append(name)
        if others:
            raise ValueError(
                f"generate: it changes scores by {', '.join(others)}, which the sets of tokens do not "
                "record; takes a temperature and what only leaves tokens out, such as top_k, top_p and min_p"
            )
        processors.insert(0, self._before)
        processors.append(self._after)
        return processors

    def _before(self, tokens: Tensor, scores: Tensor) -> Tensor:
        self._whole.append((scores.float() / self._temperature).logsumexp(1))
        return scores

    def _after(self, tokens: Tensor, scores: Tensor) -> Tensor:
        if self._scores is not None:
            self._draw(tokens[:, -1])
        self._scores = scores = scores.float()
        self._sizes.append((scores > -torch.inf).sum(1))
        highest = scores.topk(min(self._max_kept, scores.shape[1]), dim=1)
        self._kept.append(highest.values.logsumexp(1))  # over the whole set: recorded() refuses sets above max_kept
        self._sets.append(highest.indices.int().masked_fill(highest.values == -torch.inf, NO_TOKEN))
        if len(self._sets) == _STEPS_AT_ONCE:
            self._narrow()
        return scores

    def _draw(self, tokens: Tensor) -> None:
        assert self._scores is not None
        self._drawn.append(self._scores.gather(1, tokens.unsqueeze(1)).squeeze(1))

    def _narrow(self) -> None:
        """Cuts off the columns that no row of ``_sets`` needs, and appends the result to ``_narrowed``. This causes a
        host sync.
        """
        sets = torch.stack(self._sets, dim=1)
        width = int(torch.stack(self._sizes[-len(self._sets) :]).amax())
        self._narrowed.append(sets[:, :, :width].clone())
        self._sets.clear()

    def recorded(self, completions: Sequence[Sequence[int]]) -> Recorded:
        """Returns the record of these completions. Each completion ends with its first end-of-sequence token.

        Raises:
            ValueError: a token was drawn from more than ``max_kept`` ids.
            RuntimeError: the completions do not match the recorded steps.
        """
        lengths = [len(tokens) for tokens in completions]
        steps, columns = len(self._sizes), max(lengths, default=0)
        if not 0 < columns <= steps or self._sizes[0].shape != (len(lengths),):
            raise RuntimeError(
                f"completions: {steps} steps of generation were recorded for {len(lengths)} completions of at most "
                f"{columns} tokens; takes one call of transformers' generate, with a row and a step for each token"
            )
        if self._sets:
            self._narrow()
        device = self._sizes[0].device
        self._draw(torch.tensor([row[-1] if len(row) == steps else 0 for row in completions], device=device))

        recorded = torch.arange(columns, device=device) < torch.tensor(lengths, device=device).unsqueeze(1)
        sizes, kept, whole, drawn = (
            torch.stack(part[:columns], dim=1).masked_fill(~recorded, 0)
            for part in (self._sizes, self._kept, self._whole, self._drawn)
        )
        wide, outside = sizes > self._max_kept, ~(drawn > -torch.inf)
        if bool((wide | outside).any()):
            row, column = (wide | outside).nonzero()[0].tolist()
            if outside[row, column]:
                raise RuntimeError(f"completions: token {column} of rollout {row} could not be drawn from its set")
            raise ValueError(
                f"max_kept: got {self._max_kept}, but token {column} of rollout {row} was drawn from "
                f"{int(sizes[row, column])} tokens; takes at least that, or sampling with top_k"
            )

        width = max(part.shape[2] for part in self._narrowed)
        sets = torch.cat([pad(part, (0, width - part.shape[2]), value=NO_TOKEN) for part in self._narrowed], dim=1)
        sets = sets[:, :columns, : max(1, int(sizes.amax()))].masked_fill(~recorded.unsqueeze(2), NO_TOKEN)
        return Recorded(sets, drawn - kept, kept - whole)


@contextmanager
def recording(model: Any, max_kept: int) -> Iterator[Recorder]:
    """Records the steps of a model's ``generate`` in a ``with`` block. With PEFT, the base model is recorded.

    Args:
        model: a transformers model. Call its ``generate`` once in the block, with sampling.
        max_kept: the maximum number of ids in a set; :meth:`Recorder.recorded` refuses larger sets.

    Raises:
        ValueError: raised by ``generate`` if a processor changes scores in another way than by a temperature or by
            dropping ids.

    Example:
        >>> import torch, d3s_kernels as d3s
        >>> from d3s_kernels.support.recorder import recording
        >>> with recording(model, max_kept=64) as recorder:
        ...     tokens = model.generate(**prompts, do_sample=True, top_k=8, max_new_tokens=4)
        >>> recorded = recorder.recorded(completions(tokens))  # lists of token ids, up to the first end of sequence
        >>> recorded.sets.shape[0], recorded.sets.shape[2]  # 4 rows, sets of 8 tokens
        (4, 8)
        >>> mask = d3s.SamplingMask.from_padded(recorded.sets.flatten(0, 1))
    """
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    recorder, processors_of = Recorder(max_kept), model._get_logits_processor
    replaced = vars(model).get("_get_logits_processor")  # other code may already have replaced this method on the model
    model._get_logits_processor = lambda *args, **options: recorder.around(processors_of(*args, **options))
    try:
        yield recorder
    finally:
        del model._get_logits_processor
        if replaced is not None:
            model._get_logits_processor = replaced
