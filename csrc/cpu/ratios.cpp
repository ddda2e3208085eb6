// Computes importance_ratio, entropy_groups and adaptive_clip. If the means of groups are needed, a first pass adds up
// the values of each group, and a second pass writes a value for each token. The tokens are divided evenly among the
// threads, wherever sequences begin and end. Results are bitwise equal for any number of threads, since sums do not
// depend on the order of their terms (core/exact_sum.h).
#include <algorithm>
#include <vector>

#include "../ops/ratios.h"
#include "../torch_abi.h"
#include "ratio_loops.h"

namespace d3s {
namespace {

constexpr int64_t kGrain = 16384;  // the minimum number of tokens for a thread
constexpr int64_t kPiece = 4096;   // the maximum length of a stretch, which stays in the L1 cache for all groups

const RatioLoops& loops() { return ratio_loops(); }

TokenStretch stretch(const TokenGroups& groups, int64_t begin, int64_t end) {
  return {groups.mask ? groups.mask + begin : nullptr, groups.ids ? groups.ids + begin : nullptr, end - begin};
}

// Calls body(sequence, begin, end) on all threads, for stretches that together cover all tokens. Each stretch has at
// most kPiece tokens, all from the same sequence.
template <class Body>
void for_stretches(const TokenGroups& groups, const Body& body) {
  const Segments& sequences = groups.sequences;
  parallel_for(groups.tokens, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = sequences.find(begin), a = begin; a < end; ++i)
      for (const int64_t last = std::min(end, sequences.end(i)); a < last;) {
        const int64_t b = std::min(last, a + kPiece);
        body(i, a, b);
        a = b;
      }
  });
}

void add_shared(ExactSum& total, const ExactSum& part) {  // several threads may have parts of one sequence
  if (part.count == 0) return;
  __atomic_fetch_add(&total.units, part.units, __ATOMIC_RELAXED);
  __atomic_fetch_add(&total.count, part.count, __ATOMIC_RELAXED);
  if (part.flags) __atomic_fetch_or(&total.flags, part.flags, __ATOMIC_RELAXED);
}

// Returns, for each group of each sequence, the sum of a[i] - b[i] over the tokens of the group. If b is null, returns
// the sum of a[i].
std::vector<ExactSum> group_sums(const float* a, const float* b, const TokenGroups& groups) {
  std::vector<ExactSum> sums(groups.each * groups.sequences.count);
  for_stretches(groups, [&](int64_t sequence, int64_t begin, int64_t end) {
    ExactSum parts[kMostGroups];
    loops().sum(a + begin, b ? b + begin : nullptr, stretch(groups, begin, end), groups.each, parts);
    for (int group = 0; group < groups.each; ++group) add_shared(sums[sequence * groups.each + group], parts[group]);
  });
  return sums;
}

// For each token i of a stretch, sets out[i] to number(mean of the token's group), or to `none` if the token is masked
// out or in no group.
template <class Number>
void write_numbers(const std::vector<ExactSum>& sums, const TokenGroups& groups, int64_t sequence,
                   const TokenStretch& tokens, float none, const Number& number, float* out) {
  float numbers[kMostGroups];
  for (int group = 0; group < groups.each; ++group)
    numbers[group] = number(mean_of(sums[sequence * groups.each + group]));
  loops().assign(tokens, groups.each, numbers, none, out);
}

}  // namespace

void importance_ratios(const float* logprob, const float* old_logprob, const TokenGroups& groups, RatioForm form,
                       const LogBounds& bounds, float* out, Device&) {
  const auto exponentiate = [&](int64_t begin, int64_t end, const float* means) {
    loops().exponentiate(logprob + begin, old_logprob + begin, stretch(groups, begin, end), means, bounds, out + begin);
  };
  if (form == RatioForm::kToken) {
    parallel_for(groups.tokens, kGrain, [&](int64_t begin, int64_t end) { exponentiate(begin, end, nullptr); });
    return;
  }
  const std::vector<ExactSum> sums = group_sums(logprob, old_logprob, groups);
  for_stretches(groups, [&](int64_t sequence, int64_t begin, int64_t end) {
    const auto write = [&](float none, const auto& number) {
      write_numbers(sums, groups, sequence, stretch(groups, begin, end), none, number, out + begin);
    };
    if (form == RatioForm::kMean) {
      write(kNoRatio, [&](float mean) { return bounded_ratio(mean, bounds); });
    } else {
      write(0.f, [](float mean) { return mean; });
      exponentiate(begin, end, out + begin);
    }
  });
}

void importance_ratio_gradients(const RatioGradient& gradient, float* out, Device&) {
  const RatioGradient& g = gradient;
  parallel_for(g.groups.tokens, kGrain, [&](int64_t begin, int64_t end) {
    loops().gradients(g.grad + begin, g.ratio + begin, stretch(g.groups, begin, end), g.limits, out + begin);
  });
}

void scaled_group_means(const float* values, const TokenGroups& groups, float scale, float* out, Device&) {
  const std::vector<ExactSum> sums = group_sums(values, nullptr, groups);
  for_stretches(groups, [&](int64_t sequence, int64_t begin, int64_t end) {
    write_numbers(
        sums, groups, sequence, stretch(groups, begin, end), kNoClip, [&](float mean) { return scale * mean; },
        out + begin);
  });
}

void group_by_quantiles(const QuantileMasks& masks, int8_t* out, Device&) {
  parallel_for(masks.tokens, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) out[i] = masks.has(i) ? 0 : -1;
    for (int q = 0; q < masks.quantiles; ++q) {
      const bool* above = masks.above + q * masks.tokens;
      for (int64_t i = begin; i < end; ++i) out[i] = static_cast<int8_t>(out[i] + above[i]);
    }
  });
}

}  // namespace d3s
