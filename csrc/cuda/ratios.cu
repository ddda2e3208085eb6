// importance_ratio, entropy_groups, adaptive_clip. Where groups have means, there are two launches: the sums of all
// groups, then a number for each token. A warp has 512 tokens, wherever sequences begin and end. Sums are integers, so
// that atomic additions give the same bits in any order.
//
//   launch                      kernel               reads (and mask, group ids)               -> writes
//   group sums                  add_terms            logprob and old_logprob, or entropy       -> sums
//   importance_ratio (means)    write_mean_ratios    sums                                      -> out
//   importance_ratio            write_ratios         sums, logprob, old_logprob                -> out
//   adaptive_clip               write_scaled_means   sums                                      -> out
//   importance_ratio (tokens)   write_each           logprob, old_logprob                      -> out
//   importance_ratio_backward   write_each           grad, ratio                               -> out
//   entropy_groups              write_each           entropy, above (from topk_mask.cu)        -> out
#include "../ops/ratios.h"
#include "collective.h"
#include "note_faults.h"

namespace d3s {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 6;         // on a multiprocessor: for eight, the compiler would spill registers
constexpr int64_t kStretch = 512;  // tokens of a warp: enough warps for a small batch, few atomics for a large one
constexpr int kInFlight = 4;       // tokens that a thread loads before it uses the first
constexpr int kOwnGroups = 4;      // groups whose sums a thread keeps in registers; further ones are rare

int64_t blocks_for(int64_t tokens) { return ceil_div(ceil_div(tokens, kStretch), kThreads / kWarp); }

// Calls body(sequence, begin, end) for the part of each sequence among this warp's tokens.
template <class Body>
__device__ void for_stretches(const TokenGroups& groups, const Body& body) {
  const Segments& sequences = groups.sequences;
  const int64_t begin = (int64_t{blockIdx.x} * (blockDim.x / kWarp) + threadIdx.x / kWarp) * kStretch;
  const int64_t end = begin + kStretch < groups.tokens ? begin + kStretch : groups.tokens;
  if (begin >= end) return;
  int64_t a = begin;
  for (int64_t i = sequences.find(begin); a < end && i < sequences.count; ++i) {
    const int64_t first = sequences.begin(i) > a ? sequences.begin(i) : a;  // bad offsets leave gaps
    const int64_t last = sequences.end(i) < end ? sequences.end(i) : end;
    if (last <= first) continue;
    body(i, first, last);
    a = last;
  }
}

// ---- sums --------------------------------------------------------------------------------------------------------

__device__ void add_shared(ExactSum* total, const ExactSum& part) {
  if (part.count == 0) return;
  atomicAdd(reinterpret_cast<unsigned long long*>(&total->units), static_cast<unsigned long long>(part.units));
  atomicAdd(&total->count, part.count);
  if (part.flags) atomicOr(&total->flags, part.flags);
}

// The sums of a[i] - b[i], or of a[i] where b is null, over each group of each sequence.
template <bool kGroups>
__global__ void __launch_bounds__(kThreads)
    add_terms(const float* a, const float* b, const __grid_constant__ TokenGroups groups, ExactSum* sums,
              const __grid_constant__ Faults faults) {
  note_offsets(groups.sequences, faults);
  constexpr int kOwn = kGroups ? kOwnGroups : 1;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for_stretches(groups, [&](int64_t sequence, int64_t begin, int64_t end) {
    ExactSum own[kOwn];
    ExactSum* of_sequence = sums + sequence * groups.each;
    for (int64_t first = begin + lane; first < end; first += kInFlight * kWarp) {
      float terms[kInFlight];
      int group[kInFlight];
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        const int64_t i = first + j * kWarp;
        const bool there = i < end;
        group[j] = there ? groups.of(i) : TokenGroups::kNone;
        terms[j] = there ? b ? a[i] - b[i] : a[i] : 0.f;
      }
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        ExactSum one;
        add_term(one, terms[j]);
#pragma unroll
        for (int g = 0; g < kOwn; ++g) {
          const bool here = group[j] == g;
          own[g].units += here ? one.units : 0;
          own[g].count += here;
          own[g].flags |= here ? one.flags : 0;
        }
        if (kGroups && group[j] >= kOwn) {
          if (group[j] == TokenGroups::kBad)
            faults.note(Fault::kGroups);
          else
            add_shared(of_sequence + group[j], one);
        }
      }
    }
#pragma unroll
    for (int g = 0; g < kOwn; ++g) {
      ExactSum total;
      total.units = warp_reduce(own[g].units, Sum());
      total.count = warp_reduce(own[g].count, Sum());
      total.flags = warp_reduce(own[g].flags, [](uint32_t x, uint32_t y) { return x | y; });
      if (lane == 0) add_shared(of_sequence + g, total);
    }
  });
}

ExactSum* group_sums(const float* a, const float* b, const TokenGroups& groups, Device& device) {
  const int64_t count = groups.each * groups.sequences.count;
  auto* sums = device.scratch_of<ExactSum>(count);
  clear(sums, 0, count * sizeof(ExactSum), device);
  launch("group sums", groups.ids ? add_terms<true> : add_terms<false>, blocks_for(groups.tokens), kThreads, 0, device,
         a, b, groups, sums, device.faults);
  return sums;
}

// ---- a number for each token -------------------------------------------------------------------------------------

