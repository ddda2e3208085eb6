"""Faults that the tests must detect; tools/mutations.py puts them into a copy of the library, one at a time.

Each is a realistic mistake: a wrong boundary, a missing guard, a tie that is broken the other way. The old text occurs
exactly once in its file (tests/test_mutations.py checks this). ``tests`` are arguments of pytest: the few tests that
should detect the fault. ``more`` replaces them at the strength of `make test-all`.
"""

from __future__ import annotations

from typing import NamedTuple

EMULATED = "tests/test_cuda_emulated.py"
PORTABLE = "tests/test_portable.py"
TRITON = f"{PORTABLE} -k interpreter"
PLAIN = f"{PORTABLE} -k plain"
KERNELS = f"{EMULATED} -k only_the_cuda_kernels"


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    tests: str
    more: str = ""
    explained: str = ""  # why no test can detect it; such a fault may survive


MUTANTS = (
    # ---- core: arithmetic shared by the compiled back-ends -----------------------------------------------------------
    Mutant(
        "core: a position belongs to the segment that starts behind it",
        "csrc/core/segments.h",
        "if (begin(middle) < position)",
        "if (begin(middle) <= position)",
        "tests/test_select_tokens.py",
    ),
    Mutant(
        "core: a row of nothing but -inf has an entropy",
        "csrc/core/softmax_state.h",
        "undefined = state.sum < 0.5f || state.dot != state.dot;",
        "undefined = state.dot != state.dot;",
        "tests/test_logprob_entropy.py",
    ),
    Mutant(
        "core: 7 % of 100 are 8",
        "csrc/core/quota.h",
        "* (1.0 - slack)",
        "* (1.0 + slack)",
        "tests/test_topk_mask.py",
    ),
    Mutant(
        "core: splits that are equal but for rounding do not tie",
        "csrc/core/split_scan.h",
        "return best * (1.0 - 1e-12);",
        "return best;",
        "tests/test_max_variance.py",
    ),
    # ---- ops: checks and preparation of the arguments ----------------------------------------------------------------
    Mutant(
        "ops: a ratio of 0 is taken",
        "csrc/ops/topk_mask.cpp",
        "require(share > 0 && share <= 1,",
        "require(share >= 0 && share <= 1,",
        "tests/test_errors.py",
    ),
    Mutant(
        "ops: a label one past the vocabulary is taken",
        "csrc/ops/logprob_entropy.h",
        "(label < 0 || label >= vocabulary)",
        "(label < 0 || label > vocabulary)",
        "tests/test_errors.py",
    ),
    Mutant(
        "ops: the batch keeps as many rollouts as one group",
        "csrc/ops/max_variance.cpp",
        "number.times = segmented.segments.count;",
        "number.times = 1;",
        "tests/test_select_rollouts.py",
    ),
    Mutant(
        "ops: the backward does not know the mask",
        "csrc/ops/logprob_entropy.cpp",
        "  // unknown for a tile\n  argument.set_labels(labels, vocabulary);\n  argument.set_mask(mask);",
        "  // unknown for a tile\n  argument.set_labels(labels, vocabulary);",
        "tests/test_logprob_entropy.py",
    ),
    Mutant(
        "ops: a label that is in its span joins the set again",
        "csrc/ops/spans.h",
        "joins = include_label && !label_found && label >= 0",
        "joins = include_label && label >= 0",
        "tests/test_sampling_masks.py",
    ),
    Mutant(
        "ops: a span may have a token twice",
        "csrc/ops/checked_spans.h",
        "seen[token] = true;",
        "seen[token] = false;",
        "tests/test_sampling_masks.py",
    ),
    # ---- the compiled CPU library ------------------------------------------------------------------------------------
    Mutant(
        "cpu: ties go to the higher index",
        "csrc/cpu/segment_keys.h",
        "int64_t i = b - a, extra = surplus[piece]; extra > 0;)\n      if (p[--i] == cut.key)",
        "int64_t i = -1, extra = surplus[piece]; extra > 0;)\n      if (p[++i] == cut.key)",
        "tests/test_topk_mask.py",
    ),
    Mutant(
        "cpu: the last logit of a row is left out",
        "csrc/cpu/softmax_rows.cpp",
        "memcpy(values, p, n * sizeof(T))",
        "memcpy(values, p, (n - 1) * sizeof(T))",
        "tests/test_logprob_entropy.py",
    ),
    Mutant(
        "cpu: the variance of large values with small differences cancels",
        "csrc/cpu/max_variance.cpp",
        "const double shift = value_of(sorted[n / 2]);",
        "const double shift = 0.0;",
        "tests/test_max_variance.py",
    ),
    Mutant(
        "cpu: the first label of a piece has no gradient of its own",
        "csrc/cpu/logprob_entropy.cpp",
        "has_label = label >= begin && label < end;",
        "has_label = label > begin && label < end;",
        "tests/test_logprob_entropy.py",
    ),
    Mutant(
        "cpu: the deviation divides by the count",
        "csrc/cpu/group_advantages.cpp",
        "static_cast<double>(count - ddof)",
        "static_cast<double>(count)",
        "tests/test_group_advantages.py",
    ),
    Mutant(
        "cpu: long segments are sorted without their highest digit",
        "csrc/cpu/max_variance.cpp",
        "pass < kPasses; ++pass) {",
        "pass + 1 < kPasses; ++pass) {",
        "tests/test_max_variance.py",
    ),
    Mutant(
        "cpu: the tail of a long span is not merged",
        "csrc/cpu/kept_logits.h",
        "begin < static_cast<int64_t>(places_.size()); begin += kSlice",
        "begin < 1; begin += kSlice",
        "tests/test_sampling_masks.py",
    ),
    Mutant(
        "cpu: two threads add to a token that begins before the share of one",
        "csrc/cpu/kept_products.cpp",
        "while (i > 0 && i < end && sorted[i].token == sorted[i - 1].token) ++i;",
        "",
        "tests/test_sampling_masks_head.py",
    ),
    Mutant(
        "cpu: a label that joins has no gradient in its row's hidden states",
        "csrc/cpu/kept_products.cpp",
        "        add(spans.limit + row);\n",
        "",
        "tests/test_sampling_masks_head.py",
    ),
    # ---- the CUDA kernels, emulated ----------------------------------------------------------------------------------
    Mutant(
        "cuda: a block's sum meets no barrier before its room is used again",
        "csrc/cuda/collective.h",
        "__syncthreads();  // the room is used again",
        "",
        KERNELS,
    ),
    Mutant(
        "cuda: a slice is merged before its warps are done",
        "csrc/cuda/logprob_entropy.cu",
        "shares[threadIdx.x / kWarp] = share;\n  __syncthreads();",
        "shares[threadIdx.x / kWarp] = share;",
        KERNELS,
    ),
    Mutant(
        "cuda: the last key of a thread's bins is not found",
        "csrc/cuda/key_search.h",
        "before.left <= above + own)",
        "before.left < above + own)",
        KERNELS,
    ),
    Mutant(
        "cuda: one tie too many is kept",
        "csrc/cuda/key_mask.h",
        "left-- > 0",
        "left-- >= 0",
        KERNELS,
    ),
    Mutant(
        "cuda: a lane counts the ties of the next lane before its own",
        "csrc/cuda/key_mask.h",
        "below = (1u << threadIdx.x % kWarp) - 1;",
        "below = (2u << threadIdx.x % kWarp) - 1;",
        KERNELS,
    ),
    Mutant(
        "cuda: keys are counted before all bins are cleared",
        "csrc/cuda/key_search.h",
        "[i] = uint4{};\n  block.sync();",
        "[i] = uint4{};",
        KERNELS,
    ),
    Mutant(
        "cuda: a piece keeps ties that the pieces before it have used up",
        "csrc/cuda/topk_pieces.h",
        "piece < static_cast<int>(blockIdx.x);",
        "piece + 1 < static_cast<int>(blockIdx.x);",
        KERNELS,
    ),
    Mutant(
        "cuda: a piece leaves out the second long segment in it",
        "csrc/cuda/topk_pieces.h",
        "if (segment == last) return;",
        "return;",
        KERNELS,
    ),
    Mutant(
        "cuda: a gradient in half precision is written over logits that other threads have not read",
        "csrc/cuda/logprob_entropy.cu",
        "      z[j] = place < columns ? logits[place] : 0.f;\n    }\n    __syncthreads();\n",
        "      z[j] = place < columns ? logits[place] : 0.f;\n    }\n",
        "tests/test_cuda_emulated.py",
    ),
    Mutant(
        "cuda: the gradient reads past the end of a misaligned row",
        "csrc/cuda/logprob_entropy.cu",
        "(end + margin <= columns ? 0 : margin)",
        "0",
        KERNELS,
        f"{EMULATED} -k address_sanitizer",
    ),
    Mutant(
        "cuda: the split that takes nothing from the top is not tried",
        "csrc/cuda/max_variance_memory.h",
        "if (first + r < to) body(",
        "if (first + r < to && first + r < k_) body(",
        KERNELS,
    ),
    Mutant(
        "cuda: a partner beyond its own lane is read from the lane before",
        "csrc/cuda/max_variance_warp.h",
        "rank + static_cast<int>((distance + r) / kPerLane)",
        "rank + static_cast<int>(distance / kPerLane)",
        KERNELS,
    ),
    Mutant(
        "cuda: of equal rewards, those of higher index are taken first",
        "csrc/cuda/max_variance_warp.h",
        "__popc(equal[r] & before) < left",
        "__popc(equal[r] & ~before) <= left",
        KERNELS,
    ),
    Mutant(
        "cuda: the fifth group of tokens is not added up",
        "csrc/cuda/ratios.cu",
        "if (kGroups && group[j] >= kOwn) {",
        "if (kGroups && group[j] > kOwn) {",
        KERNELS,
    ),
    Mutant(
        "cuda: kept tokens are written before the zeros around them",
        "csrc/cuda/kept_logits.h",
        "  __syncthreads();  // the zeros before the numbers\n",
        "",
        KERNELS,
    ),
    Mutant(
        "cuda: a block takes its next long span before all have read the last",
        "csrc/cuda/kept_logits.h",
        "  __syncthreads();  // the shares are used again\n",
        "",
        KERNELS,
    ),
    Mutant(
        "cuda: runs that blocks share write their sums over each other",
        "csrc/cuda/kept_sums.h",
        "return run / (kStretch / 2) + n;",
        "return run / kStretch + n;",
        KERNELS,
    ),
    Mutant(
        "cuda: a stretch of a span is nobody's",
        "csrc/cuda/kept_hidden_grad.h",
        "return spans.begin(row) / kStretch + row;",
        "return spans.begin(row) / kStretch;",
        KERNELS,
    ),
    Mutant(
        "cuda: a token in one row more than a stretch is not joined",
        "csrc/cuda/kept_weight_grad.h",
        "if (runs.has(run + kStretch, token))",
        "if (runs.has(run + kStretch + 1, token))",
        KERNELS,
    ),
    Mutant(
        "cuda: sums that no block has written are joined",
        "csrc/cuda/kept_hidden_grad.h",
        "} else if (!*bad) {",
        "} else if (bad) {",
        KERNELS,
    ),
    Mutant(
        "cuda: the true values of a piece count among those before it",
        "csrc/cuda/compact.cu",
        "if (i < static_cast<int>(blockIdx.x)) next",
        "if (i <= static_cast<int>(blockIdx.x)) next",
        KERNELS,
    ),
    Mutant(
        "cuda: the counts of warps are added up before all warps have counted",
        "csrc/cuda/compact.cu",
        "counts[warp] = up_to;\n  __syncthreads();",
        "counts[warp] = up_to;",
        KERNELS,
    ),
    # ---- the Triton kernels, in the interpreter ----------------------------------------------------------------------
    Mutant(
        "triton: a bit is not set where exactly k keys reach it",
        "d3s_kernels/_triton/topk_mask.py",
        "bound = tl.where(count >= kept, candidate, bound)",
        "bound = tl.where(count > kept, candidate, bound)",
        TRITON,
    ),
    Mutant(
        "triton: the first label of a piece has no gradient of its own",
        "d3s_kernels/_triton/logprob_entropy_backward.py",
        "has_label = (place >= begin) & (place < end)",
        "has_label = (place > begin) & (place < end)",
        TRITON,
    ),
    Mutant(
        "triton: a move by -inf makes NaN of nothing",
        "d3s_kernels/_triton/softmax_state.py",
        "scaled_t = factor * tl.fma(tl.where(factor > 0, move, 0.0), s, scaled_t)",
        "scaled_t = factor * tl.fma(move, s, scaled_t)",
        TRITON,
    ),
    Mutant(
        "triton: infinite values are usable",
        "d3s_kernels/_triton/max_variance.py",
        'usable = inside & (tl.abs(value) < float("inf"))',
        "usable = inside & (value == value)",
        TRITON,
    ),
    # ---- plain PyTorch -----------------------------------------------------------------------------------------------
    Mutant(
        "plain: -0 is below 0",
        "d3s_kernels/_segments/order_key.py",
        "bits = (values + 0.0).view(torch.int32)",
        "bits = values.contiguous().view(torch.int32)",
        PLAIN,
    ),
    Mutant(
        "plain: a logit of -inf makes the entropy NaN",
        "d3s_kernels/_torch/softmax_state.py",
        "torch.mul(distance.clamp_(min=LOWEST), terms[0]",
        "torch.mul(distance, terms[0]",
        PLAIN,
    ),
    Mutant(
        "plain: the backward does not know the mask",
        "d3s_kernels/_torch/logprob_entropy_backward.py",
        "still=rows.still | ~mask.reshape(-1)",
        "still=rows.still",
        PLAIN,
    ),
    Mutant(
        "plain: one tie too few is kept",
        "d3s_kernels/_torch/topk_steps.py",
        "(number <= allowed)",
        "(number < allowed)",
        PLAIN,
    ),
    Mutant(
        "plain: a single kept token is read",
        "d3s_kernels/_torch/spans.py",
        "counts = ~(single | self.sets.bad | self.sets.dense)",
        "counts = ~(self.sets.bad | self.sets.dense)",
        PLAIN,
    ),
    Mutant(
        "plain: an undefined row of the head has a gradient",
        "d3s_kernels/_torch/kept_products.py",
        "total.masked_fill_(undefined.unsqueeze(1), torch.nan)",
        "total",
        PLAIN,
    ),
    # ---- several ranks -----------------------------------------------------------------------------------------------
    Mutant(
        "ranks: a rank counts its own values among those before it",
        "d3s_kernels/_across_ranks/offsets.py",
        "lengths[: ranks.rank].sum()",
        "lengths[: ranks.rank + 1].sum()",
        "tests/test_tokens_across_ranks.py",
    ),
    Mutant(
        "ranks: every rank keeps the ties that the first one keeps",
        "d3s_kernels/_across_ranks/topk_mask.py",
        "(search[:, 1] - before).clamp(min=0)",
        "search[:, 1].clamp(min=0)",
        "tests/test_tokens_across_ranks.py",
    ),
    Mutant(
        "ranks: the first rollout of a rank is looked for on the rank before",
        "d3s_kernels/_across_ranks/gathered.py",
        "torch.searchsorted(ends, place, right=True)",
        "torch.searchsorted(ends, place)",
        "tests/test_rollouts_across_ranks.py",
    ),
    Mutant(
        "ranks: the backward of a shard takes it for the first",
        "d3s_kernels/_head/backward.py",
        "problem.shard.first_token + tokens.start",
        "tokens.start",
        "tests/test_vocab_parallel.py",
    ),
    Mutant(
        "ranks: the head's backward takes a shard for the whole vocabulary",
        "d3s_kernels/_head/backward.py",
        "*statistics, problem.shard.first_token + tokens.start,",
        "*statistics, tokens.start,",
        "tests/test_vocab_parallel.py",
    ),
    # ---- rules, the LM head, the schedule ----------------------------------------------------------------------------
    Mutant(
        "rules: the quantiles of percentile are those of i / k",
        "d3s_kernels/_selection/rules.py",
        "* k + span) // (2 * span)",
        "* k) // (2 * span)",
        "tests/test_select_rollouts.py",
    ),
    Mutant(
        "head: a set of one token and its label has none",
        "csrc/ops/kept_products.h",
        "return span.size == 1 && !(spans.include_label && labels[row] >= 0 && labels[row] != span.tokens[0]);",
        "return span.size == 1;",
        "tests/test_sampling_masks_head.py",
    ),
    Mutant(
        "head: an exceeded bound reaches no gradient of kept tokens",
        "d3s_kernels/_head/backward.py",
        "incoming = incoming.poisoned(exceeded, both=most_dense != 0)",
        "pass",
        "tests/test_sampling_masks_head.py",
    ),
    Mutant(
        "head: masked rows have a gradient",
        "d3s_kernels/_head/backward.py",
        "return active if mask is None else active.logical_and_(flat(mask, count))",
        "return active",
        "tests/test_head.py",
    ),
    Mutant(
        "schedule: half a rollout is rounded to even",
        "d3s_kernels/schedule.py",
        "math.floor(rollouts + 0.5)",
        "round(rollouts)",
        "tests/test_schedule.py",
    ),
    # ---- the trainers ------------------------------------------------------------------------------------------------
    Mutant(
        "trl: the tokens of dropped rollouts stay in num_items_in_batch",
        "d3s_kernels/integrations/trl/generation.py",
        'batch["num_items_in_batch"] = accelerator.gather(loss_mask(batch).sum()).sum()',
        'batch["num_items_in_batch"] = batch["num_items_in_batch"]',
        "tests/trainers/test_trl_rollouts.py",
    ),
    Mutant(
        "trl: prompts that move are padded on the right",
        "d3s_kernels/integrations/trl/batch.py",
        "(n, 0) if name in _PROMPT else (0, n)",
        "(0, n)",
        "tests/trainers/test_trl_moves.py",
    ),
    Mutant(
        "trl: a loss of any gradient is taken",
        "d3s_kernels/integrations/trl/surface/loss.py",
        "if not torch.allclose(found, expected, rtol=1e-5):",
        "if found.isnan().any():",
        "tests/trainers/test_trl_surface.py",
    ),
    Mutant(
        "trl: a step in which no token was selected is taken",
        "d3s_kernels/integrations/trl/surface/step.py",
        "if not self._acted:",
        "if not self._asked:",
        "tests/trainers/test_trl_surface.py",
    ),
    Mutant(
        "trl: a scale that TRL reads otherwise is taken",
        "d3s_kernels/integrations/trl/head.py",
        "if self.head is None or (math.isclose",
        "if self.head is not None or (math.isclose",
        "tests/trainers/test_trl_heads.py",
    ),
    Mutant(
        "lm_head: logits that differ are taken",
        "d3s_kernels/heads.py",
        "if not over and off**0.5",
        "if off**0.5",
        "tests/test_lm_head.py",
    ),
    Mutant(
        "lm_head: a soft cap is not reached",
        "d3s_kernels/heads.py",
        "[0.0, 0.5, 1.0, 2.0]",
        "[0.0, 0.0, 0.0, 0.0]",
        "tests/test_lm_head.py",
    ),
    Mutant(
        "lm_head: hidden states that change before the head are taken",
        "d3s_kernels/heads.py",
        "if seen.of_head and not any(",
        "if not seen.of_head and not any(",
        "tests/test_lm_head.py",
    ),
    Mutant(
        "trl: a pass is told by the order of calls",
        "d3s_kernels/integrations/trl/surface/passes.py",
        "REFERENCE if of_reference and REFERENCE in self.names else self.names[0]",
        "self.names[0]",
        "tests/trainers/test_trl_surface.py",
    ),
    Mutant(
        "verl: the loss divides by all tokens",
        "d3s_kernels/integrations/verl/trainer.py",
        ', "loss_mask": kept.to(mask.dtype)',
        "",
        "tests/verl/test_verl_trainer.py",
    ),
    Mutant(
        "verl: advantages stay in the order of the groups",
        "d3s_kernels/integrations/verl/rows.py",
        "advantages[order] = group_advantages(",
        "advantages[:] = group_advantages(",
        "tests/verl/test_verl_rows.py",
    ),
    Mutant(
        "slime: a token's entropy is that of the row it is in",
        "d3s_kernels/integrations/slime/tokens.py",
        "(end - length - 1, end - 1)",
        "(end - length, end)",
        "tests/test_slime_hooks.py",
    ),
    Mutant(
        "slime: groups without a kept rollout stay",
        "d3s_kernels/integrations/slime/hooks.py",
        "for group in data) if group]",
        "for group in data)]",
        "tests/test_slime_hooks.py",
    ),
    Mutant(
        "slime: any call of the hook's name will do",
        "d3s_kernels/integrations/_assumptions.py",
        "if assumption.expected in calls:",
        'if any(call.startswith(assumption.expected.partition("(")[0]) for call in calls):',
        "tests/test_trainer_check.py",
    ),
    Mutant(
        "nemo_rl: each packed sequence is a pool of its own",
        "d3s_kernels/integrations/nemo_rl/loss.py",
        "if not (self._packed and self._pool.storage == storage):",
        "if True:",
        "tests/test_nemo_rl.py",
    ),
    Mutant(
        "openrlhf: the prompt's entropies choose the tokens",
        "d3s_kernels/integrations/openrlhf.py",
        "entropy[:, -mask.shape[1] :]",
        "entropy[:, : mask.shape[1]]",
        "tests/test_openrlhf_hooks.py",
    ),
    Mutant(
        "prime_rl: tokens of other components lose their gradient",
        "d3s_kernels/integrations/prime_rl.py",
        "torch.where(kept | ~mask, logprob",
        "torch.where(kept, logprob",
        "tests/test_prime_rl_hooks.py",
    ),
)
