"""Checks, on a few tokens, whether a model's logits follow from its hidden states, its head, a scale and a soft cap.

The model's forward runs with enlarged hidden states, so that the logits become large enough for a soft cap to change
them. Then the model's logits are compared with the expected logits, and the autograd graph shows which parameters the
logits depend on.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import linear

_TOKENS = 4  # the number of tokens in a trial forward
_USUAL_CAP = 30.0  # if the configuration has no soft cap, logits are enlarged as if this were the soft cap
_ROWS = 4096  # the number of the weight's rows in one matrix product

# For each model and each state of the model, the verified scale and soft cap. At most _STATES states of a model are
# stored.
_STATES = 16
_verified: WeakKeyDictionary[Module, dict[Hashable, tuple[float, float | None]]] = WeakKeyDictionary()


class UnsupportedHead(ValueError):
    """The error in two cases: the model computes its logits by more than a linear layer, a scale and a soft cap; or the
    weight of the model's head cannot be read.
    """


class UntriedHead(UnsupportedHead):
    """The error if a forward of a few tokens fails, so that the model's logits cannot be compared with its head."""


class ModelHead(NamedTuple):
    """A model's head, and the scale and soft cap in the formula of its logits:
    ``softcap * tanh(scale * (hidden @ weight.T + bias) / softcap)``.
    """

    model: Any
    layer: Any
    scale: float
    softcap: float | None
    prompts: bool
    """Whether PEFT adds tokens to prompts, so that the body's hidden states do not match the input tokens."""

    @property
    def name(self) -> str:
        return type(self.model).__name__


class Seen(NamedTuple):
    """The record of a forward of a few tokens."""

    hidden: Tensor
    """The enlarged last hidden states of the body. If bodies are nested, they are from the outermost body."""
    of_head: list[Tensor]
    """The inputs of the head, one for each call of the head."""
    dtypes: set[torch.dtype]
    """The autocast dtypes that were active when the head was called."""
    logits: Tensor


def verified_head(head: ModelHead) -> ModelHead:
    """Returns the head with the scale and the soft cap that the model really applies. A model may ignore the scale or
    the soft cap in its configuration: some models inherit such an option and do not use it (MPT, Aya Vision).

    Raises:
        UnsupportedHead: the model's logits differ from the expected logits, both with and without the scale and the
            soft cap of the configuration; the model changes its hidden states before its head; the model applies other
            parameters to its hidden states or logits; or the model cannot be run on a few tokens.
    """
    known, state = _verified.setdefault(head.model, {}), _state(head)
    if state in known:
        scale, softcap = known[state]
        return head._replace(scale=scale, softcap=softcap)
    seen = _seen(head)
    if seen.of_head and not any(_equal(seen.hidden, hidden) for hidden in seen.of_head):
        ratio = float(seen.of_head[0].float().norm() / seen.hidden.detach().float().norm())
        raise UnsupportedHead(
            f"lm_head: {head.name} changes the last hidden states of its body before it gives them to its head: their "
            f"norm becomes {ratio:.4g} times as large; takes a model that gives them as they are"
        )
    readings = [
        head._replace(scale=scale, softcap=softcap)
        for scale in dict.fromkeys((head.scale, 1.0))
        for softcap in dict.fromkeys((head.softcap, None))
    ]
    errors = []
    for reading in readings:  # the first usually matches; each comparison costs a product with the whole weight
        error = difference(reading, seen)
        if error is None:
            if len(known) >= _STATES:
                known.clear()
            known[state] = reading.scale, reading.softcap
            return reading
        errors.append(error)
    raise UnsupportedHead(errors[0])


def require_own_logits(head: ModelHead) -> None:
    """Raises unless the model's logits are equal to the logits that follow from the body's last hidden states and
    ``head``. A model that scales its hidden states instead of its logits (MiniCPM3) passes too.
    """
    error = difference(head, _seen(head))
    if error is not None:
        raise UnsupportedHead(error)


