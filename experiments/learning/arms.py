"""The arms: what each generates and how old it is, which of it it trains on, and by which rule."""

from __future__ import annotations

from dataclasses import dataclass, replace

from d3s_kernels import Budget, DownSamplingSchedule
from d3s_kernels.off_policy.trusted_tokens import TrustRule
from d3s_kernels.rollouts.select_rollouts import RolloutRule
from d3s_kernels.tokens.select_tokens import TokenRule

ALL_TOKENS = 1.0
STALENESS = 3  # of the arms that train on old samples


@dataclass(frozen=True)
class Arm:
    name: str
    generated: int  # rollouts of a prompt
    schedule: DownSamplingSchedule  # of the rollouts to train on, and of the share of their tokens
    rollout_rule: RolloutRule | None = None  # None: all of them
    token_rule: TokenRule | None = None  # None: all of them
    pooled: bool = False  # rollouts are chosen from the whole batch, and keep the advantages of their whole group
    staleness: int = 0  # updates since the version of the model that generates
    trust_rule: TrustRule | None = None  # where that is not 0, instead of PPO's clipping

    def __str__(self) -> str:
        return self.name


def arms(many: int, few: int) -> dict[str, Arm]:
    """All arms by name, of ``many`` rollouts for a prompt, of which ``few`` are trained on."""

    def always(rollouts: int, share: float = ALL_TOKENS) -> DownSamplingSchedule:
        budget = Budget(rollouts, share)
        return DownSamplingSchedule(budget, budget)

    rollouts_grow = DownSamplingSchedule(Budget(few, ALL_TOKENS), Budget(many, ALL_TOKENS))
    both_grow = DownSamplingSchedule(Budget(few, 0.05), Budget(many, 0.20))  # of the paper, where it is 8 of 32
    every = [
        Arm(f"GRPO-{many}", many, always(many)),
        Arm(f"GRPO-{few}", few, always(few)),
        Arm(f"random {few} of {many}", many, always(few), "random"),
        Arm("PODS", many, always(few), "max_variance"),
        Arm("D3S, rollouts alone", many, rollouts_grow, "max_variance", pooled=True),
        Arm("D3S", many, both_grow, "max_variance", "advantage_entropy", pooled=True),
        Arm("D3S, random tokens", many, both_grow, "max_variance", "random", pooled=True),
        Arm("NAT, prefixes", many, always(many, 0.5), None, "prefix"),
        Arm("NAT, random tokens", many, always(many, 0.5), None, "random"),
    ]
    fresh = {arm.name: arm for arm in every}
    old = [
        replace(fresh[name], name=f"{name}, {STALENESS} old", staleness=STALENESS)
        for name in (f"GRPO-{many}", f"GRPO-{few}", "PODS", "D3S, rollouts alone")
    ]
    icepop = replace(old[0], name=f"{old[0]}, IcePop", trust_rule="token_mask")
    return fresh | {arm.name: arm for arm in (*old, icepop)}