// out[i] = value(of_mean(mean of the token's group), i), or `none` for tokens in no group. Lane g computes of_mean for
// group g of the sequence, and all lanes get it by a shuffle.
template <class OfMean, class Value>
__device__ void write_tokens(const TokenGroups& groups, const ExactSum* sums, float none, float* out,
                             const OfMean& of_mean, const Value& value) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for_stretches(groups, [&](int64_t sequence, int64_t begin, int64_t end) {
    // Lanes without a group have NaN, for bad ids.
    const float number = lane < groups.each ? of_mean(mean_of(sums[sequence * groups.each + lane])) : NAN;
    for (int64_t first = begin + lane; first - lane < end; first += kInFlight * kWarp) {
      float values[kInFlight];
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        const int64_t i = first + j * kWarp;
        const int group = i < end ? groups.of(i) : TokenGroups::kNone;
        const float own = __shfl_sync(kAllLanes, number, group < 0 ? 0 : group);
        values[j] = group < 0 ? none : value(own, i);
      }
#pragma unroll
      for (int j = 0; j < kInFlight; ++j)
        if (first + j * kWarp < end) out[first + j * kWarp] = values[j];
    }
  });
}

__global__ void __launch_bounds__(kThreads, kBlocks)
    write_mean_ratios(const __grid_constant__ TokenGroups groups, const ExactSum* sums, LogBounds bounds, float* out) {
  write_tokens(
      groups, sums, kNoRatio, out, [&](float mean) { return bounded_ratio(mean, bounds); },
      [](float ratio, int64_t) { return ratio; });
}

__global__ void __launch_bounds__(kThreads, kBlocks)
    write_ratios(const float* logprob, const float* old_logprob, const __grid_constant__ TokenGroups groups,
                 const ExactSum* sums, LogBounds bounds, float* out) {
  write_tokens(
      groups, sums, kNoRatio, out, [](float mean) { return mean; },
      [&](float mean, int64_t i) { return bounded_ratio(mean + (logprob[i] - old_logprob[i]), bounds); });
}

__global__ void __launch_bounds__(kThreads, kBlocks)
    write_scaled_means(const __grid_constant__ TokenGroups groups, const ExactSum* sums, float scale, float* out) {
  write_tokens(
      groups, sums, kNoClip, out, [&](float mean) { return scale * mean; },
      [](float scaled, int64_t) { return scaled; });
}

// ---- token by token ----------------------------------------------------------------------------------------------

// out[i] = value(i) for all n.
template <class Out, class Value>
__global__ void __launch_bounds__(kThreads) write_each(int64_t n, const __grid_constant__ Value value, Out* out) {
  const int64_t first = int64_t{blockIdx.x} * kInFlight * kThreads + threadIdx.x;
  Out values[kInFlight];
#pragma unroll
  for (int j = 0; j < kInFlight; ++j)
    if (first + j * kThreads < n) values[j] = value(first + j * kThreads);
#pragma unroll
  for (int j = 0; j < kInFlight; ++j)
    if (first + j * kThreads < n) out[first + j * kThreads] = values[j];
}

template <class Out, class Value>
void for_each_token(const char* name, int64_t n, const Value& value, Out* out, const Device& device) {
  launch(name, write_each<Out, Value>, ceil_div(n, kInFlight * kThreads), kThreads, 0, device, n, value, out);
}

struct TokenRatio {
  const float *logprob, *old_logprob;
  TokenGroups groups;
  LogBounds bounds;

  D3S_HOST_DEVICE float operator()(int64_t i) const {
    return groups.has(i) ? bounded_ratio(logprob[i] - old_logprob[i], bounds) : kNoRatio;
  }
};

struct TokenGradient {
  RatioGradient of;

  D3S_HOST_DEVICE float operator()(int64_t i) const {
    return of.groups.has(i) ? ratio_gradient(of.grad[i], of.ratio[i], of.limits) : 0.f;
  }
};

struct QuantileGroup {
  QuantileMasks masks;

  D3S_HOST_DEVICE int8_t operator()(int64_t i) const {
    if (!masks.has(i)) return -1;
    int8_t group = 0;
    for (int q = 0; q < masks.quantiles; ++q) group = static_cast<int8_t>(group + masks.above[q * masks.tokens + i]);
    return group;
  }
};

// Tokens that bad offsets leave out get NaN.
void mark_gaps(const TokenGroups& groups, float* out, const Device& device) {
  if (groups.sequences.ragged()) clear(out, 0xff, groups.tokens * sizeof(float), device);
}

}  // namespace

void importance_ratios(const float* logprob, const float* old_logprob, const TokenGroups& groups, RatioForm form,
                       const LogBounds& bounds, float* out, Device& device) {
  if (form == RatioForm::kToken) {
    for_each_token("importance_ratio (tokens)", groups.tokens, TokenRatio{logprob, old_logprob, groups, bounds}, out,
                   device);
    return;
  }
  mark_gaps(groups, out, device);
  const ExactSum* sums = group_sums(logprob, old_logprob, groups, device);
  const int64_t blocks = blocks_for(groups.tokens);
  if (form == RatioForm::kMean)
    launch("importance_ratio (means)", write_mean_ratios, blocks, kThreads, 0, device, groups, sums, bounds, out);
  else
    launch("importance_ratio", write_ratios, blocks, kThreads, 0, device, logprob, old_logprob, groups, sums, bounds,
           out);
}

void importance_ratio_gradients(const RatioGradient& gradient, float* out, Device& device) {
  for_each_token("importance_ratio_backward", gradient.groups.tokens, TokenGradient{gradient}, out, device);
}

void scaled_group_means(const float* values, const TokenGroups& groups, float scale, float* out, Device& device) {
  mark_gaps(groups, out, device);
  const ExactSum* sums = group_sums(values, nullptr, groups, device);
  launch("adaptive_clip", write_scaled_means, blocks_for(groups.tokens), kThreads, 0, device, groups, sums, scale, out);
}

void group_by_quantiles(const QuantileMasks& masks, int8_t* out, Device& device) {
  for_each_token("entropy_groups", masks.tokens, QuantileGroup{masks}, out, device);
}

}  // namespace d3s
