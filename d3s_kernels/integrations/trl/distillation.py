"""TRL's distillation from a teacher on a server, with our LM head.

The server sends the teacher's log-probabilities at some ids of each position. TRL computes the student's
log-probabilities of the whole vocabulary, and gathers the same ids from them.
:func:`d3s_kernels.linear_token_logprobs` computes only these ids, without the logits. TRL still does everything else.

TRL's ``DistillationTrainer`` is not here: it has teacher and student in one process, and compares them at all ids.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, pad
from trl.experimental.async_distillation import AsyncDistillationTrainer
from trl.experimental.async_distillation import async_distillation_trainer as trl_async
from trl.experimental.server_distillation import ServerDistillationTrainer

from ..._lm_head.from_model import HeadArguments, lm_head, read_head, why_not_here
from ..._lm_head.own_logits import ModelHead
from ...logprobs.token_logprobs import linear_token_logprobs
from .head import check_head, require_same_logits, say_that_trls_head_is_used, why_not, without_scale
from .step import UnknownTRL

# TRL takes the mass outside of the given ids as at least 1e-7. Below, its logarithm is a constant without a gradient.
_LEAST_TAIL = math.log(-math.expm1(-1e-7))
_TRLS_LOSS = trl_async._chunked_jsd_loss
_PARAMETERS = (
    "hidden_valid lm_head_weight lm_head_bias logit_scale final_logit_softcapping target_ids teacher_target_logps "
    "valid_candidate_mask beta temperature add_tail_bucket teacher_id_idx num_teachers chunk_size"
)


class D3SAsyncDistillationTrainer(AsyncDistillationTrainer):  # type: ignore[misc]  # TRL has no types
    """``AsyncDistillationTrainer`` with our LM head. It has the same arguments, methods and metrics.

    Loss and gradient are TRL's, except for rounding. Products are in float32 as in TRL, except that bfloat16 or float16
    stays as it is where hidden states and weight both have it; then the gradient of the logits is rounded to it.

    Raises:
        d3s_kernels.UnsupportedHead: the LM head has an adapter, or TRL's reading of it does not give the model's own
            logits.
        UnknownTRL: TRL's loss does not call the function that this trainer replaces.

    Example:
        >>> from d3s_kernels.integrations.trl import D3SAsyncDistillationTrainer
        >>> trainer = D3SAsyncDistillationTrainer(folder, args, train_dataset=prompts, **worker)
        >>> trainer.train().global_step
        1
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        require_known_loss(super()._compute_loss)
        super().__init__(*arguments, **options)
        check_head(self.accelerator.unwrap_model(self.model))

    def _compute_loss(self, unwrapped_model: Any, inputs: dict[str, Tensor]) -> Tensor:
        trl_async._chunked_jsd_loss = partial(jsd_loss, read_head(unwrapped_model))
        try:
            loss: Tensor = super()._compute_loss(unwrapped_model, inputs)
        finally:
            trl_async._chunked_jsd_loss = _TRLS_LOSS
        return loss


def require_known_loss(compute_loss: Callable[..., Any]) -> None:
    """Checks that TRL's loss calls the function that is replaced, and with the arguments that ours has.

    Raises:
        UnknownTRL: it does not.
    """
    function, found = inspect.unwrap(compute_loss), " ".join(inspect.signature(_TRLS_LOSS).parameters)
    code = getattr(function, "__code__", None)
    if code is None or "_chunked_jsd_loss" not in code.co_names or found != _PARAMETERS:
        raise UnknownTRL(
            f"{function.__module__}.{function.__qualname__}: does not call _chunked_jsd_loss({_PARAMETERS}), which is "
            f"replaced by a loss with our LM head. The function's parameters are {found}"
        )


