"""Finds the arguments of the LM head's ops for a model, and verifies them against the model's own logits."""

from __future__ import annotations

import numbers
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.nn import Module

from .._arguments.checks import require_temperature, why_unreadable
from .own_logits import ModelHead, UnsupportedHead, text_of, verified_head
from .problem import FLOATS, why_not_whole

# Names of numbers in transformers configurations. In _FACTORS, the value of a name is 1 if models multiply their logits
# by this number, and -1 if they divide their logits by it.
_FACTORS = {"logit_scale": 1, "output_multiplier": 1, "lm_head_multiplier": 1, "logits_scaling": -1}
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")

# For each wrapper that does not change logits, the attribute that holds the wrapped model.
_WRAPPERS = {
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "_fsdp_wrapped_module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.optim.swa_utils.AveragedModel": "module",
    "deepspeed.runtime.engine.DeepSpeedEngine": "module",
}
_DDP = "torch.nn.parallel.distributed.DistributedDataParallel"
_PEFT = {"peft.peft_model.PeftModel", "peft.mixed_model.PeftMixedModel"}


class HeadArguments(TypedDict):
    """The result of :func:`lm_head`: a model's arguments for :func:`d3s_kernels.linear_logprob_entropy`."""

    weight: Tensor
    bias: Tensor | None
    temperature: float | Tensor
    logit_softcap: float | None


def lm_head(model: Module, temperature: float | Tensor = 1.0, *, verify: bool = True) -> HeadArguments:
    """Returns the arguments that make :func:`d3s_kernels.linear_logprob_entropy` use the same logits as a model.

    Many models do more than multiply by ``lm_head.weight``: they scale their logits (Granite, Cohere, Falcon-H1), cap
    them (Gemma 2) or add a bias (Phi). With ``z = scale * (hidden @ weight.T + bias)`` and a soft cap c, their logits
    are ``c tanh(z / c)``. The op has no argument for the scale. So this function returns a soft cap of ``c / scale``
    and a temperature of ``temperature / scale``, which have the same effect. It reads the scale and the cap from the
    configuration, and then **verifies** them in a forward of four tokens. The model's logits must be equal to the
    logits that follow from the model's hidden states and the returned arguments, even where logits are so large that a
    soft cap changes them. So a model that does anything else to its logits is refused.

    The hidden states are the ``last_hidden_state`` of the model's body. Most models have their body in the attribute
    ``model``; all models of transformers have it in the attribute ``base_model``. A model that changes the hidden
    states before its head (MiniCPM3, T5 with tied weights) is refused. A module without such a body is accepted if it
    has ``get_output_embeddings()`` and if its forward takes token ids and returns logits. The hidden states of such a
    module are the input of its head.

    Call this function at each step, right before the op, since it returns the current weight tensors. Call it outside
    of ``torch.compile``. The check runs once for each model, head and mode (training or not). It runs again after a
    change of the hooks or of the ``forward`` of the model or its head. The check does not change the mode, gradients or
    random state. In a process group, all ranks must call this function.

    Args:
        model: a causal language model of transformers, with or without PEFT; or a module as described above.
        temperature: the sampling temperature: a number above 0 (in [1e-15, 1e15]), or a float tensor that broadcasts to
            the rows.
        verify: False skips the check.

    Returns:
        ``weight``, ``bias``, ``temperature`` and ``logit_softcap``, to be passed on with ``**``. Weight and bias are
        the model's own tensors, so that the model gets the gradients.

    Raises:
        UnsupportedHead: the head has an adapter (but ``modules_to_save`` is accepted); the model's logits differ from
            the logits that follow from the returned arguments; between its hidden states and its logits, the model
            applies parameters other than the head's weight and bias; the weight is sharded, quantised, offloaded or on
            the meta device.

    Example:
        >>> import torch, d3s_kernels as d3s
        >>> class Policy(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.body, self.head = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50)
        ...     def get_output_embeddings(self):
        ...         return self.head
        ...     def forward(self, input_ids):
        ...         return self.head(self.body(input_ids))
        >>> policy, tokens = Policy(), torch.tensor([[3, 1, 4]])
        >>> head = d3s.lm_head(policy, temperature=0.7)
        >>> logprob, entropy = d3s.linear_logprob_entropy(policy.body(tokens), labels=tokens, **head)
        >>> expected = (policy(tokens) / 0.7).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        >>> torch.allclose(logprob, expected, atol=1e-5)
        True
    """
    if torch.compiler.is_compiling():
        raise RuntimeError("lm_head: called within torch.compile; call it outside, and pass on what it returns")
    return _eager()(model, temperature, verify)


@cache
def _eager() -> Callable[..., HeadArguments]:
    """Returns ``_lm_head`` in a form that is never compiled; a graph break alone would not prevent compilation. (The
    first call imports all of torch.compile, which torch's optimizers import too.)
    """
    made: Callable[..., HeadArguments] = torch.compiler.disable(_lm_head)  # type: ignore[no-untyped-call]
    return made


def _lm_head(model: Module, temperature: float | Tensor, verify: bool) -> HeadArguments:
    head = read_head(model)
    reason = why_not_here(head.layer)
    if reason is not None:
        raise UnsupportedHead(f"lm_head: {head.name}'s head has {reason}")
    if head.prompts:
        raise UnsupportedHead(
            f"lm_head: got a {head.name} with a PEFT adapter that adds tokens to its prompts; takes others, since the "
            "hidden states of its body are not those of such a prompt"
        )
    return model_arguments(verified_head(head) if verify else head, temperature)


