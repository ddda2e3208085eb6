"""What the integration relies on in TRL beyond its public interface, and the comparison with a TRL.

Selection multiplies the gradient of each log-probability by 0, or by a weight that is known for each type of loss. This
is right for a loss that is a sum over tokens, divided by the known denominator. A term with another denominator, or one
that reads entropies, would get a wrong gradient without any error. Here such a term is seen by its gradient.
"""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import math
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, NamedTuple

import torch
import trl
import trl.trainer.utils as trl_utils
from packaging.version import Version
from torch import Tensor

from d3s_kernels.integrations.trl.batch import loss_mask
from d3s_kernels.selection.loss_weights import DENOMINATORS


def place(function: Any) -> str:
    """A function's name, file and line, for an error."""
    plain = inspect.unwrap(function)
    code = getattr(plain, "__code__", None)
    at = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    return f"{getattr(plain, '__qualname__', repr(plain))}{at}"


class ChangedTRL(AssertionError):
    """TRL does something that the selection does not cover."""


class Relied(NamedTuple):
    """A method or function with its parameters in order, without defaults, and why it is relied on."""

    name: str
    parameters: str
    why: str
    since: str = "1.15"


# Methods of GRPOTrainer.
METHODS = (
    Relied("_generate_and_score_completions", "self inputs", "overridden: rollouts are kept from its batch"),
    Relied(
        "_generate_single_turn", "self prompt_ids images multimodal_fields num_generations has_tool_images",
        "overridden: records what tokens are drawn from",
    ),
    Relied(
        "_calculate_rewards", "self inputs prompts completions completion_ids_list",
        "overridden: the page of a batch shows the rewards",
    ),
    Relied(
        "_get_per_token_logps_and_entropies",
        "self model input_ids attention_mask logits_to_keep batch_size compute_entropy compute_aux_loss pixel_values "
        "image_grid_thw num_images pixel_attention_mask spatial_shapes num_tiles image_sizes token_type_ids "
        "mm_token_type_ids image_position_ids",
        "overridden: the only pass that scores tokens; its log-probabilities get the hooks",
    ),
    Relied("_compute_loss", "self model inputs", "overridden: every token that it scores is one of the loss"),
    Relied("compute_loss", "self model inputs return_outputs num_items_in_batch", "calls _compute_loss in each step"),
    Relied("training_step", "self model inputs num_items_in_batch", "overridden: one step, with its backward"),
    Relied(
        "get_high_entropy_mask", "self entropies mask threshold",
        "overridden: in training the choice of tokens stands for TRL's",
    ),
    Relied("_prepare_inputs", "self generation_batch", "overridden: rows of its micro-batches are divided anew"),
    Relied("log", "self logs start_time", "overridden: our metrics become numbers"),
)  # fmt: skip

# Functions of TRL's modules.
FUNCTIONS = (
    Relied(
        "trl.trainer.grpo_trainer.disable_gradient_checkpointing", "model gradient_checkpointing_kwargs",
        "passes without gradient need no checkpoints",
    ),
    Relied("trl.trainer.grpo_trainer.use_adapter", "model adapter_name", "the reference of a policy with adapters"),
    Relied("trl.trainer.utils.split_pixel_values_by_grid", "batch", "images by rollout, so that rows can be taken"),
    Relied("trl.trainer.utils.unsplit_pixel_values_by_grid", "batch", "the way back"),
)  # fmt: skip

# What TRL's fused head of a model looks up in trl.trainer.utils, and where head.py replaces it.
HEAD = (
    Relied(
        "trl.trainer.utils._ChunkedLogProbFunction.forward",
        "ctx hidden weight bias targets temperature chunk_size final_logit_softcapping logit_scale outputs",
        "replaced by our head",
    ),
    Relied("trl.trainer.utils._use_triton", "device", "replaced, so that only labelled positions are scored", "1.16"),
)

