"""One object that chooses rollouts and tokens, with one set of options, for authors of trainers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._arguments.checks import (
    as_bool,
    require_optional_tensors,
    require_tensors,
)
from .._collectives import ranks_of
from .._rules.groups import in_groups as in_groups
from .._rules.groups import labels_of
from .._rules.rules import PREFIX_RULES
from .._rules.variance import by_variance, checked_rewards, variances
from ..off_policy.trusted_tokens import TrustedTokens, trusted_tokens
from ..rollouts.select_rollouts import (
    RolloutRule,
    Scale,
    group_advantages,
    groups_without_spread,
    select_rollouts,
)
from ..tokens.random_prefixes import Prefixes, random_prefixes
from ..tokens.select_tokens import Placement, TokenSelection, select_tokens
from ..tokens.shared_tokens import shared_tokens
from .options import (
    PREFIX,
    SelectionOptions,
    Shape,
    check_options,
    check_token_rule,
    options_from,
    rollouts_of,
    values_of_words,
)
from .rollouts import choose_rollouts, rounded
from .schedule import Budget, DownSamplingSchedule

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Self


class Selection:
    """Makes D3S's two choices: which rollouts to keep, and which tokens of these rollouts. Both choices depend on the
    options and the progress of training.

    Args:
        options: a :class:`SelectionOptions`, or a trainer's options that inherit it.
        values: options by name, instead of ``options``; all other options have their defaults.

    Raises:
        ValueError: a bad value; an unknown option; both ``options`` and ``values``.

    Example:
        A step of your own loop, on 4 prompts of 8 rollouts, halfway through training:

        >>> import torch, d3s_kernels as d3s
        >>> selection = d3s.Selection(rollouts_start=2, rollouts_end=4, token_ratio_start=0.2)
        >>> generator = torch.Generator().manual_seed(0)
        >>> rewards = torch.randint(0, 2, (4, 8), generator=generator).float()
        >>> advantages, progress = d3s.group_advantages(rewards), 0.5
        >>> kept = selection.rollouts(advantages, progress)  # on average 3 of each group; their rows are forwarded
        >>> logprob = torch.randn(12, 6, generator=generator).requires_grad_()  # of the tokens of these rows
        >>> entropy, mask = torch.rand(12, 6, generator=generator), torch.ones(12, 6, dtype=torch.bool)
        >>> weights = selection.advantages(advantages, kept)[kept]
        >>> tokens = selection.tokens(entropy, weights, progress, mask=mask)
        >>> loss = -(logprob * weights[:, None])[tokens.mask].sum() / selection.denominator(tokens, mask)
        >>> loss.backward()
        >>> int(kept.sum()), int(tokens.count), int((logprob.grad != 0).sum())
        (12, 15, 15)
    """

    def __init__(self, options: SelectionOptions | None = None, /, **values: Any) -> None:
        if options is not None and values:
            raise ValueError(f"options: got a {type(options).__name__} and {', '.join(values)}; takes one of the two")
        if options is None:
            options = options_from(SelectionOptions, values)
        elif not isinstance(options, SelectionOptions):
            raise TypeError(f"options: got a {type(options).__name__}; takes SelectionOptions, or options by name")
        else:
            check_options(options)
            check_token_rule(options)
        self.options = options

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any] | None, prefix: str = "") -> Self:
        """Makes a selection from a section of a configuration (YAML, Hydra); None is an empty section. Error messages
        put ``prefix`` before an option's name.

        Example:
            >>> import d3s_kernels as d3s
            >>> d3s.Selection.from_mapping({"token_rule": "entropys"}, prefix="algorithm.d3s.")
            Traceback (most recent call last):
                ...
            ValueError: algorithm.d3s.token_rule: got 'entropys'; takes 'advantage_entropy' or 'entropy' or ...
        """
        return cls(options_from(SelectionOptions, values or {}, prefix))

    @classmethod
    def from_words(cls, words: Sequence[str]) -> tuple[Self, list[str]]:
        """Makes a selection from the ``--d3s.`` options of a command line. Also returns the remaining words.

        Example:
            >>> import d3s_kernels as d3s
            >>> selection, rest = d3s.Selection.from_words(["--lr", "1e-6", "--d3s.rollouts_start", "4"])
            >>> selection.options.rollouts_start, rest
            (4, ['--lr', '1e-6'])
        """
        values, rest = values_of_words(words)
        return cls.from_mapping(values, PREFIX), rest

    def schedule(self, group_size: int) -> DownSamplingSchedule:
        """Returns the schedule for groups of this size. Its budgets have numbers of rollouts, not shares."""
        options = self.options
        start = options.rollouts_start, options.token_ratio_start
        return _schedule(start, (options.rollouts_end, options.token_ratio_end), options.schedule_shape, group_size)

    def budget(self, progress: float, group_size: int) -> Budget:
        """Returns the budget at ``progress``, the share of training that is done. The budget's number of rollouts is
        between 2 and ``group_size``.
        """
        return self.schedule(group_size)(progress)

    def number_of_rollouts(self, progress: float, groups: int, n: int, multiple_of: int = 1) -> tuple[int, int]:
        """Returns two totals over ``groups`` groups of ``n`` rollouts: the number of rollouts that the budget asks for,
        and the number that :meth:`rollouts` keeps if all advantages are finite and no group is left out.
        """
        asked = self.budget(progress, n).rollouts * groups
        return asked, rounded(asked, groups * n, multiple_of)

    def rollouts(
        self,
        advantages: Tensor,
        progress: float,
        *,
        groups: Iterable[Hashable] | Tensor | None = None,
        group_size: int | None = None,
        has_tokens: Tensor | None = None,
        rewards: Tensor | None = None,
        multiple_of: int = 1,
        ranks: int | None = None,
        generator: torch.Generator | None = None,
        process_group: ProcessGroup | DeviceMesh | None = None,
    ) -> Tensor:
        """Marks the rollouts to train on. This calls :func:`d3s_kernels.selection.choose_rollouts` with the options'
        rule and scope, and with the budget's number of rollouts.

        With the option ``group_variance_mass``, rollouts are chosen only from the groups that
        :func:`d3s_kernels.variance_mass` marks, and the budget's number is for each of these groups. If they have
        fewer rollouts than ``multiple_of``, the groups with the next lower variances are added. So at least one group
        remains, even if no group has a spread. The host reads which groups remain: a host sync on a GPU.

        Args:
            advantages: float ``[groups, n]``; or ``[N]`` with ``groups``. A rollout whose advantage is not finite is
                never kept.
            progress: the share of training that is done, in [0, 1].
            groups: a label for each of the N rollouts, or an integer tensor ``[N]``. Rollouts with equal labels form a
                group. Rollouts may be in any order, and groups may have any size.
            group_size: the group size for options that are a share of the group; by default the size of the largest
                group. Pass it if rollouts may be missing from groups.
            has_tokens: bool, the shape of ``advantages``: whether the rollout has a token in the loss. A rollout
                without such a token (for example, a truncated rollout) teaches nothing, so its advantage is replaced:
                with the rule "highest" by a value below all other advantages, with all other rules by 0.
            rewards: the shape of ``advantages``; required by the option ``group_variance_mass``, else not read. The
                variances of advantages are not used: after the division by the standard deviation, all groups have the
                same variance.
            multiple_of: at least 1. The number of kept rollouts is rounded up to a multiple of ``multiple_of``. If too
                few rollouts have a finite advantage, it is rounded down.
            ranks: the number of ranks, if each rank has an equal part of the rollouts and must keep the same number of
                them: see :func:`d3s_kernels.selection.choose_rollouts`.
            generator: for the rule "random": a generator on the device of ``advantages``. If several ranks make the
                same choice, the generator must have the same state on all these ranks.

        Across ranks:
            process_group: the ranks, if each rank holds only some of the groups, as in
                :func:`d3s_kernels.select_rollouts`. Without a process group, every process that has all advantages
                makes the same choice.

        Returns:
            bool, the shape of ``advantages``.

        Raises:
            ValueError: fewer rollouts with a finite advantage than ``multiple_of``; a wrong shape; the option
                ``group_variance_mass`` without rewards, or with ``ranks``: a rank may have no group left.

        Example:
            >>> import torch, d3s_kernels as d3s
            >>> selection = d3s.Selection(rollouts_start=2, rollouts_end=2, rollout_scope="group")
            >>> advantages = torch.tensor([0.3, 1.5, -0.9, 0.0, -1.5, 0.6])
            >>> selection.rollouts(advantages, 0.0, groups=["a", "b", "a", "a", "b", "b"])
            tensor([ True,  True,  True, False,  True, False])
            >>> selection.rollouts(advantages, 0.0, groups=["a", "b", "a", "a", "b", "b"], multiple_of=5)
            tensor([ True,  True,  True, False,  True,  True])
        """
        rule, scope = self.options.rollout_rule, self.options.rollout_scope
        require_tensors(advantages=advantages)
        if has_tokens is not None:
            require_tensors(has_tokens=has_tokens)
            if has_tokens.shape != advantages.shape:
                shapes = list(has_tokens.shape), list(advantages.shape)
                raise ValueError(f"has_tokens: got shape {shapes[0]}; takes that of advantages, {shapes[1]}")
            advantages = _without_tokens_last(advantages, has_tokens.bool(), rule)
        if groups is not None:
            groups = labels_of(groups)
            group_size = group_size or max(Counter(groups).values(), default=2)
        keep = self.budget(progress, group_size or advantages.shape[-1]).rollouts
        generator = generator if rule == "random" else None
        if process_group is not None and (multiple_of != 1 or ranks is not None or groups is not None):
            raise ValueError("process_group: takes [groups, n] without groups, multiple_of and ranks beside it")
        rows: Tensor | None = None
        among = advantages
        if self.options.group_variance_mass is not None:
            if ranks is not None:
                raise ValueError(
                    f"ranks: got {ranks} with group_variance_mass; takes None: a rank may have no group left"
                )
            rows = self._rows_of_mass(advantages, rewards, groups, multiple_of, process_group)
            among, groups = advantages[rows], groups and [groups[row] for row in rows.tolist()]
        if process_group is None:
            kept = choose_rollouts(
                among, keep, rule=rule, scope=scope, groups=groups, multiple_of=multiple_of, ranks=ranks,
                generator=generator,
            )  # fmt: skip
        else:
            kept = select_rollouts(
                among, keep, rule=rule, scope=scope, generator=generator, process_group=process_group
            )
        return kept if rows is None else torch.zeros_like(advantages, dtype=torch.bool).index_copy(0, rows, kept)

    def _rows_of_mass(
        self,
        advantages: Tensor,
        rewards: Tensor | None,
        labels: list[Hashable] | None,
        at_least: int,
        process_group: ProcessGroup | DeviceMesh | None,
    ) -> Tensor:
        """Returns the indices of the groups that ``group_variance_mass`` leaves or, with labels, the indices of their
        rollouts.
        """
        share = self.options.group_variance_mass
        assert share is not None
        if rewards is None or rewards.shape != advantages.shape:
            got = "None" if rewards is None else f"shape {list(rewards.shape)}"
            raise ValueError(
                f"rewards: got {got} with group_variance_mass; takes the shape of advantages, {list(advantages.shape)}"
            )
        if process_group is not None:
            from ..distributed import (
                rollouts as across_ranks,  # here, since some builds of torch have no process groups
            )

            layout = across_ranks.Layout(process_group, "whole", None)
            return across_ranks.variance_mass(rewards, share, layout, at_least).nonzero()[:, 0]
        rewards, places = checked_rewards(rewards, None), None
        if labels is not None:
            rewards, places = in_groups(rewards, labels)
            advantages, _ = in_groups(advantages, labels)
        found = by_variance(variances(rewards), share)
        finite = advantages.isfinite().sum(dim=1)[found.order].cumsum(0)
        needed = torch.maximum(found.number, (finite < at_least).sum() + 1)
        marked = found._replace(number=needed).marked()
        return (marked if places is None else marked[places // rewards.shape[1]]).nonzero()[:, 0]

    def advantages(
        self,
        advantages: Tensor,
        kept: Tensor,
        *,
        groups: Iterable[Hashable] | Tensor | None = None,
        scale: Scale = "group",
        without_spread: Tensor | None = None,
    ) -> Tensor:
        """Returns the advantages to train with. If the option ``advantages_from`` is "all", they are unchanged. If it
        is "kept", they are normalised again over the kept rollouts of each group (PODS).

        Args:
            advantages: float ``[groups, n]``; or ``[N]`` with ``groups``.
            kept: bool, the same shape.
            groups: as in :meth:`rollouts`.
            scale: the ``scale`` with which the trainer computed ``advantages``. "group" divides by the standard
                deviation of the group's kept rollouts. "batch" and "none" do not divide here: with "batch" the trainer
                has already divided, and with "none" it never divides.
            without_spread: bool ``[groups]``: whether all rewards of a group are equal. The advantages of such a group
                are only rounding errors, which a division would enlarge. By default these groups are determined from
                the advantages.

        Returns:
            The argument ``advantages``; or, with "kept", float32 of the same shape, with 0 for dropped rollouts.
        """
        require_tensors(advantages=advantages, kept=kept)
        require_optional_tensors(advantages, without_spread=without_spread)
        if groups is not None:
            table, places = in_groups(advantages, groups)
            kept = torch.zeros_like(table, dtype=torch.bool).view(-1).index_put((places,), kept).view_as(table)
            return self.advantages(table, kept, scale=scale, without_spread=without_spread).flatten()[places]
        if advantages.dim() != 2:
            raise ValueError(f"advantages: got shape {list(advantages.shape)}; takes [groups, n], or [N] with groups")
        if self.options.advantages_from == "all":
            return advantages
        if without_spread is None:
            without_spread = groups_without_spread(advantages)
        survivors = advantages.masked_fill(without_spread[:, None], 0).masked_fill(~kept, torch.nan)  # NaN is left out
        return group_advantages(survivors, scale="group" if scale == "group" else "none")

    def trusted(
        self,
        logprob: Tensor | None,
        sampling_logprob: Tensor | None,
        advantages: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        offsets: Tensor | None = None,
        process_group: ProcessGroup | DeviceMesh | None = None,
    ) -> TrustedTokens:
        """Returns the tokens that ``off_policy_rule`` keeps, by :func:`d3s_kernels.trusted_tokens` with the options'
        rule and bounds. If the rule is "none", all tokens of the mask are kept with weight 1, and the count is the
        number of kept tokens on this rank only. Log-probabilities are then needed only if there is no mask.

        Call this before the update. Pass the ``mask`` of the result to the LM head, so that all other tokens cost
        nothing. Pass the whole result to :meth:`tokens`. Multiply each token's loss by the token's ``weight``.
        """
        rule, low, high = self.options.off_policy_rule, self.options.off_policy_low, self.options.off_policy_high
        if rule == "none" and mask is not None:
            require_tensors(mask=mask)
            present = as_bool("mask", mask)
            return TrustedTokens(present, present.float(), present.sum())
        require_tensors(logprob=logprob, sampling_logprob=sampling_logprob)
        assert logprob is not None
        assert sampling_logprob is not None
        if rule == "none":
            return self.trusted(None, None, mask=torch.ones_like(logprob, dtype=torch.bool))
        return trusted_tokens(
            logprob, sampling_logprob, rule, low=low, high=high, advantages=advantages, mask=mask, offsets=offsets,
            process_group=process_group,
        )  # fmt: skip

    def candidates(
        self,
        token_ids: Tensor,
        advantages: Tensor,
        mask: Tensor,
        *,
        groups: Iterable[Hashable] | Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> Tensor:
        """Returns the tokens that may be chosen: all tokens of the mask or, with the option ``drop_shared_tokens``, all
        except the tokens that :func:`d3s_kernels.shared_tokens` marks. The arguments are as in that function. Call this
        with all rollouts of each group, before rollouts are dropped. Pass the kept rollouts' rows of the result as the
        ``mask`` of :meth:`tokens`; or, with an ``off_policy_rule``, ``trusted.only(rows)``, where ``trusted`` is the
        result of :meth:`trusted` for all tokens.
        """
        present = as_bool("mask", mask)
        if not self.options.drop_shared_tokens:
            return present
        return present & ~shared_tokens(token_ids, advantages, mask, groups=groups, offsets=offsets)

    @property
    def cuts(self) -> bool:
        """Whether ``token_rule`` cuts sequences at random: then call :meth:`prefixes` before the forward."""
        return self.options.token_rule in PREFIX_RULES

    def prefixes(
        self,
        mask: Tensor | TrustedTokens,
        progress: float,
        *,
        offsets: Tensor | None = None,
        draws: Tensor | None = None,
        generator: torch.Generator | None = None,
        process_group: ProcessGroup | DeviceMesh | None = None,
        placement: Placement = "whole",
    ) -> Prefixes:
        """Cuts sequences at random, by :func:`d3s_kernels.random_prefixes`, if ``token_rule`` is "prefix" or
        "prefix_advantage_entropy". With any other rule, nothing is cut. The arguments are as in
        :func:`d3s_kernels.random_prefixes`.

        Call this before the forward, and pass the ``mask`` of the result to the LM head; columns after the last token
        of the mask need no forward. Pass the whole result to :meth:`tokens`, and multiply each token's loss by the
        ``weight`` that :meth:`tokens` returns. With an ``off_policy_rule``, pass the result of :meth:`trusted` as
        ``mask``.

        Example:
            >>> import torch, d3s_kernels as d3s
            >>> selection = d3s.Selection(token_rule="prefix")
            >>> cut = selection.prefixes(torch.ones(1, 4, dtype=torch.bool), 0.0, draws=torch.tensor([0.3]))
            >>> tokens = selection.tokens(torch.zeros(1, 4), None, 0.0, mask=cut)
            >>> tokens.mask, tokens.weight
            (tensor([[ True,  True, False, False]]), tensor([[1.0000, 1.3333, 0.0000, 0.0000]]))
        """
        present = self._mask_of(mask)
        assert present is not None
        ratio = 1.0 if not self.cuts else self.token_ratio(progress) if self.options.token_rule == "prefix" else 0.5
        return random_prefixes(
            present, ratio, offsets=offsets, draws=draws, generator=generator, process_group=process_group,
            placement=placement,
        )  # fmt: skip

    def token_ratio(self, progress: float) -> float:
        """Returns the budget's share of the tokens; with "prefix_advantage_entropy", of the tokens before the cuts."""
        return self.budget(progress, 2).token_ratio

    def token_share(self, progress: float) -> float:
        """Returns the share of all tokens that is expected to be kept."""
        return self.token_ratio(progress) * (0.5 if self.options.token_rule == "prefix_advantage_entropy" else 1)

    def _mask_of(self, mask: Tensor | TrustedTokens | None) -> Tensor | None:
        """Returns a mask of tokens to choose from. Raises a ValueError if tokens would bypass the off-policy rule."""
        if isinstance(mask, TrustedTokens):
            return mask.mask
        if self.options.off_policy_rule != "none":
            rule, kind = self.options.off_policy_rule, type(mask).__name__
            raise ValueError(f"mask: got a {kind} with off_policy_rule {rule!r}; takes what trusted() has returned")
        return mask

    def tokens(
        self,
        entropy: Tensor,
        advantages: Tensor | None,
        progress: float,
        *,
        mask: Tensor | TrustedTokens | Prefixes | None = None,
        offsets: Tensor | None = None,
        generator: torch.Generator | None = None,
        process_group: ProcessGroup | DeviceMesh | None = None,
        placement: Placement = "whole",
    ) -> TokenSelection:
        """Chooses the tokens that get a gradient, by :func:`d3s_kernels.select_tokens` with the options' rule and
        scope, and with the budget's share of the tokens. All arguments are as in :func:`d3s_kernels.select_tokens`;
        ``entropy`` may require a gradient. With an ``off_policy_rule``, ``mask`` must be the result of :meth:`trusted`,
        so that no token bypasses the rule. With a rule that cuts sequences, ``mask`` may be the result of
        :meth:`prefixes`; otherwise sequences are cut here.
        """
        options = self.options
        require_tensors(entropy=entropy)
        candidates = mask if isinstance(mask, Prefixes) else self._mask_of(mask)
        draws = options.token_rule == "random" or (self.cuts and not isinstance(mask, Prefixes))
        return select_tokens(
            entropy.detach(),
            advantages,
            self.token_ratio(progress),
            rule=options.token_rule,
            mask=candidates,
            offsets=offsets,
            scope=options.token_scope,
            drop_zeros=options.drop_zeros,
            generator=generator if draws else None,
            process_group=process_group,
            placement=placement,
        )

    def denominator(
        self, tokens: TokenSelection, mask: Tensor, *, process_group: ProcessGroup | DeviceMesh | None = None
    ) -> Tensor:
        """Returns the denominator for a sum over the kept tokens: int64, 0-d, at least 1. If the option
        ``loss_denominator`` is "kept", this is the number of kept tokens; if it is "all", the number of all tokens of
        the mask.

        With ``process_group``, the denominator is summed over the ranks; each rank sends one value. A trainer that
        averages gradients over the ranks must then multiply the loss by the number of ranks.
        """
        require_tensors(mask=mask)
        number = (tokens.mask if self.options.loss_denominator == "kept" else mask).sum()
        if process_group is not None:
            number = ranks_of(process_group).add_(number)
        return number.clamp(min=1)


@lru_cache(maxsize=64)  # called in each micro-batch
def _schedule(
    start: tuple[float, float], end: tuple[float, float], shape: Shape, group_size: int
) -> DownSamplingSchedule:
    first, last = (Budget(rollouts_of(rollouts, group_size), ratio) for rollouts, ratio in (start, end))
    return DownSamplingSchedule(first, last, shape)


def _without_tokens_last(advantages: Tensor, has_tokens: Tensor, rule: RolloutRule) -> Tensor:
    """Replaces the advantages of rollouts that have no token in the loss. The new advantage is 0; with the rule
    "highest", it is a value below all other advantages.
    """
    finite, others = advantages.isfinite(), advantages.new_zeros(())
    if rule == "highest" and advantages.numel():
        lowest = torch.where(finite, advantages, 0.0).amin()  # non-finite advantages count as 0 here
        others = lowest - lowest.abs().clamp(min=1)
    return torch.where(has_tokens | ~finite, advantages, others)