def model_arguments(head: ModelHead, temperature: float | Tensor) -> HeadArguments:
    """Returns the arguments that have the effect of a head's scale and soft cap."""
    return {
        "weight": head.layer.weight,
        "bias": getattr(head.layer, "bias", None),
        "temperature": _divided(temperature, head.scale),
        "logit_softcap": None if head.softcap is None else head.softcap / head.scale,
    }


def _divided(temperature: float | Tensor, scale: float) -> float | Tensor:
    """Divides the temperature by the scale. An invalid temperature is refused before the division, so that the error
    message shows the caller's value.
    """
    if isinstance(temperature, Tensor) and temperature.is_floating_point():
        return temperature if scale == 1 else temperature.float() / scale
    require_temperature(temperature)  # type: ignore[arg-type]
    return temperature / scale


def read_head(model: Module) -> ModelHead:
    """Returns the unwrapped model with its head, and the scale and the soft cap of its configuration."""
    if not isinstance(model, Module):
        raise TypeError(f"model: got {type(model).__name__}; takes a torch.nn.Module")
    inner, prompts = _unwrapped(model)
    layer = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    if layer is None:
        raise UnsupportedHead(
            f"lm_head: got a {type(inner).__name__}, whose get_output_embeddings() is missing or returns None; takes a "
            "causal language model, not its body, its head or an unknown wrapper; or a module with that method, which "
            "returns its linear layer. For any other, give its weight and bias to linear_logprob_entropy"
        )
    layer = getattr(layer, "_fsdp_wrapped_module", layer)  # the wrapper of FSDP1
    reason = _left_out(layer)
    if reason is not None:
        raise UnsupportedHead(
            f"lm_head: got a {type(layer).__module__}.{type(layer).__qualname__}, {reason} would be ignored and never "
            "trained; takes a linear layer, since log-probabilities are computed from its weight and bias alone. With "
            "PEFT, leave 'lm_head' out of target_modules and a tied head's tokens out of trainable_token_indices "
            "(modules_to_save=['lm_head'] trains all of it), or use merge_and_unload"
        )
    return ModelHead(inner, layer, *_scale_and_softcap(inner), prompts)


def _unwrapped(model: Any) -> tuple[Any, bool]:
    """Removes wrappers that do not change a model's logits. Returns the inner model, and whether PEFT adds tokens to
    its prompts.
    """
    prompts = False
    while True:
        kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(model).__mro__}
        if kinds & _PEFT:
            adapter = getattr(model, "active_peft_config", None)
            prompts = prompts or getattr(adapter, "is_prompt_learning", False)
            model = model.get_base_model()
            continue
        if _DDP in kinds:
            raise UnsupportedHead(
                "lm_head: got a DistributedDataParallel, which averages gradients only where its own forward is "
                "called; takes the model within: let it wrap a module whose forward calls the body and the op"
            )
        inner = [name for kind, name in _WRAPPERS.items() if kind in kinds]
        if not inner:
            return model, prompts
        model = getattr(model, inner[0])


def _left_out(layer: Any) -> str | None:
    """Returns the part of an error message that names a head's trainable parameters other than its weight and bias.
    Returns None if there are no such parameters.
    """
    tuners, wrappers = (sys.modules.get(f"peft.{name}") for name in ("tuners.tuners_utils", "utils.other"))
    if tuners is not None and isinstance(layer, tuners.BaseTunerLayer):
        return "an adapter, which"
    if wrappers is not None and isinstance(layer, wrappers.ModulesToSaveWrapper):
        return None  # its weight comes from the active copy, or from the original while adapters are disabled
    parts = {id(parameter) for name in ("weight", "bias") if (parameter := getattr(layer, name, None)) is not None}
    more = [name for name, value in layer.named_parameters() if value.requires_grad and id(value) not in parts]
    return f"whose {', '.join(more)}" if more else None


def _scale_and_softcap(model: Any) -> tuple[float, float | None]:
    text: Any = text_of(getattr(model, "config", None))
    said = {name: value for name in (*_FACTORS, *_SOFTCAPS) if (value := getattr(text, name, None)) is not None}
    scale, softcap = 1.0, None
    for name, value in said.items():
        if name in _SOFTCAPS and not value:
            continue
        if not isinstance(value, numbers.Real) or not float(value) > 0:
            raise UnsupportedHead(f"lm_head: got a {type(model).__name__} with {name}={value}; takes a number above 0")
        if name in _SOFTCAPS:
            softcap = float(value)
        elif _FACTORS[name] < 0 and not str(getattr(text, "model_type", "")).startswith("hyperclovax"):
            scale /= float(value)
        else:  # HyperCLOVA X multiplies by logits_scaling; other models divide by it
            scale *= float(value)
    return scale, softcap


def why_not_here(layer: Any) -> str | None:
    """Returns the text of an error message: why the op cannot read a head's weight, and how to make it readable.
    Returns None if the op can read the weight.
    """
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor):
        return (
            "no weight tensor, but packed or quantised ones; takes a weight in float32, bfloat16 or float16: leave the "
            "head out of the quantisation"
        )
    if (reason := why_unreadable("weight", weight)) is not None:
        return f"as weight {reason}"
    if weight.dim() != 2:
        return f"a weight of shape {list(weight.shape)}; takes [V, H]{why_not_whole('weight', weight)}"
    if weight.is_meta:
        return "its weight on the meta device, not loaded or offloaded; takes one whose values are there: load it first"
    if weight.dtype not in FLOATS:
        return f"a weight in {weight.dtype}, maybe quantised; takes float32, bfloat16 or float16"
    return None