# Attributes of a trainer that was made.
ATTRIBUTES = {
    "_buffered_inputs": "TRL's micro-batches of a generation batch",
    "_logs": "the table of completions gets the rows of a refilled batch",
    "_metrics": "TRL logs what is appended to it",
    "_tokenizer": "the token of padding",
    "_step": "which of them the next one is",
    "accelerator": "processes and devices",
    "aux_loss_enabled": "the loss of a router depends on all tokens",
    "_entropy_bonus_enabled": "the entropy bonus depends on all tokens",
    "beta": "whether there is a pass of a reference",
    "current_gradient_accumulation_steps": "how many micro-batches the optimizer step has",
    "epsilon_high": "replaced while ESPO's loss is computed",
    "epsilon_low": "replaced while ESPO's loss is computed",
    "importance_sampling_level": "whether tokens depend on each other",
    "loss_type": "what the loss divides by",
    "max_completion_length": "what dr_grpo divides by",
    "multi_objective_aggregation": "which rewards make a group of equal ones",
    "num_generations": "rows of a group",
    "rollout_func": "refused if its log-probabilities are not whole",
    "num_iterations": "whether there is a pass of the old policy",
    "off_policy_mask_threshold": "whether tokens depend on each other",
    "pad_to_multiple_of": "the widths that TRL pads to",
    "ref_model": "the model of the reference's pass",
    "reward_weights": "the page of a batch shows the rewards",
    "scale_rewards": "how advantages are normalised again",
    "use_vllm": "whether there is a pass of the old policy",
    "vllm_importance_sampling_correction": "whether it is needed before the rewards",
}

# What the loss has to read, because this integration hands it over there.
LOSS_READS = {
    "self._get_per_token_logps_and_entropies": "the log-probabilities with hooks",
    "self.get_high_entropy_mask": "all tokens, since others are chosen",
    "self.epsilon_low": "ESPO's clip range",
    "self.epsilon_high": "ESPO's clip range",
    "inputs.advantages": "ESPO's weights; advantages of the kept rollouts",
    "inputs.completion_mask": "the tokens of the loss",
    "inputs.tool_mask": "the tokens of the loss",
    "inputs.num_items_in_batch": "counted again after rollouts were dropped",
    "inputs.old_per_token_logps": "scored after rollouts were dropped; ESPO's ratios",
    "inputs.ref_per_token_logps": "scored after rollouts were dropped",
    "inputs.sampling_per_token_logps": "what ESPO leaves to the mask of off-policy sequences",
}

# What else it reads in the versions that were tested. Another name may bring a term that the selection does not cover.
LOSS_MAY_READ = (
    "self.accelerator self.args self.aux_loss_enabled self.beta self.current_gradient_accumulation_steps "
    "self._entropy_bonus_enabled self.entropy_coef self._entropy_window_stats self.get_gamma_weights "
    "self.get_off_policy_mask self.importance_sampling_level self._last_world_entropy "
    "self.loss_type self.max_completion_length self._metrics self.model self.off_policy_mask_threshold "
    "self.router_aux_loss_coef self.top_entropy_quantile self.use_adaptive_entropy self.use_vllm "
    "self.vllm_importance_sampling_correction "
    "self.args.delta self.args.entropy_coef_delta self.args.entropy_coef_max self.args.entropy_coef_min "
    "self.args.entropy_target self.args.sapo_temperature_neg self.args.sapo_temperature_pos "
    "self.args.steps_per_generation self.args.use_bias_correction_kl self.args.vespo_k_neg self.args.vespo_k_pos "
    "self.args.vespo_lambda_neg self.args.vespo_lambda_pos "
    "inputs.completion_ids inputs.image_grid_thw inputs.image_position_ids inputs.image_sizes "
    "inputs.importance_sampling_ratio inputs.mm_token_type_ids inputs.num_images inputs.num_tiles "
    "inputs.pixel_attention_mask inputs.pixel_values inputs.prompt_ids inputs.prompt_mask inputs.spatial_shapes "
    "inputs.token_type_ids"
)


# ---- names and parameters, and what the loss reads ------------------------------------------------------------------


def check_class(trainer: type, ours: type) -> None:
    """Checks methods and functions of the bases of ``ours``, and what the loss reads."""
    for relied in METHODS:
        found = inherited(trainer, ours, relied.name)
        if found is None:
            raise ChangedTRL(f"GRPOTrainer.{relied.name}: is not in TRL {trl.__version__}; {relied.why}")
        _check_parameters(relied, found)
    for relied in FUNCTIONS:
        _check_parameters(relied, _function(relied))
    _check_head()
    _check_what_is_read(inherited(trainer, ours, "_compute_loss"))


def check_attributes(trainer: Any) -> None:
    for name, why in ATTRIBUTES.items():
        if not hasattr(trainer, name):
            raise ChangedTRL(f"GRPOTrainer.{name}: a trainer of TRL {trl.__version__} has no such attribute; {why}")


def inherited(trainer: type, ours: type, name: str) -> Callable[..., Any] | None:
    """The method that ``super().name`` is in a method of ``ours``."""
    above = trainer.__mro__[trainer.__mro__.index(ours) + 1 :]
    return next((vars(base)[name] for base in above if name in vars(base)), None)


