"""Random configurations of D3STrainer against an oracle in float64: choices, gradients, and all that is logged.

Every loss of TRL is drawn with every level of its ratios. What these runs prove has no examples by hand in other files.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl")
from helpers import EVERYTHING, random_generator, threads
from tiny_trl import model, trainer
from transformers import PrinterCallback
from trl.trainer import grpo_trainer
from trl_oracle import Generation, Oracle, Unsure

LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
OF_ESPO = LOSSES[:4]  # which take groups of entropies
KINDS = [(loss, level) for loss in LOSSES for level in ("token", "sequence", "entropy_group")[: 2 + (loss in OF_ESPO)]]
CONFIGURATIONS = 15 if EVERYTHING else 2  # of each kind
ALIGNED = {"num_generations": 8, "per_device_train_batch_size": 8, "num_iterations": 1, "vllm": False}
ALIGNED |= {"steps_per_generation": 2, "gradient_accumulation_steps": 2}  # no pass for old log-probabilities
SHARED = {"drop_shared_tokens": True, "token_ratio_start": 1.0, "token_ratio_end": 1.0, "vllm": False}
SHARED |= {"token_rule": "advantage_entropy", "num_generations": 8}
# Options that seldom meet if all are drawn. The others are.
MEETING: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a KL term of off-policy tokens": (
        "grpo", "token", {
            "vllm": True, "off_policy_rule": "none", "vllm_importance_sampling_correction": True, "beta": 0.2,
            "vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": 1.2,
        },
    ),
    "the mean over what is kept of the on-policy tokens": (
        "dapo", "token", {
            "vllm": True, "off_policy_rule": "token_mask", "vllm_importance_sampling_correction": False,
            "loss_denominator": "kept", "token_rule": "entropy", "token_ratio_start": 0.3, "token_ratio_end": 0.3,
            "entropy_from": "auto",
        },
    ),
    "shared tokens in the update": ("grpo", "token", SHARED | {"entropy_from": "update"}),
    "shared tokens before the update": ("dapo", "token", SHARED | {"entropy_from": "rollout"}),
    "entropies of ESPO alone": ("grpo", "entropy_group", ALIGNED | {"token_rule": "prefix"}),
    "no advantages": ("dapo", "token", ALIGNED | {
        "per_device_train_batch_size": 4, "rewards": "equal groups", "entropy_from": "rollout",
        "token_rule": "advantage_entropy",
    }),
}  # fmt: skip
OFTEN = ("advantage_entropy", "prefix", "prefix_advantage_entropy")  # rules for tokens
OURS = ("vllm", "counted", "rewards")  # what a configuration says of the made-up rollouts, not of the trainer


def drawn(pick: Callable[..., Any], loss: str, level: str, given: dict[str, Any]) -> dict[str, Any]:
    """A configuration. Values that hide what others do are rare; so are combinations that are refused."""
    n, groups, steps = given.get("num_generations", pick(2, 4, 6, 8)), pick(1, 2, 3), pick(1, 2, 3, 4)
    if n * groups % steps:
        n, groups, steps = 8, 2, pick(1, 2, 4)
    some: dict[str, Any] = {
        "num_generations": n, "per_device_train_batch_size": n * groups // steps, "steps_per_generation": steps,
        "gradient_accumulation_steps": pick(steps, steps, 1, 2, 3), "num_iterations": pick(1, 1, 2), "max_steps": 3,
        "logging_steps": pick(1, 1, 2), "max_completion_length": pick(4, 8, 10), "temperature": pick(1.0, 0.7, 1.3),
        "learning_rate": pick(1e-3, 1e-2), "loss_type": loss, "beta": pick(0.0, 0.0, 0.2),
        "importance_sampling_level": level,
        "epsilon": pick(0.05, 0.2), "epsilon_high": pick(None, 0.1, 0.3), "delta": pick(None, None, 1.4),
        "use_bias_correction_kl": pick(False, True), "entropy_coef": pick(0.0, 0.0, 0.0, 0.1),
        "off_policy_mask_threshold": pick(None, None, None, 0.05),
        "scale_rewards": pick("group", "group", "batch", "none"),
        "multi_objective_aggregation": pick("sum_then_normalize", "sum_then_normalize", "normalize_then_sum"),
        "reward_weights": pick(None, [1.0], [1.0, 0.5], [0.3, 2.0]),
        "rewards": pick("numbers", "numbers", "0 or 1", "small", "equal groups", "unscored"),
        "mask_truncated_completions": pick(False, False, True), "counted": pick(None, None, 0.7),
        "pad_to_multiple_of": pick(None, None, 4), "logits_dtype": pick("float32", "auto"),
        "keep_logits_bytes": pick(0, 1 << 20),
        "rollouts_start": pick(0.25, 0.5, 2, 1.0), "rollouts_end": pick(0.5, 0.75, 1.0, 2),
        "token_ratio_start": pick(0.05, 0.1, 0.3, 1.0), "token_ratio_end": pick(0.2, 0.3, 0.5, 1.0),
        "schedule_shape": pick("linear", "linear", "cosine", "exponential"),
        "rollout_rule": pick("max_variance", "max_variance", "highest", "largest_abs", "percentile", "random"),
        "rollout_scope": pick("batch", "group"), "advantages_from": pick("all", "all", "kept"),
        "group_variance_mass": pick(None, None, None, 0.5, 0.9, 1), "drop_shared_tokens": pick(False, False, True),
        "token_rule": pick("entropy", "advantage", "entropy_quantile", "random", *OFTEN * 2),
        "token_scope": pick("batch", "batch", "sequence"), "drop_zeros": pick(False, False, True),
        "loss_denominator": pick("kept", "all"), "entropy_from": pick("auto", "update", "rollout"),
        "order_rows": pick("auto", "auto", "work", "none"), "vllm": pick(False, False, True), **given,
    }  # fmt: skip
    if level == "entropy_group":
        some |= {"espo_alpha": pick(0.02, 0.3), "espo_quantiles": pick([0.8], [0.3, 0.7])}
        some["espo_denominator"] = pick("self", "old")
    if some["token_rule"].startswith("prefix"):
        some["loss_denominator"] = "all"
    if some["token_rule"] == "prefix":
        some |= {"token_ratio_start": pick(0.5, 0.75, 1.0), "token_ratio_end": pick(0.5, 0.6, 1.0)}
        some |= {"token_scope": "batch", "entropy_from": "auto"}
    if some["vllm"]:
        ratios = "token_mask", "sequence_mask", "geometric_mask", "token_truncate", "geometric_truncate"
        rule = given.get("off_policy_rule", pick("none", "none", *ratios, "kpop", "opsm", "sequence_error", "m2po"))
        measures = {"opsm": 0.05, "kpop": 0.05, "m2po": 0.1, "sequence_error": 1.4}
        modes = ("token_mask", "token_truncate") + ("sequence_mask", "sequence_truncate") * (loss != "vespo")
        # The weights of a rule with weights are TRL's ratios, which would count twice.
        some["vllm_importance_sampling_correction"] = rule not in ratios and pick(False, True)
        some |= {
            "off_policy_rule": rule, "off_policy_high": measures.get(rule, 1.25 if rule in ratios else None),
            "off_policy_low": 0.8 if rule in ratios else None, "vllm_importance_sampling_mode": pick(*modes),
            "vllm_importance_sampling_clip_min": pick(None, 0.8), "vllm_importance_sampling_clip_max": pick(1.2, 3.0),
        }  # fmt: skip
    some |= given
    special = None if given else pick("keep_all", "top_entropy_quantile", *[None] * 12)
    if special == "keep_all":
        ends = ("rollouts_start", "rollouts_end", "token_ratio_start", "token_ratio_end")
        some |= dict.fromkeys(ends, 1.0) | {"keep_all": True, "advantages_from": "all", "drop_shared_tokens": False}
    elif special == "top_entropy_quantile":
        some |= {"token_ratio_start": 0.3, "token_ratio_end": 0.3, "token_rule": "entropy", "loss_denominator": "all"}
        some["top_entropy_quantile"] = 0.3
    return drawn(pick, loss, level, given) if refused(some) and (given or pick(*[True] * 9, False)) else some


def refused(some: dict[str, Any]) -> bool:
    """Whether the pages say that the options do not go together."""
    rule, plain = some.get("off_policy_rule", "none"), not some["drop_zeros"] and some["token_scope"] == "batch"
    return bool(
        (some["token_rule"] == "entropy_quantile" and not plain)
        or (some["token_rule"] == "random" and some["drop_zeros"])
        or (some.get("top_entropy_quantile") and not plain)
        or (some.get("keep_all") and (rule, some["token_rule"]) != ("none", "advantage_entropy"))
        or (some.get("keep_all") and (some["drop_zeros"] or some["group_variance_mass"]))
        or (rule != "none" and some["entropy_from"] == "update")
        or (some["order_rows"] == "work" and (some["loss_type"] == "bnpo" or some["entropy_coef"]))
    )


class MadeUp:
    """Prompts, completions and rewards in the place of generation and of reward functions."""

    oracle: Oracle
    prompts: list[list[int]]
    completions: list[list[int]]
    rewards: Tensor  # [rollouts, functions]
    counted: list[list[int]] | None = None  # 0 at tokens of tools
    logprobs: list[list[float]] | None = None

    def __init__(self, some: dict[str, Any], seed: int) -> None:
        self.some, self.random = some, random_generator(seed)
        self.functions = [self.function(place) for place in range(len(some["reward_weights"] or [1.0]))]

    def ids(self, at_least: int, below: int, kinds: int = 59) -> list[int]:
        number = int(torch.randint(at_least, below, (), generator=self.random))
        return torch.randint(2, 2 + kinds, (number,), generator=self.random).tolist()

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.random)

    def __call__(self, prompts: list[str], made: Any) -> dict[str, Any]:
        """In the place of ``rollout_func``."""
        some, rows = self.some, range(len(prompts))
        self.prompts = [[2 + row, *self.ids(0, 4)] for row in rows]
        ends = [[1] * bool(self.uniform() < 0.6) for _ in rows]
        # TRL takes a single column for values of sequences: one row has two tokens.
        kinds = 2 if some["drop_shared_tokens"] else 59  # so that some tokens are shared
        self.completions = [self.ids(1 + (row == 0), some["max_completion_length"], kinds) + ends[row] for row in rows]
        n, rewards = some["num_generations"], self.uniform(len(rows), len(self.functions))
        rewards = {"0 or 1": rewards.round(), "small": rewards * 1e-4}.get(some["rewards"], rewards)
        if some["rewards"] == "equal groups":
            rewards[:n] = 0.1
        if some["rewards"] == "unscored":
            rewards[self.uniform(*rewards.shape) < 0.25] = math.nan
        self.rewards = rewards
        if some["counted"]:
            self.counted = [(self.uniform(len(row)) < some["counted"]).int().tolist() for row in self.completions]
        if some["vllm"]:  # an engine's log-probabilities, of which it does not know some
            oracle, self.logprobs = self.oracle, None
            oracle.exact.load_state_dict(made.model.state_dict())
            with torch.no_grad():
                own, _ = oracle.scores(Generation(oracle.o, self), slice(None))
            strange = own + 0.4 * torch.randn(own.shape, generator=self.random)
            strange[self.uniform(*own.shape) < 0.02] = math.nan
            self.logprobs = [strange[row, : len(self.completions[row])].tolist() for row in rows]
        masks = {"env_mask": self.counted} if self.counted else {}
        return {"prompt_ids": self.prompts, "completion_ids": self.completions, "logprobs": self.logprobs, **masks}

    def function(self, place: int) -> Callable[..., list[float]]:
        def reward(**_: Any) -> list[float]:
            return self.rewards[:, place].tolist()

        reward.__name__ = f"reward{place}"
        return reward


def run(seed: int, saved: str, loss: str, level: str, given: dict[str, Any]) -> int:
    """Trains with the configuration of this seed. Returns the number of gradients that were compared."""
    random = random_generator(seed)
    some = drawn(lambda *among: among[int(torch.randint(len(among), (), generator=random))], loss, level, given)
    made_up, options = MadeUp(some, seed + 1), {name: some[name] for name in some if name not in OURS}
    policy = model()
    policy.config._name_or_path = saved  # from which TRL loads the reference
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=random))
    try:
        if refused(some):
            with pytest.raises(ValueError, match="takes"):
                trainer(policy=policy, reward_funcs=made_up.functions, **options)
            return 0
        made = trainer(policy=policy, reward_funcs=made_up.functions, max_grad_norm=0.0, **options)
        with pytest.MonkeyPatch.context() as patch:
            return followed(made, some, made_up, patch)
    except (Exception, pytest.fail.Exception) as error:
        raise AssertionError(
            f"run({seed}, saved, {loss!r}, {level!r}, {given}) draws this again: {some}: {error}"
        ) from error


def followed(made: Any, some: dict[str, Any], made_up: MadeUp, patch: pytest.MonkeyPatch) -> int:
    made.use_vllm, made.rollout_func, made._last_loaded_step = some["vllm"], made_up, -1
    made.vllm_generation = type("Engine", (), {"sync_weights": lambda self: None})()
    made_up.oracle = oracle = Oracle(made, some, made_up)
    made.remove_callback(PrinterCallback)
    made.add_callback(oracle)
    shuffle, compute_loss, forward = grpo_trainer.shuffle_sequence_dict, made.compute_loss, made.model.forward
    log_tokens, kept, forwards = made._log_tokens, [], []

    def shuffled(batch: dict[str, Any]) -> dict[str, Any]:
        with torch.random.fork_rng(devices=[]):  # what TRL is going to draw
            order = torch.randperm(len(batch["advantages"])).tolist()
        oracle.generated(batch, order)
        return shuffle(batch)

    def computed(model: Any, inputs: dict[str, Any], **more: Any) -> Any:
        kept.clear()
        forwards.clear()
        loss = compute_loss(model, inputs, **more)
        oracle.trains(inputs, *kept, *forwards)
        return loss

    def watched(**inputs: Any) -> Any:
        forwards.append(inputs)
        return forward(**inputs)

    patch.setattr(grpo_trainer, "shuffle_sequence_dict", shuffled)
    made.compute_loss, made.model.forward = computed, watched
    made._log_tokens = lambda *parts: kept.append(parts[1].kept) or log_tokens(*parts)
    with suppress(Unsure):
        made.train()
    return oracle.checked


@pytest.mark.filterwarnings("ignore:rollouts_")  # keeping more rollouts than was asked for
@pytest.mark.filterwarnings("ignore:d3s/off_policy_share")  # an update without a policy gradient
@pytest.mark.parametrize(
    ("loss", "level", "given"),
    [*((loss, level, {}) for loss, level in KINDS), *MEETING.values()],
    ids=[*("-".join(kind) for kind in KINDS), *MEETING],
)
def test_a_run_with_random_options_does_what_the_pages_say(
    loss: str, level: str, given: dict[str, Any], saved: str
) -> None:
    seeds = torch.randint(2**31, (CONFIGURATIONS,)).tolist()
    with threads(1):
        compared = sum(run(seed, saved, loss, level, given) for seed in seeds)
    assert compared > CONFIGURATIONS or not EVERYTHING  # a few runs may all be refused, or stop where rounding decides