def _state(head: ModelHead) -> Hashable:
    """Returns a key for the way in which the model computes logits from hidden states. If this way changes, the key
    usually changes too. Some changes do not change the key, since only a forward would show them.
    """
    modules, model = (head.model, head.layer), head.model
    code = [vars(module).get("forward", type(module).forward) for module in modules]
    for module in modules:
        code += [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    buffers = [
        (id(buffer), None if buffer.is_inference() else buffer._version) for buffer in model.buffers(recurse=False)
    ]
    numbers = [item for module in modules for item in vars(module).items() if type(item[1]) is float]
    return (
        ref(head.layer), type(head.layer), head.scale, head.softcap, model.training, head.layer.training,
        *map(id, code), *buffers, *numbers,
    )  # fmt: skip


def _seen(head: ModelHead) -> Seen:
    """Runs a forward of a few tokens and returns its record. Raises if the record shows that the model is not
    supported.
    """
    bodies = [body for body in dict.fromkeys(_bodies(head.model)) if body is not head.layer]
    with _undisturbed(head):
        seen = _try(head, bodies)
    expected = *seen.hidden.shape[:-1], len(head.layer.weight)
    if seen.logits.shape != expected:
        raise UnsupportedHead(
            f"lm_head: {head.name} gives logits of shape {list(seen.logits.shape)} for hidden states of shape "
            f"{list(seen.hidden.shape)} and a weight of shape {list(head.layer.weight.shape)}"
        )
    if seen.hidden.requires_grad:
        _require_gradients(head, seen)
    return seen


def _bodies(model: Any) -> Iterator[Any]:
    """Yields the parts of a model that may return its last hidden states, looked up by their usual names."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    for part in (getattr(model, "base_model", None), getattr(model, "model", None), decoder):
        if not isinstance(part, Module) or part is model:
            continue
        inner = part.get_output_embeddings() if hasattr(part, "get_output_embeddings") else None  # type: ignore[operator]
        yield from [part] if inner is None else _bodies(part)  # an inner language model: its own bodies


@contextmanager
def _undisturbed(head: ModelHead) -> Iterator[None]:
    """Runs a ``with`` block without gradients and without compilation, and restores the random states afterwards.
    During the block, eager attention replaces two other kinds: attention over a prefix tree, which TRL uses in
    asynchronous training, and flash attention on a CPU.
    """
    devices = {value.device for value in head.model.parameters()}
    kind = next((device.type for device in devices if device.type not in ("cpu", "meta")), None)
    indices = [device.index for device in devices if device.type == kind and device.index is not None]
    config: Any = getattr(head.model, "config", None)
    parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))]
    attention = [(part, name) for part in parts if (name := getattr(part, "_attn_implementation", None)) is not None]
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and an import would take a second
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.random.fork_rng(indices, device_type=kind or "cuda"))
        replaced = [part for part, name in attention if "tree" in name or (kind is None and "flash" in name)]
        if replaced:
            for part, name in reversed(attention):  # the config is restored first, since this also sets its parts
                stack.callback(setattr, part, "_attn_implementation", name)
            for part in replaced:
                part._attn_implementation = "eager"
        yield


def _try(head: ModelHead, bodies: list[Module]) -> Seen:
    """Runs a forward of a few tokens with enlarged hidden states. Autograd records the graph from these hidden states
    to the logits. The graph shows on which tensors the logits depend.
    """
    of_body: list[Tensor] = []
    of_head: list[Tensor] = []
    dtypes: set[torch.dtype] = set()
    own_thread = threading.get_ident()  # the hooks ignore other threads, which may use the same model
    graph = not torch.is_inference_mode_enabled() and not head.layer.weight.is_inference()

    def start(hidden: Tensor) -> Tensor:
        of_body.append(_enlarged(head, hidden.detach()).requires_grad_(graph))
        torch.set_grad_enabled(graph)  # this mode lasts until the forward ends
        return of_body[-1]

    def after_body(module: Module, args: Any, output: Any) -> Any:
        if threading.get_ident() != own_thread:
            return None
        if isinstance(output, Tensor):
            return start(output)
        if isinstance(output, tuple):
            return start(output[0]), *output[1:]
        output.last_hidden_state = start(output.last_hidden_state)
        return output

    def before_head(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values = [*args, *kwargs.values()]
        if threading.get_ident() != own_thread or not values or not values[0].is_floating_point():
            return None
        hidden = values[0] if bodies else start(values[0])
        of_head.append(hidden.detach())
        kind = hidden.device.type
        if torch.is_autocast_enabled(kind):
            dtypes.add(torch.get_autocast_dtype(kind))
        else:  # a head that was cast to float32 (TRL's cast_lm_head_to_fp32) gets float32 hidden states from its caller
            hidden = hidden.to(head.layer.weight.dtype)
        return ((hidden, *args[1:]), kwargs) if args else ((), kwargs | {next(iter(kwargs)): hidden})

    hooks = [head.layer.register_forward_pre_hook(before_head, with_kwargs=True)]
    hooks += [body.register_forward_hook(after_body) for body in bodies]
    untried = f"lm_head: {head.name} could not be tried: its forward"
    try:
        args, kwargs = _few_tokens(head)
        output = head.model(*args, **kwargs)
    except UnsupportedHead:
        raise
    except Exception as error:
        raise UntriedHead(
            f"{untried} of {_TOKENS} tokens raised {type(error).__name__}: {error}. verify=False leaves this check out"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if logits is None and isinstance(output, (tuple, list)):
        logits = output[0]
    if logits is None and isinstance(output, Mapping):
        logits = output.get("logits")
    if not isinstance(logits, Tensor):
        raise UntriedHead(
            f"{untried} returns a {type(output).__name__} without logits; takes a tensor of logits, a tuple whose "
            "first it is, or logits by that name"
        )
    if not of_body:
        parts = " or ".join(dict.fromkeys(type(part).__name__ for part in bodies or [head.layer]))
        raise UntriedHead(f"{untried} does not call its {parts}")
    return Seen(of_body[-1], of_head, dtypes, logits)


def _few_tokens(head: ModelHead) -> tuple[list[Tensor], dict[str, Any]]:
    """Returns the args and kwargs for a forward of a few ordinary tokens. Special tokens, such as image placeholders,
    are avoided.
    """
    model, weight = head.model, head.layer.weight
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    config = getattr(model, "config", None)
    special: set[int] = set()
    for part in (config, text_of(config)):
        for name, value in getattr(part, "__dict__", {}).items():
            if name.endswith(("_token_id", "_token_index", "_token_ids")):
                special.update(_numbers(value))
    tokens = min(len(weight), getattr(embedding, "num_embeddings", len(weight)))
    step = max(1, tokens // (_TOKENS + 1))
    usual = [token for token in range(step, tokens) if token not in special][: _TOKENS * step : step] or [0]
    device = getattr(getattr(embedding, "weight", weight), "device", weight.device)
    ids = torch.tensor([usual], device=device if device.type != "meta" else weight.device)
    takes = inspect.signature(model.forward).parameters
    kinds = [parameter.kind for parameter in takes.values()]
    anything = inspect.Parameter.VAR_KEYWORD in kinds
    by_name = "input_ids" in takes or (anything and inspect.Parameter.POSITIONAL_OR_KEYWORD not in kinds)
    kwargs: dict[str, Any] = {"input_ids": ids} if by_name else {}
    if getattr(config, "is_encoder_decoder", False):
        kwargs["decoder_input_ids"] = ids
    kwargs |= {name: torch.zeros_like(ids) for name in ("token_type_ids", "mm_token_type_ids") if name in takes}
    if ("use_cache" in takes or anything) and hasattr(config, "use_cache"):
        kwargs["use_cache"] = False
    return [] if by_name else [ids], kwargs


def text_of(config: Any) -> Any:
    """Returns the text part of a multimodal model's configuration; for other models, the whole configuration."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def _numbers(value: Any) -> Iterator[int]:
    """Yields a token id, or the token ids in nested lists."""
    if isinstance(value, int):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _numbers(part)


def _enlarged(head: ModelHead, hidden: Tensor) -> Tensor:
    """Scales three of every four rows of hidden states. The largest logits of the three rows become 0.5, 1 and 2 times
    the cap, as far as the range of the dtype allows.
    """
    weight = head.layer.weight.detach()
    rows = hidden.to(weight.device, weight.dtype).reshape(-1, hidden.shape[-1])
    with torch.autocast(weight.device.type, enabled=False):
        largest = head.scale * linear(rows, weight).float().abs().amax(-1)
    if not (largest.isfinite() & (largest > 0)).all():
        raise UntriedHead(
            f"lm_head: {head.name} could not be tried: hidden states times its weight are 0 or not finite. "
            "verify=False leaves this check out"
        )
    wanted = (head.softcap or _USUAL_CAP) * torch.tensor([0.0, 0.5, 1.0, 2.0], device=largest.device)
    wanted = wanted.repeat(len(largest) // _TOKENS + 1)[: len(largest)]
    room = torch.finfo(hidden.dtype).max / 4 / rows.abs().amax(-1).float()
    factor = torch.where(wanted > 0, wanted / largest, 1.0).minimum(room).to(hidden.device)
    return (hidden * factor.view(*hidden.shape[:-1], 1)).to(hidden.dtype)


def _require_gradients(head: ModelHead, seen: Seen) -> None:
    """Raises unless logits depend on the hidden states and the weight, and on no other parameter except the bias."""
    own = {id(value) for value in (seen.hidden, head.layer.weight, getattr(head.layer, "bias", None))}
    leaves: dict[int, Tensor] = {}  # by id; the tensors are kept alive, so that no id is reused
    nodes, visited = [seen.logits.grad_fn], set()
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if hasattr(node, "variable"):
            leaves[id(node.variable)] = node.variable
        nodes += [following for following, _ in node.next_functions]
    names = {id(value): name for name, value in head.model.named_parameters()}
    if more := [names.get(place, "a tensor") for place in leaves if place not in own]:
        raise UnsupportedHead(
            f"lm_head: {head.name}'s logits also depend on {', '.join(more)}, which would be ignored and never trained"
            "; takes a model whose body has all that stands before the head"
        )
    for value, name in ((seen.hidden, "hidden states"), (head.layer.weight, "weight")):
        if value.requires_grad and id(value) not in leaves:
            raise UnsupportedHead(f"lm_head: {head.name}'s logits have no gradient for their {name}")


def _equal(hidden: Tensor, other: Tensor) -> bool:
    """Returns whether the two tensors are equal after conversion to the coarser of their dtypes."""
    if hidden.shape != other.shape:
        return False
    coarser = max((hidden.dtype, other.dtype), key=lambda dtype: torch.finfo(dtype).eps)
    return torch.equal(hidden.to(other.device, coarser), other.to(coarser))


@torch.no_grad()
def difference(head: ModelHead, seen: Seen) -> str | None:
    """Compares the model's logits with the expected logits. Returns an error message if the difference at a single
    logit, or the root mean square of all differences, is too large to be a rounding error. Otherwise returns None.
    """
    weight, bias = head.layer.weight.detach(), getattr(head.layer, "bias", None)
    # The rounding step of the coarsest number format that occurs between the hidden states and the logits.
    matmul = (torch.backends.mkldnn if weight.device.type == "cpu" else torch.backends.cuda).matmul
    products = {"tf32": 2**-10, "bf16": 2**-7}.get(matmul.fp32_precision, 2**-19)
    dtypes = seen.dtypes | {seen.hidden.dtype, weight.dtype, seen.logits.dtype}
    step = max(products, *(torch.finfo(dtype).eps for dtype in dtypes))
    hidden = seen.hidden.reshape(-1, seen.hidden.shape[-1]).to(weight.device, torch.float32)
    logits = seen.logits.reshape(len(hidden), -1).to(weight.device)
    most, over, off, size = 0.0, False, 0.0, 0.0
    with torch.autocast(weight.device.type, enabled=False):
        for first in range(0, len(weight), _ROWS):
            part = slice(first, first + _ROWS)
            rows, part_of_bias = weight[part].float(), None if bias is None else bias.detach()[part].float()
            expected = head.scale * linear(hidden, rows, part_of_bias)
            # The rounding error of a dot product is proportional to the root of the sum of its squared terms.
            room = head.scale * linear(hidden.square(), rows.square()).sqrt()
            if part_of_bias is not None:
                room += head.scale * part_of_bias.abs().nan_to_num(posinf=0)
            if head.softcap is not None:
                expected = head.softcap * (expected / head.softcap).tanh()
            room += expected.abs().nan_to_num(posinf=0)
            theirs = logits[:, part].float()
            difference = torch.where(theirs == expected, 0.0, (theirs - expected).abs()).nan_to_num(nan=torch.inf)
            most = max(most, float(difference.max()))
            over = over or bool((difference > 4 * step * room).any())
            off, size = off + float(difference.square().sum()), size + float(room.square().sum())
    if not over and off**0.5 <= 0.5 * step * size**0.5:
        return None
    return (
        f"lm_head: {head.name}'s own logits differ by up to {most:.4g} from those of its hidden states and head (scale "
        f"{head.scale:.6g}, soft cap {head.softcap}); takes a model that does nothing else between them"
    )