def _function(relied: Relied) -> Any:
    module, *names = relied.name.removeprefix("trl.trainer.").split(".")
    found: Any = importlib.import_module(f"trl.trainer.{module}")
    for name in names:
        if not hasattr(found, name):
            raise ChangedTRL(f"{relied.name}: is not in TRL {trl.__version__}; {relied.why}")
        found = getattr(found, name)
    return found


def _check_parameters(relied: Relied, found: Any) -> None:
    marks: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    given = inspect.signature(found).parameters.values()
    parameters = " ".join(marks.get(parameter.kind, "") + parameter.name for parameter in given)
    if parameters != relied.parameters:
        raise ChangedTRL(
            f"{relied.name}: got {place(found)} with the parameters ({parameters.replace(' ', ', ')}); takes "
            f"({relied.parameters.replace(' ', ', ')}): {relied.why}"
        )


def _check_head() -> None:
    """TRL's models have to look the head up in the module where it is replaced."""
    looked_up = set(_names(trl_utils.add_fused_lm_head.__code__))
    for relied in HEAD:
        if Version(trl.__version__) < Version(relied.since):
            continue
        if trl_utils._ChunkedLogProbFunction is not None:  # else there is no Triton, and TRL's head was not made
            _check_parameters(relied, _function(relied))
        name = relied.name.removeprefix("trl.trainer.utils.").split(".")[0]
        if name not in looked_up:
            raise ChangedTRL(
                f"{relied.name}: {place(trl_utils.add_fused_lm_head)} does not look it up; it is {relied.why}"
            )


def _names(code: CodeType) -> Iterator[str]:
    """The names that a function and those within it look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _check_what_is_read(loss: Any) -> None:
    found = read_by(loss)
    unknown = sorted(found - LOSS_READS.keys() - set(LOSS_MAY_READ.split()))
    if unknown:
        raise ChangedTRL(
            f"{place(loss)} reads {', '.join(unknown)}, which is not known: it may bring a term of the loss that the "
            "selection of tokens does not cover"
        )
    for name, why in LOSS_READS.items():
        if name not in found:
            raise ChangedTRL(f"{place(loss)} does not read {name}, where this integration hands over {why}")


def read_by(loss: Any) -> set[str]:
    """``self.<name>``, ``self.args.<name>`` and ``inputs.<field>``, as far as the function's source has them."""
    found = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(loss))))):
        match node:
            case ast.Attribute(value=ast.Name("self"), attr=name):
                found.add(f"self.{name}")
            case ast.Attribute(value=ast.Attribute(value=ast.Name("self"), attr="args"), attr=name):
                found.add(f"self.args.{name}")
            case (
                ast.Subscript(value=ast.Name("inputs"), slice=ast.Constant(value=name))
                | ast.Call(
                    func=ast.Attribute(value=ast.Name("inputs"), attr="get"), args=[ast.Constant(value=name), *_]
                )
                | ast.Compare(left=ast.Constant(value=name), comparators=[ast.Name("inputs")])
            ):
                found.add(f"inputs.{name!s}")
            case ast.Call(func=ast.Name("getattr"), args=[ast.Name("self"), ast.Constant(value=name), *_]):
                found.add(f"self.{name!s}")
    return found


# ---- the loss --------------------------------------------------------------------------------------------------------

_APART = 0.05  # a log-ratio that no loss clips here


class _NoModel(torch.nn.Module):
    """Stands for the policy: a loss may ask whether it is trained, but scores come from one method alone."""

    def forward(self, *_: Any, **__: Any) -> Any:
        raise ChangedTRL("the loss forwards the model outside of _get_per_token_logps_and_entropies")


def check_loss(trainer: Any, loss: Any) -> None:
    """Evaluates TRL's ``_compute_loss`` three times on two short rows. The trainer is not changed."""
    probe = _Probe(trainer, loss)
    mask, divided_by = probe.mask, probe.denominator()

    same, of_entropy = probe.gradients([1.0, -0.5], torch.zeros(mask.shape))
    expected = torch.where(mask, torch.tensor([[-1.0], [0.5]]) / divided_by, 0.0)
    probe.require("of equal policies", same, expected)
    bonus = of_entropy[mask].mean() if trainer._entropy_bonus_enabled else torch.zeros(())
    probe.require("of entropies", of_entropy, torch.where(mask, bonus, 0.0))

    # Tokens that are all alike have the same gradient, but for the denominator, also in a KL term.
    apart = torch.full(mask.shape, 0.0 if trainer.loss_type == "vespo" else _APART)  # vespo takes sums of sequences
    alike, _ = probe.gradients([1.0, 1.0], apart, to_reference=_APART)
    probe.require("of tokens that are alike", alike, torch.where(mask, alike[0, 0] * divided_by[0] / divided_by, 0.0))

    if trainer._tokens_are_independent({}):  # then dropped tokens are not even scored
        kept = torch.arange(mask.shape[1]) < 1
        moved, _ = probe.gradients([1.0, 1.0], torch.where(kept, apart, -2 * apart), to_reference=_APART)
        probe.require("of a token while other tokens change", moved[:, kept], alike[:, kept])


