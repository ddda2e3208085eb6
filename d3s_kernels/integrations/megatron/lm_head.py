"""The LM head in the place of a Megatron model's output layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..._lm_head.own_logits import ModelHead, Seen, UnsupportedHead, difference
from .checks import require_known, require_shard, require_version, with_output_layer
from .shard import gathered, shard_logprob_entropy

_FEW = 4  # the number of positions of a trial

# For each output layer, the states of the model in which its logits were compared.
_verified: WeakKeyDictionary[Any, set[Any]] = WeakKeyDictionary()


class LMHead:
    """Computes log-probabilities and entropies in place of the logits of a Megatron model.

    While the head is in place (``with head:``, or from ``install()`` to ``remove()``), the model's output layer only
    keeps its input, the last hidden states, and the model returns logits of no ids, ``[b, s, 0]``. The method
    :meth:`logprob_entropy` then computes the rows that count. So a trainer can call the model itself, through wrappers
    and in a pipeline schedule. The layer is still called, so its hooks run. On pipeline stages without an output layer
    nothing is replaced, and the model returns its hidden states for the next stage.

    In the first call in each mode (training or not), the layer computes the logits of four positions, which pass
    through the rest of the model's forward, and are compared with this head's formula. If one tensor-parallel rank
    finds a difference, or cannot read its weight, all of these ranks raise an error.

    Args:
        model: a ``GPTModel`` of Megatron-Core, a model whose ``language_model`` is one, or a wrapper of these
            (``Float16Module``, ``DistributedDataParallel``).
        vocab_size, logit_softcap: as in :func:`shard_logprob_entropy`.

    Raises:
        UnsupportedHead: an output layer that is not known, or has an adapter; a weight that is quantised, or whole on
            each rank; multi-token prediction; a deferred gradient of the weight; a schedule that overlaps experts'
            communication.
        ImportError: a version of Megatron-Core that the tests do not cover.
    """

    def __init__(self, model: Any, *, vocab_size: int | None = None, logit_softcap: float | None = None) -> None:
        require_version()
        self._model = with_output_layer(model)
        self.layer: Any = getattr(self._model, "output_layer", None)
        """The model's output layer, or None on other pipeline stages."""
        self._vocab_size, self._softcap = vocab_size, logit_softcap
        self._kept: tuple[Tensor, Tensor] | None = None  # the layer's last input, and its weight or the embedding's
        self._tried: tuple[Any, Tensor, Tensor] | None = None  # the state, and the same, of a trial
        self._hooks: list[Any] = []
        if self.layer is not None:
            require_known(self._model, self.layer)

    def install(self) -> LMHead:
        """Puts the head in the place of the output layer."""
        if self.layer is None:
            return self
        if "forward" in vars(self.layer):
            raise RuntimeError("LMHead: got an output layer with another forward, maybe of a head; remove it first")
        self.layer.forward = self._forward
        self._hooks = [
            self._model.register_forward_pre_hook(self._begin, with_kwargs=True),
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

    @property
    def shape(self) -> tuple[int, int]:
        """``(b, s)``, the rows of the model's last call. Raises a RuntimeError if there are none."""
        rows, sequences, _ = self._hidden_and_weight()[0].shape
        return sequences, rows * (self.layer.tp_group.size() if self.layer.sequence_parallel else 1)

    def logprob_entropy(
        self, labels: Tensor, *, mask: Tensor | None = None, keep: bool = False, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Computes the results of the model's last call.

        Args:
            labels, mask: as in :func:`shard_logprob_entropy`.
            keep: True keeps the hidden states for further calls of this method, until the model's next call. False
                frees them with the results.
            options: ``temperature``, ``max_rows``, ``sampling_mask`` and the other options of that function.

        Returns:
            ``(logprob, entropy)``, float32 ``[b, s]``, the same on all tensor-parallel ranks.

        Raises:
            RuntimeError: there are no hidden states, since the model was not called with the head in place, or has no
                output layer on this pipeline stage.
            UnsupportedHead: the model's forward was not called as a whole, so that its logits could not be compared.
            ValueError, TypeError: as :func:`shard_logprob_entropy`.
        """
        hidden, weight = self._hidden_and_weight()
        if self._tried is not None:
            raise UnsupportedHead(
                "LMHead: got an output layer that the model's forward did not call; takes its forward"
            )
        if not keep:
            self._kept = None
        layer = self.layer
        return shard_logprob_entropy(
            hidden, weight, labels, tp_group=layer.tp_group, sequence_parallel=layer.sequence_parallel, bias=layer.bias,
            vocab_size=self._vocab_size, logit_softcap=self._softcap, mask=mask, **options,
        )  # fmt: skip

    def _hidden_and_weight(self) -> tuple[Tensor, Tensor]:
        if self._kept is None:
            why = "this pipeline stage has no output layer" if self.layer is None else "the model was not called"
            raise RuntimeError(f"LMHead: got no hidden states, since {why}")
        return self._kept

    def _begin(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the model's forward."""
        self._kept = None  # if this call fails, an earlier one's hidden states give no results
        if kwargs.get("labels") is not None or (len(args) > 4 and args[4] is not None):
            raise ValueError("labels: got a tensor in a call of the model; takes None there, and the head gets them")

    def _forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """The output layer's forward while the head is in place."""
        layer = self.layer
        parameter: Tensor = layer.weight if weight is None else weight
        self._kept = input_, parameter
        state = self._model.training, self._softcap, *map(id, layer._forward_hooks.values())
        if state in _verified.setdefault(layer, set()):
            return input_.new_empty(*self.shape[::-1], 0), None
        try:
            require_shard(layer, parameter)
            error = None
        except UnsupportedHead as found:
            error = str(found)
        self._agree(error)
        with torch.no_grad():
            few = _enlarged(input_[:_FEW], parameter)
            self._tried = state, few, parameter
            logits, _ = type(layer).forward(layer, few, weight=weight, runtime_gather_output=False)
        return logits, None

    def _compare(self, model: Any, args: Any, logits: Any) -> Tensor | None:
        """Compares the logits that the model returned in a trial with those of the formula. Replaces them."""
        if self._tried is None:
            return None
        (state, hidden, weight), self._tried = self._tried, None
        got = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        error: str | None = (
            f"LMHead: {type(model).__name__} returns {got}; takes logits of this rank's {len(weight)} ids"
        )
        if isinstance(logits, Tensor) and logits.shape[-1:] == weight.shape[:1]:
            if self.layer.sequence_parallel:
                hidden = gathered(hidden, self.layer.tp_group)
            head = ModelHead(model, SimpleNamespace(weight=weight, bias=self.layer.bias), 1.0, self._softcap, False)
            error = difference(head, Seen(hidden.transpose(0, 1), [], set(), logits))
        self._agree(error)
        _verified[self.layer].add(state)
        return logits.new_empty(*self.shape, 0)

    def _agree(self, error: str | None) -> None:
        """Raises on all tensor-parallel ranks if one of them has an error, since the others would wait for it."""
        bad = torch.tensor([error is not None], dtype=torch.uint8, device=self._hidden_and_weight()[0].device)
        dist.all_reduce(bad, dist.ReduceOp.MAX, self.layer.tp_group)
        if bad.item():
            self._kept = None
            raise UnsupportedHead(error or "LMHead: another tensor-parallel rank refuses its weight or its logits")


def _enlarged(hidden: Tensor, weight: Tensor) -> Tensor:
    """Scales hidden states so that the largest logits of a position are 60, where a soft cap shows. The second position
    stays as it is.
    """
    largest = (hidden.to(weight.dtype) @ weight.t()).float().abs().amax(-1, keepdim=True)
    factor = torch.where(largest.isfinite() & (largest > 0), 60 / largest, 1.0)
    factor[1:2] = 1
    room = torch.finfo(hidden.dtype).max / 64 / hidden.abs().amax(-1, keepdim=True).float()
    return (hidden * factor.minimum(room)).to(hidden.dtype)
