"""The LM head in the place of a Megatron model's output layer."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..._lm_head.own_logits import ModelHead, Seen, UnsupportedHead, difference
from .checks import require_known, require_no_labels, require_shard, require_version, with_output_layer
from .shard import gathered, shard_logprob_entropy

_FEW = 4  # the number of positions of a trial

# For each output layer, the states of the model in which its logits were compared.
_verified: WeakKeyDictionary[Any, set[Any]] = WeakKeyDictionary()


class LMHead:
    """Computes log-probabilities and entropies in place of the logits of a Megatron model.

    While the head is in place (``with head:``, or from ``install()`` to ``remove()``), the model's output layer only
    keeps its input, the last hidden states, and the model returns an empty tensor. :meth:`logprob_entropy` then
    computes the rows that count. So a trainer can call the model itself, through wrappers and in a pipeline schedule.
    The layer is still called, so its hooks run. On pipeline stages without an output layer nothing is replaced, and
    the model returns its hidden states for the next stage.

    In the first call in each mode (training or not), the layer computes the logits of four positions, which pass
    through the rest of the model's forward. They are compared with this head's formula. If they differ on one
    tensor-parallel rank, all of these ranks raise an error. ``docs/megatron.md`` has examples.

    Args:
        model: a ``GPTModel`` of Megatron-Core, a model whose ``language_model`` is one, or a wrapper of these
            (``Float16Module``, ``DistributedDataParallel``).
        vocab_size, logit_softcap: as in :func:`shard_logprob_entropy`.

    Raises:
        UnsupportedHead: an output layer that is not known, or that has an adapter; a weight that is quantised, or whole
            on each rank; multi-token prediction; a deferred gradient of the weight; a model whose logits do not follow
            from the formula.
        ImportError: a version of Megatron-Core that the tests do not cover.
    """

    def __init__(self, model: Any, *, vocab_size: int | None = None, logit_softcap: float | None = None) -> None:
        require_version()
        self._model = with_output_layer(model)
        self.layer: Any = getattr(self._model, "output_layer", None)
        """The model's output layer, or None on other pipeline stages."""
        self._vocab_size, self._softcap = vocab_size, logit_softcap
        self._kept: tuple[Tensor, Tensor] | None = None  # the layer's last input, and its weight or the embedding's
        self._tried: tuple[Tensor, Tensor] | None = None  # the same of a trial
        self._own: Any = None  # the layer's forward while the head is in place
        self._hooks: list[Any] = []
        if self.layer is not None:
            require_known(self._model, self.layer)

    def install(self) -> LMHead:
        """Puts the head in the place of the output layer."""
        if self.layer is None:
            return self
        if "forward" in vars(self.layer):
            raise RuntimeError("LMHead: got an output layer with another forward, maybe of a head; remove it first")
        self._own, self.layer.forward = self.layer.forward, self._forward
        self._hooks = [
            self._model.register_forward_pre_hook(require_no_labels, with_kwargs=True),
            self._model.register_forward_hook(self._compare),
        ]
        return self

    def remove(self) -> None:
        """Puts the output layer back. If it is in its place, nothing happens."""
        for hook in self._hooks:
            hook.remove()
        if self._hooks:
            del self.layer.forward
        self._hooks, self._tried = [], None

    __enter__ = install

    def __exit__(self, *error: object) -> None:
        self.remove()

    def logprob_entropy(self, labels: Tensor, *, mask: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
        """Computes the results of the model's last call. For the next results, the model must be called again.

        Args:
            labels, mask: as in :func:`shard_logprob_entropy`.
            options: ``temperature``, ``max_rows``, ``sampling_mask`` and the other options of that function.

        Returns:
            ``(logprob, entropy)``, float32 ``[b, s]``, the same on all tensor-parallel ranks.

        Raises:
            RuntimeError: there are no hidden states, since the model was not called with the head in place, or has no
                output layer on this pipeline stage.
            ValueError, TypeError: as :func:`shard_logprob_entropy`.
        """
        if self._kept is None:
            why = "this pipeline stage has no output layer" if self.layer is None else "the model was not called"
            raise RuntimeError(f"LMHead: got no hidden states, since {why}")
        if self._tried is not None:
            raise UnsupportedHead(
                "LMHead: the output layer was called without the model's forward (by a schedule plan?), so that the "
                "model's logits cannot be compared; takes a call of the model"
            )
        (hidden, weight), self._kept = self._kept, None
        return shard_logprob_entropy(
            hidden, weight, labels, tp_group=self.layer.tp_group, sequence_parallel=self.layer.sequence_parallel,
            bias=self.layer.bias, vocab_size=self._vocab_size, logit_softcap=self._softcap, mask=mask, **options,
        )  # fmt: skip

    @property
    def _state(self) -> Any:
        return self._model.training, self._softcap

    def _forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """The output layer's forward while the head is in place."""
        parameter: Tensor = self.layer.weight if weight is None else weight
        require_shard(self.layer, parameter, is_embedding=weight is not None)
        self._kept = input_, parameter
        if self._state in _verified.setdefault(self.layer, set()):
            return input_.new_empty(*input_.shape[:2], 0), None
        with torch.no_grad():
            few = _enlarged(input_[:_FEW], parameter)
            self._tried = few, parameter
            return self._own(few, weight=weight, runtime_gather_output=False)[0], None

    def _compare(self, model: Any, args: Any, logits: Any) -> None:
        """Compares the logits that the model returned in a trial with those of the formula."""
        if self._tried is None:
            return
        (hidden, weight), self._tried = self._tried, None
        got = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        error: str | None = (
            f"LMHead: {type(model).__name__} returns {got}; takes logits of this rank's {len(weight)} ids"
        )
        if isinstance(logits, Tensor) and logits.shape[-1:] == weight.shape[:1]:
            if self.layer.sequence_parallel:
                hidden = gathered(hidden, self.layer.tp_group)
            head = ModelHead(model, SimpleNamespace(weight=weight, bias=self.layer.bias), 1.0, self._softcap, False)
            error = difference(head, Seen(hidden.transpose(0, 1), [], set(), logits))
        bad = torch.tensor([error is not None], dtype=torch.uint8, device=weight.device)
        dist.all_reduce(bad, dist.ReduceOp.MAX, self.layer.tp_group)  # no rank goes on alone, and waits for the others
        if bad.item():
            self._kept = None
            raise UnsupportedHead(error or "LMHead: another tensor-parallel rank has logits that differ")
        _verified[self.layer].add(self._state)


def logprob_entropy(
    model: Any,
    input_ids: Tensor,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    *,
    labels: Tensor,
    vocab_size: int | None = None,
    logit_softcap: float | None = None,
    packed_seq_params: Any = None,
    model_arguments: Mapping[str, Any] | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Runs a Megatron model up to its last hidden states, and then the LM head over the rows that count.

    Args:
        model, vocab_size, logit_softcap: as in :class:`LMHead`.
        input_ids, position_ids, attention_mask, packed_seq_params: as in ``GPTModel.forward``.
        labels, options: as in :meth:`LMHead.logprob_entropy`.
        model_arguments: further arguments of the model's forward.

    Returns:
        On the last pipeline stage ``(logprob, entropy)``, float32 ``[b, s]``. On another stage, what the model returns
        for the next one.

    Raises:
        UnsupportedHead, ValueError, TypeError: as :class:`LMHead` and its method.
    """
    arguments = dict(model_arguments or {})
    if packed_seq_params is not None:
        arguments["packed_seq_params"] = packed_seq_params
    with LMHead(model, vocab_size=vocab_size, logit_softcap=logit_softcap) as head:
        output: Tensor = model(input_ids, position_ids, attention_mask, **arguments)
    return output if head.layer is None else head.logprob_entropy(labels, **options)


def _enlarged(hidden: Tensor, weight: Tensor) -> Tensor:
    """Scales the hidden states of all positions but the first, so that their largest logits are 60, where a soft cap
    shows.
    """
    largest = (hidden.to(weight.dtype) @ weight.t()).float().abs().amax(-1, keepdim=True)
    factor = torch.where(largest.isfinite() & (largest > 0), 60 / largest, 1.0)
    factor[0] = 1
    return (hidden * factor).to(hidden.dtype)