class _Probe:
    """A copy of a trainer whose scores are made up."""

    def __init__(self, trainer: Any, loss: Any) -> None:
        self.loss, self.trainer = loss, copy.copy(trainer)
        made = self.trainer
        made.model = _NoModel()
        made._metrics = {mode: defaultdict(list) for mode in ("train", "eval")}
        made.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
        made.args = copy.copy(trainer.args)
        # Nothing is clipped or masked away.
        made.args.delta, made.top_entropy_quantile = None, 1.0
        made.epsilon_low, made.epsilon_high = 0.5, 5.0
        if trainer.off_policy_mask_threshold is not None:
            made.off_policy_mask_threshold = math.inf
        made.beta = float(trainer.beta != 0)  # however small, a KL term is seen
        if trainer._espo:  # then each token has its own
            made.epsilon_low, made.epsilon_high = (torch.full((2, 5), value) for value in (0.5, 5.0))
        # Two rows with 3 and 2 tokens of the loss, beside one of a tool and padding.
        ones = torch.ones(2, 5, dtype=torch.long)
        mask, tools = ones.clone(), ones.clone()
        mask[0, 4], mask[1, 2:], tools[0, 1] = 0, 0, 0
        self.batch = {
            "prompt_ids": ones[:, :1], "prompt_mask": ones[:, :1], "completion_ids": ones, "completion_mask": mask,
            "tool_mask": tools, "num_items_in_batch": (mask * tools).sum(),
            "importance_sampling_ratio": ones[:, :1].float(),
        }  # fmt: skip
        self.mask = loss_mask(self.batch).bool()

    def gradients(self, advantages: list[float], log_ratio: Tensor, to_reference: float = 0.0) -> tuple[Tensor, Tensor]:
        """The gradients of log-probabilities and of entropies, ``[2, 5]``, at these log-ratios to the old policy."""
        logprob, entropy = (torch.full((2, 5), value, requires_grad=True) for value in (-1.0, 0.5))
        calls: list[bool] = []

        def score(*_: Any, compute_entropy: bool = False, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
            calls.append(compute_entropy)
            return logprob, entropy, torch.zeros(())

        self.trainer._get_per_token_logps_and_entropies = score
        old, rows = logprob.detach() - log_ratio, torch.tensor(advantages)
        batch = self.batch | {
            "advantages": rows[:, None].expand(2, 5) if self.trainer._espo else rows,  # ESPO has one for each token
            "old_per_token_logps": old, "sampling_per_token_logps": old,
            "ref_per_token_logps": logprob.detach() - to_reference,
        }  # fmt: skip
        value = self.loss(self.trainer, self.trainer.model, batch)
        found = torch.autograd.grad(value, (logprob, entropy), allow_unused=True, materialize_grads=True)
        if calls != [True]:
            raise ChangedTRL(
                f"{place(self.loss)} scored tokens {len(calls)} times, {sum(calls)} of them with entropies; takes a "
                "loss that does so once, with entropies"
            )
        return found

    def denominator(self) -> Tensor:
        """``[2, 1]``: what the loss divides each row's tokens by."""
        made, mask = self.trainer, self.mask
        lengths, steps = mask.sum(dim=1, keepdim=True), made.args.gradient_accumulation_steps
        found: dict[str, Tensor] = {
            "sequence": 2 * lengths * steps,
            "sequences": torch.full_like(lengths, 2 * steps),
            "process": lengths.sum().expand(2, 1) * steps,
            "constant": torch.full_like(lengths, 2 * made.max_completion_length * steps),
            "generation": lengths.sum().expand(2, 1) * steps / made.args.steps_per_generation,
        }
        return found[DENOMINATORS[made.loss_type]]

    def require(self, what: str, found: Tensor, expected: Tensor) -> None:
        if not torch.allclose(found, expected, rtol=1e-5):
            got, takes = ([round(value, 4) for value in values.flatten().tolist()] for values in (found, expected))
            raise ChangedTRL(
                f"{place(self.loss)} with loss_type {self.trainer.loss_type!r}: got the gradient {got} {what}; takes "
                f"{takes}. The selection of tokens does not cover such a loss"
            )
