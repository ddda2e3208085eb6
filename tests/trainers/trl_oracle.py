"""What the pages say of a training run with D3STrainer: choices, gradients and metrics, computed in float64.

It is written from docs/ and TRL's source, not from the integration: a copy of the model in float64, the definitions of
``d3s_kernels.reference``, and TRL's own loss on scores in float64. Of a run it takes the generation batches, the
weights and the rows of each micro-batch. Where a choice is free (random draws, scores that tie but for rounding), it
takes the trainer's, after it has checked that it is one of those allowed.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from fractions import Fraction
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from test_trusted_tokens import meaning as weights_of_rule
from torch import Tensor
from torch.nn.functional import pad
from transformers import Qwen2ForCausalLM, TrainerCallback
from trl import GRPOTrainer

from d3s_kernels import reference

CLOSE = 1e-5  # to a border, such as that of a clip range: float32 may lie on either side
OF_ENTROPIES = ("entropy", "entropy_quantile")
ROW_MEANS = ("grpo", "sapo", "dr_grpo", "luspo")  # losses that are means over the rows of a micro-batch
# What TRL logs of the generation and of time: no selection touches it.
UNTOUCHED = (
    "completions/", "rewards/", "reward_std", "frac_reward", "sampling/", "step_time", "learning_rate", "grad_norm",
    "epoch", "num_tokens",
)  # fmt: skip


class Unsure(Exception):
    """A value is so close to a border that rounding decides."""


def meaning(args: Any, given: dict[str, Any]) -> SimpleNamespace:
    """The options, with those that others stand for."""
    o = SimpleNamespace(**{**vars(args), **given})
    if o.keep_all:
        o.rollouts_start = o.rollouts_end = o.token_ratio_start = o.token_ratio_end = 1.0
    if o.top_entropy_quantile < 1:
        o.token_ratio_start = o.token_ratio_end = o.top_entropy_quantile
        o.token_rule, o.loss_denominator = "entropy", "all"
    o.corrects = o.vllm and o.vllm_importance_sampling_correction
    several_updates = o.gradient_accumulation_steps % (o.steps_per_generation * o.num_iterations) != 0
    o.scores_old = several_updates or o.corrects or o.off_policy_rule != "none"
    known = o.scores_old or o.token_rule == "prefix"
    o.before = known if o.entropy_from == "auto" else o.entropy_from == "rollout"
    depends = o.importance_sampling_level != "token" or o.loss_type == "vespo" or o.beta or o.entropy_coef
    o.independent = not depends and o.off_policy_mask_threshold is None
    o.cuts = o.token_rule in ("prefix", "prefix_advantage_entropy")
    o.skips = o.independent and (o.before or o.cuts)  # whether the update computes some tokens alone
    return o


def blend(shape: str, p: Fraction, start: Any, end: Any) -> Any:
    """A number of the schedule, at the share ``p`` of training."""
    if shape == "exponential":
        return start * (end / start) ** float(p)
    return start + (end - start) * (p if shape == "linear" else 0.5 - 0.5 * math.cos(math.pi * p))


def number(given: float, n: int) -> int:
    rounded_half_up = given if given > 1 else math.floor(Fraction(str(given)) * n + Fraction(1, 2))
    return min(max(int(rounded_half_up), 2), n)


def groups_of_mass(rewards: Tensor, share: float | None, multiple: int) -> list[int]:
    """The groups of ``rewards`` ``[groups, n]`` of which rollouts may be kept."""
    if share is None:
        return list(range(len(rewards)))
    equal, n = reference.groups_without_spread(rewards), rewards.shape[1]
    spread = [group[group.isfinite()].double().var(correction=0) for group in rewards]
    spread = [0.0 if equal[group] else float(f"{spread[group]:.5g}") for group in range(len(equal))]  # so that some tie
    chosen: list[int] = []
    for group in sorted(range(len(spread)), key=lambda group: -spread[group]):
        missing = share == 1 or sum(spread[i] for i in chosen) < share * (1 - 1e-5) * sum(spread)
        if (spread[group] > 0 and missing) or len(chosen) * n < multiple:
            chosen.append(group)
    return sorted(chosen)


def assert_rollouts(o: Any, kept: list[int], values: Tensor, total: int) -> None:
    """That the kept rows, of ``values`` ``[groups, n]``, are those of the rule."""
    groups, n = values.shape
    assert kept == sorted(set(kept)), "order of rollouts"
    assert len(kept) == total, f"kept {len(kept)} rollouts, not {total}"

    def chosen(values: Tensor, k: int) -> list[int]:
        return reference.select_rollouts(values[None], k, rule=o.rollout_rule)[0].nonzero()[:, 0].tolist() if k else []

    if o.rollout_scope == "batch":
        assert o.rollout_rule == "random" or kept == chosen(values.flatten(), total), "rollouts of the batch"
        return
    own, (each, more) = [[i % n for i in kept if i // n == group] for group in range(groups)], divmod(total, groups)
    assert sorted(map(len, own)) == [each] * (groups - more) + [each + 1] * more, "rollouts of each group"
    if o.rollout_rule == "random":
        return
    assert own == [chosen(values[g], len(own[g])) for g in range(groups)], "rollouts of a group"
    # One more is kept of the groups with the largest variance, the first of those that tie.
    spread = [
        values[g][chosen(values[g], each + 1)].double().var(correction=0).item() if more else 0 for g in range(groups)
    ]
    for g, other in ((g, other) for g in range(groups) for other in range(groups) if len(own[g]) > len(own[other])):
        rises = spread[g] > spread[other] * (1 + 1e-9) or (g < other and spread[g] >= spread[other] * (1 - 1e-4))
        assert rises, "the group of which one more rollout is kept"


def assert_tokens(o: Any, kept: Tensor, score: Tensor, allowed: Tensor, ratio: float) -> Tensor:
    """That those with the largest scores are kept. Returns the lowest kept score, or one for each sequence."""
    assert not (kept & ~allowed).any(), "a token is kept that may not be"
    if o.token_scope == "sequence" and len(kept) > 1:
        rows = zip(kept[:, None], score[:, None], allowed[:, None], strict=True)
        return torch.cat([assert_tokens(o, *row, ratio) for row in rows])
    if o.token_rule == "entropy_quantile":
        border = torch.quantile(score[allowed], 1 - ratio) if allowed.any() else torch.tensor(math.nan)
        clear = allowed & ((score - border).abs() > CLOSE)
        assert kept[clear].equal((score > border)[clear]), "tokens at or above the quantile"
        return border[None]
    n = int(allowed.sum())
    k = n if o.token_rule == "prefix" else min(n, max(1, math.ceil(ratio * n - 1e-9)))
    if o.drop_zeros:
        allowed = allowed & (score != 0)
    assert kept.sum() == min(k, int(allowed.sum())), f"kept {kept.sum()} of {n} tokens, not {k}"
    if o.token_rule in ("random", "prefix") or not kept.any():
        return torch.tensor([math.nan])
    lowest, others = score[kept].min(), allowed & ~kept
    if others.any():
        highest = score[others].max()
        assert lowest >= highest - CLOSE * (1 + highest), "a token of a lower score is kept"
        if o.token_rule == "advantage" or lowest == 0:  # scores that tie exactly
            last, first = ((part & (score == lowest)).flatten().nonzero() for part in (kept, others))
            assert not len(first) or last.max() < first.min(), "not the first of equal scores are kept"
    return lowest[None]


# ---- a run -----------------------------------------------------------------------------------------------------------


class Generation:
    """A generation batch, with a row for each rollout. The first token of a row's prompt is 2 + the row's number."""

    def __init__(self, o: Any, made_up: Any) -> None:
        prompts, completions = made_up.prompts, made_up.completions
        self.columns, self.prompt = max(map(len, completions)), max(map(len, prompts))
        self.ids = torch.stack([pad(torch.tensor(row), (self.prompt - len(row), 0)) for row in prompts])
        self.ids = torch.cat([self.ids, self.padded(completions)], dim=1)
        whole = torch.tensor([not o.mask_truncated_completions or row[-1] in (0, 1) for row in completions])
        there = self.padded([[1] * len(row) for row in completions]) * whole[:, None]
        self.attend = torch.cat([self.ids[:, : self.prompt].clamp(max=1), there], dim=1)
        self.mask = (there * self.padded(made_up.counted) if made_up.counted else there).bool()
        self.q = self.padded(made_up.logprobs) if made_up.logprobs else None

    def padded(self, rows: list[list[Any]]) -> Tensor:
        parts = [torch.tensor([math.nan if value is None else value for value in row]) for row in rows]
        return torch.stack([pad(part, (0, self.columns - len(part))) for part in parts])

    def wide(self, rows: list[int], values: Tensor) -> Tensor:
        """A field of some rows, in other columns, as one of all rows and columns."""
        values = pad(values, (0, max(0, self.columns - values.shape[1])))[:, : self.columns]
        return values.new_zeros(self.mask.shape).index_copy(0, torch.tensor(rows), values)


def in_float64(source: Any) -> Any:
    """A copy that computes in float64, also where transformers takes float32."""
    exact = Qwen2ForCausalLM(source.config).double()
    exact.load_state_dict(source.state_dict())
    for norm in (module for module in exact.modules() if hasattr(module, "variance_epsilon")):
        norm.forward = lambda x, m=norm: m.weight * x * (x.square().mean(-1, True) + m.variance_epsilon).rsqrt()
    return exact


def rows_of(batch: dict[str, Any]) -> list[int]:
    first = batch["prompt_mask"].argmax(dim=1, keepdim=True)
    return (batch["prompt_ids"].gather(1, first)[:, 0] - 2).tolist()


class Oracle(TrainerCallback):
    """Follows a training run, and raises an AssertionError at the first choice, gradient or metric that is not right.

    ``made_up`` has the prompts, completions, log-probabilities and rewards of the latest generation batch.
    """

    def __init__(self, made: Any, given: dict[str, Any], made_up: Any) -> None:
        self.made, self.made_up, self.o = made, made_up, meaning(made.args, given)
        self.exact, self.reference = in_float64(made.model), in_float64(made.ref_model) if self.o.beta else None
        self.logged: dict[str, list[tuple[float, float]]] = defaultdict(list)  # values and weights
        self.parts: list[Any] = []  # of the current optimizer step
        self.kept_so_far = self.steps = self.at = self.checked = 0
        self.unsure = False

    def add(self, name: str, value: Any, weight: Any = 1) -> None:
        self.logged[name].append((float(value), float(weight)))

    def scores(self, g: Generation, rows: Any, model: Any = None) -> tuple[Tensor, Tensor]:
        logits = (model or self.exact)(input_ids=g.ids[rows], attention_mask=g.attend[rows]).logits
        logprobs = (logits[:, -g.columns - 1 : -1] / self.o.temperature).log_softmax(-1)
        return logprobs.gather(2, g.ids[rows, -g.columns :, None])[..., 0], -(logprobs.exp() * logprobs).sum(2)

    def progress(self) -> Fraction:
        return Fraction(self.made.state.global_step, max(self.o.max_steps - 1, 1))

    def ratio(self) -> float:
        start, end = (Fraction(str(share)) for share in (self.o.token_ratio_start, self.o.token_ratio_end))
        return float(blend(self.o.schedule_shape, self.progress(), start, end))

    def score(self, advantages: Tensor, entropy: Tensor) -> Tensor:
        size = advantages.abs().double()[:, None].expand_as(entropy)
        by_both = self.o.token_rule in ("advantage_entropy", "prefix_advantage_entropy")
        return size * entropy if by_both else size if self.o.token_rule in ("advantage", "prefix") else entropy

    @torch.no_grad()
    def generated(self, batch: dict[str, Any], order: list[int]) -> None:
        """Checks what the trainer has made of a generation batch. TRL then shuffles its rows into this ``order``."""
        o, n, steps = self.o, self.o.num_generations, self.o.steps_per_generation
        self.exact.load_state_dict(self.made.model.state_dict())
        self.g = g = Generation(o, self.made_up)
        rewards = self.made_up.rewards
        rows, separately = rows_of(batch), o.multi_objective_aggregation == "normalize_then_sum"
        total = (rewards * torch.tensor(o.reward_weights or [1.0] * rewards.shape[1])).nansum(1)
        total[rewards.isnan().all(1)] = math.nan
        each_reward = rewards.T if separately else total[None]
        equal = reference.groups_without_spread(each_reward.reshape(len(each_reward), -1, n)).all(0)
        g.advantages = torch.tensor(list(self.made._logs["advantages"])[-len(total) :]).view(-1, n)
        if not o.keep_all:
            g.advantages = g.advantages.masked_fill(equal[:, None], 0.0)
        g.shared = torch.zeros_like(g.mask)
        if o.drop_shared_tokens:
            g.shared = reference.shared_tokens(g.ids[:, -g.columns :], g.advantages, g.mask)
        # Rollouts.
        values, has_tokens = g.advantages.clone(), g.mask.any(1).view(-1, n)
        lowest = values[has_tokens].min() - 1 if has_tokens.any() else 0
        values[~has_tokens] = lowest if o.rollout_rule == "highest" else 0
        ends = (number(given, n) for given in (o.rollouts_start, o.rollouts_end))
        each = math.floor(blend(o.schedule_shape, self.progress(), *ends) + Fraction(1, 2))
        groups = groups_of_mass(total.view(-1, n), o.group_variance_mass, steps)
        assert {row // n for row in rows} <= set(groups), "a rollout of a group that is left out"
        among = [groups.index(row // n) * n + row % n for row in rows]
        most = len(groups) * n // steps * steps
        assert_rollouts(o, among, values[groups], min(-(-each * len(groups) // steps) * steps, most))
        kept = torch.zeros(len(total), dtype=torch.bool).index_fill(0, torch.tensor(rows), True)
        if o.advantages_from == "kept":  # normalised over what is kept of each group
            scale = "none" if separately or o.scale_rewards == "batch" else o.scale_rewards
            of_kept = g.advantages.masked_fill(~kept.view(-1, n) | total.view(-1, n).isnan(), math.nan)
            g.advantages = reference.group_advantages(of_kept, scale=scale).masked_fill(equal[:, None], 0.0)
        g.advantages = g.advantages.flatten()
        found = batch["advantages"]
        assert found.double().allclose(g.advantages[rows].double(), rtol=1e-4, atol=1e-5), "advantages"
        assert found[g.advantages[rows] == 0].count_nonzero() == 0, "advantages of rounding alone"
        g.advantages, g.left = g.advantages.float().index_copy(0, torch.tensor(rows), found), g.mask & kept[:, None]
        g.items = g.left.sum()
        assert batch["num_items_in_batch"] == g.items, "num_items_in_batch"
        g.slots = torch.tensor(rows)[order].view(steps, -1).tolist()
        widths = [g.prompt, g.columns]
        if len(rows) < len(total) or o.group_variance_mass:
            widths = [int(part[rows].sum(1).max()) for part in g.attend.split(widths, dim=1)]
        unit = o.pad_to_multiple_of or 1
        g.width = sum(max(-(-width // unit) * unit, least) for width, least in zip(widths, (1, 2), strict=True))
        for name, value in {
            "rollouts_kept": len(rows), "rollout_share": kept.float().mean(), "rollout_share_asked": each / n,
            "groups_without_spread": equal.float().mean(),
            "groups_kept": kept.view(-1, n).any(1).float().mean(), "tokens_not_forwarded": g.mask.sum() - g.items,
        }.items():  # fmt: skip
            self.add(f"d3s/{name}", value)
        if o.drop_shared_tokens:
            self.add("d3s/shared_share", (g.left & g.shared).sum() / g.items)
        self.add("reward", total.nanmean())
        self.before_the_update(g, batch, rows)

    def before_the_update(self, g: Generation, batch: dict[str, Any], rows: list[int]) -> None:
        """Scores, off-policy tokens and, if they are chosen now, the kept tokens."""
        o, (g.logp, g.entropy) = self.o, self.scores(g, slice(None))
        g.fields = {}
        if self.reference:
            g.fields["ref_per_token_logps"] = self.scores(g, slice(None), self.reference)[0]
        if g.q is not None:
            g.fields["sampling_per_token_logps"] = g.q.double()
        g.trusted, g.weight = g.left, torch.ones_like(g.logp)
        if o.off_policy_rule != "none":
            bounds = {"high": o.off_policy_high} | ({} if o.off_policy_low is None else {"low": o.off_policy_low})
            exact, *near = (
                weights_of_rule(g.logp + shift, g.q, o.off_policy_rule, g.left, None, g.advantages, **bounds)
                for shift in (0.0, -CLOSE, CLOSE)
            )
            g.trusted, g.weight = exact > 0, exact.double()
            if not all((weight > 0).equal(g.trusted) for weight in near):
                raise Unsure
        if o.corrects:  # TRL's ratios, once the log-probabilities that they are of have been compared
            old, ratio = (batch[name] for name in ("old_per_token_logps", "importance_sampling_ratio"))
            assert ((g.wide(rows, old) - g.logp)[g.left].abs() < 1e-4).all(), "old log-probabilities"
            ratio = g.wide(rows, ratio.expand_as(old)).double()
            g.fields["importance_sampling_ratio"] = ratio.masked_fill(~g.left, 1.0)
        g.has_weight = g.trusted & (g.fields.get("importance_sampling_ratio", torch.ones(())) != 0)
        g.trusted = (g.has_weight if o.independent else g.trusted) & ~g.shared
        g.cut_weight, g.before_cut = torch.ones_like(g.logp), g.left
        if o.cuts:
            generator = torch.Generator().manual_seed(o.seed + 1_000_003 * self.made.state.global_step + 499_979)
            draws = torch.rand(len(g.mask), dtype=torch.float64, generator=generator)
            tokens = g.left if o.off_policy_rule == "none" else g.trusted
            share = self.ratio() if o.token_rule == "prefix" else 0.5
            g.before_cut, g.cut_weight, _ = reference.random_prefixes(tokens, share, draws=draws)
        g.allowed, g.ratio = g.trusted & g.before_cut, self.ratio()
        g.old = g.logp
        if o.skips and not o.corrects and o.off_policy_rule == "none":  # else the pass is before the cuts
            any_pass = o.scores_old or (o.before and o.token_rule != "prefix")
            g.old = g.logp.masked_fill(~g.before_cut, 0.0) * any_pass
        if o.scores_old:
            g.fields["old_per_token_logps"] = g.old
        if o.before:
            g.kept, score = g.wide(rows, batch["d3s_kept"]), self.score(g.advantages, g.entropy)
            threshold = assert_tokens(o, g.kept[rows], score[rows], g.allowed[rows], g.ratio)
            g.threshold = g.logp.new_zeros(len(g.mask)).index_put((torch.tensor(rows),), threshold.double())

    def trains(self, batch: dict[str, Any], kept: Tensor, forward: dict[str, Tensor]) -> None:
        """Notes a micro-batch: its rows, the tokens that get a gradient, and the number of positions forwarded."""
        rows, g, shape = rows_of(batch), self.g, forward["input_ids"].shape
        self.parts.append((g, rows, g.wide(rows, kept)[rows], shape.numel()))
        needed = batch["completion_mask"]  # also a tool's tokens
        if self.o.skips:  # neither rows nor columns without a needed token are forwarded
            needed = (g.kept if self.o.before else g.before_cut)[rows]
            last, unit = (needed.any(0) * torch.arange(1, g.columns + 1)).max(), self.o.pad_to_multiple_of or 1
            prompt, completion = (batch[f"{side}_ids"].shape[1] for side in ("prompt", "completion"))
            width = prompt + max(int(last), 1)
            assert shape == (
                max(int(needed.any(1).sum()), 1), min(-(-width // unit) * unit, prompt + completion)
            ), "rows and columns of the forward"  # fmt: skip
        assert (forward["labels"] != -100).sum() == needed.sum(), "tokens whose scores are computed"

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.exact.load_state_dict(self.made.model.state_dict())
        self.exact.zero_grad()
        number = sum(int(kept.sum()) for _, _, kept, _ in self.parts)
        # The weights of these losses vanish where ratios are far from 1.
        self.floor = 1e-5 if self.o.loss_type in ("sapo", "vespo") else 1e-30
        self.kept_so_far += number
        try:
            for g, rows, kept, _ in self.parts:
                self.add("loss", self.loss(g, rows, kept))
            parameters = zip(self.made.model.parameters(), self.exact.parameters(), strict=True)
            pairs = [[torch.zeros(1) if p.grad is None else p.grad.flatten() for p in pair] for pair in parameters]
            error, size = (torch.cat(parts).norm() for parts in ([a - b for a, b in pairs], [b for _, b in pairs]))
            assert error <= 1e-4 * size + self.floor, f"gradient: an error of {error}, of {size}"
            self.checked += 1
        except Unsure:
            self.unsure = True
        self.add("d3s/updates_without_tokens", number == 0)
        self.check_division()
        self.steps, self.parts = self.steps + 1, []

    def check_division(self) -> None:
        """A step trains on the rows of TRL's shuffle, and on TRL's micro-batches if the gradient depends on them."""
        o, parts = self.o, self.parts
        depends = o.loss_type == "bnpo" or o.entropy_coef
        depends = depends or (not o.before and (self.ratio() < 1 or o.drop_zeros) and o.order_rows != "work")
        while parts:  # those of a generation batch, up to its end
            g, size = parts[0][0], min(len(parts), o.steps_per_generation - self.at)
            own, slots, parts = parts[:size], parts[0][0].slots[self.at :][:size], parts[size:]
            self.at = (self.at + size) % o.steps_per_generation
            rows = list(chain(*(part[1] for part in own)))
            if o.order_rows == "none" or depends:
                assert slots == [part[1] for part in own], "rows of a micro-batch"
            else:
                assert sorted(chain(*slots)) == sorted(rows), "rows of a step"
            if o.order_rows != "none":
                positions, tokens = [part[3] for part in own], g.attend[rows].sum(1)
                needed = tokens
                if o.skips:  # nothing behind a row's last kept token, or its cut, is needed
                    needed = (g.kept if o.before else g.before_cut)[rows]
                    last = (needed * torch.arange(1, g.columns + 1)).amax(1)
                    needed = (last > 0) * (last + g.attend[rows, : g.prompt].sum(1))
                self.add("d3s/padding", 1 - needed.sum() / sum(positions))
                self.add("d3s/padding_before", 1 - tokens.sum() / (g.width * len(rows)))
                self.add("d3s/largest_micro_batch", max(positions))

    def loss(self, g: Generation, rows: list[int], kept: Tensor) -> Tensor:
        """Adds a micro-batch's gradient and metrics, and returns its loss."""
        o, mask, advantages, trusted = self.o, g.mask[rows], g.advantages[rows], g.trusted[rows]
        logp, entropy = self.scores(g, rows)
        if o.before:
            assert kept.equal(g.kept[rows]), "tokens that were chosen before the update"
            threshold = g.threshold[rows] if o.token_scope == "sequence" else g.threshold[rows[:1]]
        else:
            score = self.score(advantages, entropy.detach())
            threshold = assert_tokens(o, kept, score, g.allowed[rows], self.ratio())
        measured = mask
        if o.skips:  # the other tokens have the scores of earlier passes
            needed = kept if o.before else g.before_cut[rows]
            logp, entropy = (torch.where(needed, *both) for both in ((logp, g.old[rows]), (entropy, g.entropy[rows])))
            earlier = g.before_cut[rows] & (o.before and o.token_rule != "prefix")
            if not o.scores_old and o.token_rule not in OF_ENTROPIES:  # of which some were skipped
                earlier = earlier & (advantages != 0)[:, None]
            measured = mask & (needed | earlier)
        fields = {name: value[rows] for name, value in g.fields.items()}
        fields |= {"completion_mask": mask.long(), "advantages": advantages.double(), "num_items_in_batch": g.items}
        of_espo = g.entropy[rows] if o.before and (o.scores_old or not o.cuts) else entropy.detach()
        share = len(rows) / len(g.slots[0]) if o.loss_type in ROW_MEANS else 1.0

        def of_trl(shift: float, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor, dict[str, Any]]:
            leaves = [(value.detach() + by).to(dtype).requires_grad_() for value, by in ((logp, shift), (entropy, 0.0))]
            given = {name: value.to(dtype) if value.is_floating_point() else value for name, value in fields.items()}
            value, metrics = self.trls_loss(leaves, given, of_espo.to(dtype))
            slopes = torch.autograd.grad(value * share, leaves, allow_unused=True, materialize_grads=True)
            return list(slopes), value.detach() * share, metrics

        slopes, value, metrics = of_trl(0.0)
        if o.scores_old:  # else all ratios are 1
            for near, _, of_near in (of_trl(-CLOSE), of_trl(CLOSE)):
                jumps = (near[0] - slopes[0])[mask].abs() > 1e-2 * slopes[0].abs().max()
                if jumps.any() or any(abs(of_near[name][0] - metrics[name][0]) > 1e-2 for name in metrics):
                    raise Unsure
            # Where ratios are far from 1, the gradients of some losses vanish, and float32 has few digits of them.
            rounded = of_trl(0.0, torch.float32)[0]
            if any((few - slope).norm() > 1e-4 * slope.norm() for few, slope in zip(rounded, slopes, strict=True)):
                raise Unsure
        weights = self.factor(kept, trusted, g) * g.weight[rows] * g.cut_weight[rows], g.cut_weight[rows]
        if o.loss_denominator == "kept":
            weights = weights[0], trusted.sum() / kept.sum().clamp(min=1)
        slopes = [torch.where(kept, slope * weight, 0.0) for slope, weight in zip(slopes, weights, strict=True)]
        torch.autograd.backward([logp, entropy], slopes)
        self.floor += 1e-5 * float(sum(slope.abs().sum() for slope in slopes))
        self.metrics(metrics, kept, mask, measured, entropy.detach(), advantages)
        asked = g.ratio if o.before else self.ratio()
        self.add("d3s/token_share_asked", asked / 2 if o.token_rule == "prefix_advantage_entropy" else asked)
        if o.corrects or o.off_policy_rule != "none":
            self.add("d3s/off_policy_share", 1 - g.has_weight[rows].sum() / mask.sum(), mask.sum())
        for lowest in threshold:
            self.add("d3s/threshold", lowest)
        return value

    def trls_loss(self, leaves: list[Tensor], batch: dict[str, Tensor], entropy: Tensor) -> tuple[Tensor, Any]:
        """TRL's loss of scores, and its metrics. For ESPO, the log-ratios, clip ranges and weights are the paper's."""
        trl, (logp, _), mask = copy.copy(self.made), leaves, batch["completion_mask"].bool()
        trl._metrics, trl.top_entropy_quantile = {"train": defaultdict(list)}, 1.0
        trl._get_per_token_logps_and_entropies = lambda *_, **__: (*leaves, None)
        batch |= {"prompt_ids": batch["completion_mask"], "prompt_mask": batch["completion_mask"]}
        batch["completion_ids"] = batch["completion_mask"]
        if self.o.importance_sampling_level == "entropy_group":
            if (entropy.masked_fill(~mask, math.nan).sort(dim=1).values.diff(dim=1) < CLOSE).any():
                raise Unsure  # which of two tokens is above a cut
            groups = reference.entropy_groups(entropy, mask, quantiles=self.o.espo_quantiles)
            old = batch.get("old_per_token_logps", logp.detach())
            level = {"level": "entropy_group", "groups": groups, "log_bounds": (-math.inf, math.inf)}
            ratio = reference.importance_ratio(logp, old, mask, **level, denominator=self.o.espo_denominator)
            vocabulary = self.made.model.config.vocab_size
            trl.epsilon_low = trl.epsilon_high = reference.adaptive_clip(
                entropy, groups, mask, vocab_size=vocabulary, alpha=self.o.espo_alpha
            )
            weight = torch.ones_like(logp)
            for row in range(len(mask)) if self.o.loss_type == "grpo" else ():
                present = groups[row][mask[row]].unique()
                for group in present:  # a mean over the groups of the means over their tokens
                    members = groups[row] == group
                    weight[row, members] = mask[row].sum() / (len(present) * members.sum())
            batch["advantages"] = batch["advantages"][:, None] * weight
            batch.setdefault("sampling_per_token_logps", old)
            batch["old_per_token_logps"], trl.importance_sampling_level = logp.detach() - ratio.detach().log(), "token"
        return GRPOTrainer._compute_loss(trl, None, batch), trl._metrics["train"]

    def factor(self, kept: Tensor, trusted: Tensor, g: Generation) -> Any:
        """What ``loss_denominator="kept"`` multiplies the gradient by (the table of docs/trl.md)."""
        if self.o.loss_denominator == "all" or self.o.loss_type == "luspo":
            return 1.0
        if self.o.loss_type in ("grpo", "sapo"):
            return trusted.sum(1, keepdim=True) / kept.sum(1, keepdim=True).clamp(min=1)
        if self.o.loss_type != "bnpo" and self.o.before:
            kept, trusted = g.kept, g.trusted
        return trusted.sum() / kept.sum().clamp(min=1)

    def metrics(
        self, of_trl: dict[str, list[float]], kept: Tensor, mask: Tensor, measured: Tensor, entropy: Tensor, A: Tensor
    ) -> None:
        number, tokens, dropped = kept.sum(), mask.sum(), measured & ~kept
        for name, value, weight in (
            ("tokens_kept", number, 1), ("token_share", number / tokens, tokens),
            ("head_rows_not_computed", tokens - number, 1), ("entropy_kept", entropy[kept].mean(), number),
            ("entropy_dropped", entropy[dropped].mean(), dropped.sum()),
            ("positive_advantage_share", (A > 0)[:, None].expand_as(kept)[kept].float().mean(), number),
        ):  # fmt: skip
            self.add(f"d3s/{name}", value, weight)
        if measured.any() or tokens:  # else it is TRL's mean over no tokens, 0
            of_trl["entropy"] = [entropy[measured].mean()]
        by_row = self.o.importance_sampling_level == "sequence"
        for name, (value,) in of_trl.items():
            weight = {"entropy": measured.sum(), "kl": tokens, "vespo/phi_seq_mean": len(mask)}.get(name, 1)
            if name == "cispo_clip_ratio" or (name.startswith("clip") and name.endswith("mean")):
                weight = len(mask) if by_row else tokens
            self.add(name, value, weight)

    def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
        """Compares what is logged: means with weights, of what is no NaN."""
        if "loss" not in logs:
            return
        expected = {"d3s/num_tokens_kept": float(self.kept_so_far)}
        for name, pairs in self.logged.items():
            weighs = any(weight for _, weight in pairs)
            there = [(v, w if weighs else 1.0) for v, w in pairs if not math.isnan(v)]
            if there := [(v, w) for v, w in there if w]:
                expected[name] = sum(v * w for v, w in there) / sum(w for _, w in there)
        if largest := self.logged.get("d3s/largest_micro_batch"):
            expected["d3s/largest_micro_batch"] = max(largest)[0]
        expected["loss"] = sum(value for value, _ in self.logged["loss"]) / self.steps
        found = {name: value for name, value in logs.items() if value is not None and not name.startswith(UNTOUCHED)}
        if self.o.token_rule in ("random", "prefix"):  # which have no scores
            found.pop("d3s/threshold", None)
        if not self.unsure:
            assert found.keys() == expected.keys(), f"logged are {found.keys() ^ expected.keys()}, or not"
            for name, value in expected.items():
                assert abs(found[name] - value) <= 1e-4 * abs(value) + 2e-5, (
                    f"{name}: logged {found[name]}, not {value}"
                )
        self.logged.clear()
        self.steps, self.unsure = 0, False