def jsd_loss(
    head: ModelHead,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    logit_scale: float,
    final_logit_softcapping: float | None,
    token_ids: Tensor,
    teacher: Tensor,
    candidates: Tensor,
    beta: float,
    temperature: float,
    add_tail: bool,
    teacher_of_position: Tensor | None,
    teachers: int,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes the sums that TRL's ``_chunked_jsd_loss`` computes, with its arguments, for the positions ``[N]`` in the
    loss. ``teacher``, ``[N, K]``, has the teacher's log-probabilities at ``token_ids``. Where ``candidates`` is False,
    there is no id.
    """
    require_same_logits(head, logit_scale, final_logit_softcapping)
    reason = why_not(hidden, weight, hidden.dtype, logit_scale)
    if reason is not None:
        say_that_trls_head_is_used(reason)
        theirs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = _TRLS_LOSS(
            hidden, weight, bias, logit_scale, final_logit_softcapping, token_ids, teacher, candidates, beta,
            temperature, add_tail, teacher_of_position, teachers, chunk_size,
        )  # fmt: skip
        return theirs
    temperature, softcap = without_scale(logit_scale, temperature, final_logit_softcapping)
    found = linear_token_logprobs(
        hidden, weight, token_ids.masked_fill(~candidates, -1), bias=bias, temperature=temperature,
        logit_softcap=softcap, max_grad_rows=len(hidden),
    )  # fmt: skip
    student, teacher = found.logprobs, torch.where(candidates, teacher, -torch.inf)
    if add_tail:
        student = torch.cat([student, found.tail_logprob.clamp(min=_LEAST_TAIL).unsqueeze(-1)], dim=-1)
        teacher, support = trl_async._add_tail_bucket(teacher, candidates)
    else:
        student, teacher = (part - part.logsumexp(dim=-1, keepdim=True) for part in (student, teacher))
        support = candidates
    divergence = trl_async._jsd_divergence(student, teacher, beta=beta, support_mask=support)
    with torch.no_grad():  # TRL's metrics
        of_position = divergence.sum(dim=-1)
        plogp = torch.where(support, teacher.exp() * teacher, 0.0)
        teacher_entropy = torch.nan_to_num(-plogp.sum(dim=-1), nan=0.0)
        of_teachers = of_position.new_zeros(3 * teachers)
        if teacher_of_position is not None:
            own = teacher_of_position == torch.arange(teachers, device=hidden.device).unsqueeze(-1)
            parts = (own.float(), torch.where(own, of_position, 0.0), torch.where(own, teacher_entropy, 0.0))
            of_teachers = torch.stack([part.sum(dim=-1) for part in parts], dim=-1).flatten()
        entropy = found.entropy.detach().sum()
    return divergence.sum(), of_position.sum(), entropy, teacher_entropy.sum(), of_teachers


class D3SServerDistillationTrainer(ServerDistillationTrainer):  # type: ignore[misc]  # TRL has no types
    """``ServerDistillationTrainer`` with our LM head. It has the same arguments, methods and metrics.

    Loss and gradient are TRL's, except for rounding. The LM head computes only the positions in the loss. Under mixed
    precision, TRL rounds the student's logits to half precision; ours are not rounded.

    Raises:
        d3s_kernels.UnsupportedHead: the LM head has an adapter, or does more than a linear layer, a scale and a soft
            cap.
        UnknownTRL: TRL's loss does something else with the logits than to gather log-probabilities.

    Example:
        >>> from d3s_kernels.integrations.trl import D3SServerDistillationTrainer
        >>> trainer = D3SServerDistillationTrainer(policy, args, prompts, processing_class=tokenizer)
        >>> trainer.train().global_step
        1
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head()

    def _head(self) -> HeadArguments | None:
        """Returns the head's arguments for our op, or None if the op cannot read the weight."""
        model = self.accelerator.unwrap_model(self.model)
        layer = read_head(model).layer
        reason = "ZeRO-3 takes the head's weight away" if hasattr(layer.weight, "ds_id") else why_not_here(layer)
        if reason is not None:
            say_that_trls_head_is_used(reason)
            return None
        return lm_head(model)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        head = self._head()
        if head is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        # TRL calls the model. We call the model's body, within the forward of the wrapper, as DistillationTrainer does.
        unwrapped = self.accelerator.unwrap_model(model)
        loss_of_ids = partial(self._loss_of_ids, unwrapped, inputs, head, num_items_in_batch)
        loss = self._forward_redirection(model, unwrapped, loss_of_ids)
        return (loss, None) if return_outputs else loss

    def _loss_of_ids(self, body: Any, inputs: dict[str, Any], head: HeadArguments, num_items_in_batch: Any) -> Tensor:
        completions = inputs["completion_mask"].bool()
        before = torch.zeros_like(inputs["prompt_mask"], dtype=torch.bool)
        in_loss = pad(torch.cat([before, completions], dim=1)[:, 1:], (0, 1))  # a position predicts the next token

        def model(input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
            with self.accelerator.autocast():
                hidden = self._get_last_hidden_state(body, input_ids, attention_mask, input_ids.shape[1] - 1)
                own = _cast_as_under_autocast(head, hidden.device.type)
            return SimpleNamespace(logits=GatheredLogits(pad(hidden, (0, 0, 0, 1)), in_loss, own))

        loss: Tensor = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        return loss


@dataclass(eq=False)
class GatheredLogits:
    """The student's logits ``[rows, columns, V]`` for TRL's loss, which cuts off columns, divides by a temperature,
    takes the log-softmax and gathers. Only the last step computes something; anything else is an error.
    """

    hidden: Tensor
    in_loss: Tensor
    """bool ``[rows, columns]``: the positions that are computed. At others, all results are 0."""
    head: HeadArguments
    normalized: bool = False
    dtype = torch.float32

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    def __getitem__(self, places: tuple[slice, slice, slice]) -> GatheredLogits:
        rows, columns, ids = places
        if ids != slice(None):
            raise _unknown(f"reads the logits of the ids {ids}")
        return replace(self, hidden=self.hidden[rows, columns], in_loss=self.in_loss[rows, columns])

    def __truediv__(self, temperature: float) -> GatheredLogits:
        scaled: Any = self.head | {"temperature": self.head["temperature"] * temperature}
        return replace(self, head=scaled)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> GatheredLogits:
        known = function is log_softmax and kwargs["dim"] == -1 and kwargs["dtype"] is None
        if not known or args[0].normalized:
            raise _unknown(f"calls {function.__name__} with {kwargs}")
        return replace(args[0], normalized=True)

    def gather(self, dim: int, index: Tensor) -> Tensor:
        if dim != -1 or not self.normalized:
            raise _unknown(f"gathers logits over dimension {dim}")
        hidden = self.hidden.to(self.head["weight"].dtype)
        return linear_token_logprobs(hidden, token_ids=index, mask=self.in_loss, **self.head).logprobs

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _unknown(f"reads {name} of the logits")


def _cast_as_under_autocast(head: HeadArguments, device: str) -> HeadArguments:
    if not torch.is_autocast_enabled(device):
        return head
    dtype, bias = torch.get_autocast_dtype(device), head["bias"]
    return {**head, "weight": head["weight"].to(dtype), "bias": None if bias is None else bias.to(dtype)}


def _unknown(does: str) -> UnknownTRL:
    return UnknownTRL(
        f"compute_loss: TRL's loss {does}, instead of only gathering log-probabilities of the last dimension"
    )
