// The kernels of importance_ratio, entropy_groups and adaptive_clip. If the means of groups are needed, a block handles
// a whole sequence: it computes the sum of each group, and then writes a value for each token. Ragged sequences, and
// batches of a few long sequences, take two launches, in which each warp handles 1,024 tokens, regardless of where
// sequences begin. Sums are integers, so atomic additions give bitwise equal sums in any order.
//
//   launch                      kernel                reads (and mask, group ids)              -> writes
//   importance_ratio            whole_sequences       logprob and old_logprob                  -> out
//   adaptive_clip               whole_sequences       entropy                                  -> out
//   group sums                  add_terms             logprob and old_logprob, or entropy      -> sums
//   importance_ratio (sums)     write_numbers         sums, sometimes the two logprobs         -> out
//   adaptive_clip (sums)        write_numbers         sums                                     -> out
//   importance_ratio (tokens)   write_each            logprob, old_logprob                     -> out
//   importance_ratio_backward   write_each            grad, ratio                              -> out
//   entropy_groups              write_each            entropy, above (from topk_mask.cu)       -> out
#include "../ops/ratios.h"

#include <algorithm>
#include <cstring>

#include "collective.h"
#include "note_faults.h"

namespace d3s {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kStretch = 1024;  // tokens of a warp; small batches then get enough warps, large batches few atomics
constexpr int kInFlight = 2;        // vectors that a thread loads before it uses the first
constexpr int kVector = 4;          // tokens: 16 bytes of floats, 4 bytes of the mask
constexpr int kOwnGroups = 8;       // the number of groups for which a thread has its own sums; more groups are rare
constexpr uint32_t kEach = 0x01010101u;  // kEach * b has the byte b for each of kVector tokens

// ---- tokens ------------------------------------------------------------------------------------------------------

// Neighbouring values, which are loaded or stored with one instruction.
template <int kWide>
struct Few {
  float at[kWide];
};

template <int kWide>
__device__ __forceinline__ Few<kWide> load(const float* p) {
  Few<kWide> few;
  if constexpr (kWide == 1) {
    few.at[0] = *p;
  } else {
    const uint4 vector = load_streaming(reinterpret_cast<const uint4*>(p));
    memcpy(&few, &vector, sizeof few);
  }
  return few;
}

// Loads kWide bytes into a word.
template <int kWide>
__device__ __forceinline__ uint32_t load_bytes(const void* p, int64_t i) {
  const auto* bytes = static_cast<const uint8_t*>(p) + i;
  return kWide == 1 ? *bytes : *reinterpret_cast<const uint32_t*>(bytes);
}

template <int kWide>
__device__ __forceinline__ void store(float* p, const Few<kWide>& few) {
  if constexpr (kWide == 1) {
    *p = few.at[0];
  } else {
    uint4 vector;
    memcpy(&vector, &few, sizeof few);
    store_plain(reinterpret_cast<uint4*>(p), vector);
  }
}

template <int kWide>
__device__ __forceinline__ void store(int8_t* p, uint32_t bytes) {
  if constexpr (kWide == 1)
    *p = static_cast<int8_t>(bytes);
  else
    *reinterpret_cast<uint32_t*>(p) = bytes;
}

// Returns whether kVector tokens can be loaded or stored together at each multiple of kVector. If p is null, returns
// true.
template <class T>
bool has_vectors(const T* p) {
  return reinterpret_cast<uintptr_t>(p) % (kVector * sizeof(T)) == 0;
}

// The tokens in [begin, end), divided among the `size` threads of a warp or of a block.
struct Part {
  int64_t begin, end;
  int rank, size;
};

// Calls body(width, first, step, end) for this thread's tokens. Each call covers up to kInFlight vectors. Vector j has
// the `width` tokens from index first + j * step on, and exists if this index is below `end`. `width` is kVector for
// whole vectors. `width` is 1 for the tokens before and after the whole vectors. If `vectors` is false, `width` is
// always 1.
template <class Body>
__device__ __forceinline__ void for_tokens(const Part& part, bool vectors, const Body& body) {
  const auto each = [&](auto width, int64_t begin, int64_t end) {
    const int64_t step = part.size * width;
    for (int64_t i = begin + part.rank * width; i < end; i += kInFlight * step) body(width, i, step, end);
  };
  const int64_t up = ceil_div(part.begin, kVector) * kVector, down = part.end / kVector * kVector;
  const bool some = vectors && up < down;
  const int64_t first = some ? up : part.end, last = some ? down : part.end;
  each(std::integral_constant<int, kVector>(), first, last);
#pragma unroll 1
  for (int side = 0; side < 2; ++side)
    each(std::integral_constant<int, 1>(), side ? last : part.begin, side ? part.end : first);
}

// Neighbouring tokens. If a token is masked out or in no group, a and b count as 0. So the token's term is 0, its ratio
// is exactly 1, and it has no gradient.
template <int kWide>
struct Tokens {
  Few<kWide> a = {}, b = {};
  uint32_t present = 0, ids = 0;  // a byte for each token

  __device__ __forceinline__ bool has(int k) const { return (present & 0xffu << 8 * k) && !(ids & 0x80u << 8 * k); }
  // Returns the group ids of the tokens. If a token is masked out or in no group, the result has `none` instead of its
  // id.
  __device__ __forceinline__ uint32_t groups(uint32_t none) const {
    const uint32_t some = ((present & 0x7f * kEach) + 0x7f * kEach) | present;  // the highest bit of each byte
    const uint32_t absent = ((~some | ids) & 0x80 * kEach) / 0x80 * 0xff;
    return (ids & ~absent) | (none * kEach & absent);
  }
  // Returns the group of a token; kNone if the token is masked out or in no group.
  __device__ __forceinline__ int group(int k) const {
    return Min()(int{static_cast<int8_t>(groups(0xff) >> 8 * k)}, TokenGroups::kBad);
  }
  __device__ __forceinline__ float difference(int k) const { return has(k) ? a.at[k] - b.at[k] : 0.f; }
};

// The inputs of all tokens. If `b` is null, its values count as 0.
struct Terms {
  const float *a, *b;
  TokenGroups groups;
  bool vectors;

  Terms(const float* a, const float* b, const TokenGroups& groups, const float* out)
      : a(a),
        b(b),
        groups(groups),
        vectors(has_vectors(a) && has_vectors(b) && has_vectors(groups.mask) && has_vectors(groups.ids) &&
                has_vectors(out)) {}

  template <bool kGroups, int kWide, bool kNumbers = true>
  __device__ __forceinline__ Tokens<kWide> at(int64_t i) const {
    Tokens<kWide> tokens;
    if (kNumbers) tokens.a = load<kWide>(a + i);
    if (kNumbers && b) tokens.b = load<kWide>(b + i);
    tokens.present = groups.mask ? load_bytes<kWide>(groups.mask, i) : kEach;
    if (kGroups && groups.ids) tokens.ids = load_bytes<kWide>(groups.ids, i);
    return tokens;
  }
};

// Calls body(sequence, part) for each sequence that has tokens in this warp's stretch; `part` has these tokens. Calls
// body(-1, part) for tokens that belong to no sequence because offsets are bad.
template <class Body>
__device__ __forceinline__ void for_stretches(const TokenGroups& groups, const Body& body) {
  const Segments& sequences = groups.sequences;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t begin = (int64_t{blockIdx.x} * (blockDim.x / kWarp) + threadIdx.x / kWarp) * kStretch;
  const int64_t end = begin + kStretch < groups.tokens ? begin + kStretch : groups.tokens;
  if (begin >= end) return;
  int64_t i = sequences.find(begin);
  for (int64_t a = begin; a < end;) {
    const bool any = i < sequences.count;
    const int64_t first = any ? sequences.begin(i) : end, last = any ? sequences.end(i) : end;
    const bool gap = first > a;
    const int64_t until = gap ? first : last;
    const int64_t b = until < end ? until : end;
    if (a < b) {
      body(gap ? -1 : i, Part{a, b, lane, kWarp});
      a = b;
    }
    i += !gap;
  }
}

// Returns bounded_ratio(), but without the branches that nvcc would make around the loads of the bounds.
__device__ __forceinline__ float ratio_within(const LogBounds& bounds, float x) {
  const float low = bounds.low, high = bounds.high;
  return exponential(x < low ? low : x > high ? high : x);
}

// ---- sums --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void add_shared(ExactSum* total, const ExactSum& part) {
  if (part.count == 0) return;
  atomicAdd(reinterpret_cast<unsigned long long*>(&total->units), static_cast<unsigned long long>(part.units));
  atomicAdd(&total->count, part.count);
  if (part.flags) atomicOr(&total->flags, part.flags);
}

// A thread adds up its terms of a group in one 64-bit word. The lower 52 bits have the sum of the terms, in the units
// of exact_sum.h. The upper 12 bits have the number of terms. A part has at most kLong tokens, so a thread has at most
// 2,050 terms. The word has room for 4,095 terms, whose sum is below 2^50 units.
constexpr int kUnitBits = 52;
constexpr int64_t kLong = int64_t{1} << 19;

// The number of words that a thread has. The last one is for tokens in no group, and is never read. Words are in shared
// memory, so a word that no token needs costs nothing in the loop over tokens.
template <bool kGroups>
constexpr int kWords = kGroups ? kOwnGroups + 1 : 1;

// For each token of a part, adds the term a - b to this thread's word for the token's group. If is_far(term) is true,
// or if the group has no words, adds the term to sums[group] instead. The words of a part are [group][thread], and
// `words` points to this thread's first word.
template <bool kGroups>
__device__ __forceinline__ void add_part(const Terms& terms, const Part& part, uint64_t* words, ExactSum* sums,
                                         const Faults& faults) {
  constexpr int kOwn = kGroups ? kOwnGroups : 1;
  // Offsets in bytes, so that one multiplication and addition gives an address.
  const auto word_of = [words, row = part.size * static_cast<uint32_t>(sizeof(uint64_t))](uint32_t group) {
    return reinterpret_cast<uint64_t*>(reinterpret_cast<char*>(words) + group * row);
  };
  for (int g = 0; kGroups && g < kOwn; ++g) *word_of(g) = 0;
  uint64_t only = 0;  // the word of the only group, in a register
  for_tokens(part, terms.vectors, [&](auto width, int64_t first, int64_t step, int64_t end) {
    constexpr int kWide = decltype(width)::value;
    Tokens<kWide> tokens[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j)
      if (first + j * step < end) tokens[j] = terms.at<kGroups, kWide>(first + j * step);
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      float term[kWide], size = 0.f;  // no term is larger than `size`
#pragma unroll
      for (int k = 0; k < kWide; ++k) size += fabsf(term[k] = tokens[j].a.at[k] - tokens[j].b.at[k]);
      if (is_far(size) || (tokens[j].groups(0) & (0x80 - kOwnGroups) * kEach)) {
#pragma unroll
        for (int k = 0; k < kWide; ++k) {
          const int group = tokens[j].group(k);
          if (group == TokenGroups::kNone || (group < kOwn && !is_far(term[k]))) continue;
          ExactSum one;
          add_term(one, term[k]);
          group == TokenGroups::kBad ? faults.note(Fault::kGroups) : add_shared(sums + group, one);
          tokens[j].present &= ~(0xffu << 8 * k);
        }
      }
      const uint32_t groups = tokens[j].groups(kOwnGroups);
#pragma unroll
      for (int k = 0; k < kWide; ++k) {
        uint64_t& word = kGroups ? *word_of(groups >> 8 * k & 0xffu) : only;
        if (kGroups || tokens[j].has(k)) word += near_units(term[k]) + (uint64_t{1} << kUnitBits);
      }
    }
  });
  if (!kGroups) *words = only;
}

// Adds the words of all threads of a part to `sums`. words[0] is the first word of the first thread.
template <bool kGroups>
__device__ __forceinline__ void add_words(const uint64_t* words, const Part& part, ExactSum* sums) {
  const int lane = part.rank & (kWarp - 1);  // with %, nvcc would not see that a warp's part has one word for each lane
#pragma unroll 1
  for (int g = part.rank / kWarp; g < (kGroups ? kOwnGroups : 1); g += part.size / kWarp) {
    ExactSum sum;
    for (int i = lane; i < part.size; i += kWarp) {
      const uint64_t word = words[g * part.size + i];
      const int64_t units = static_cast<int64_t>(word << (64 - kUnitBits)) >> (64 - kUnitBits);
      sum.units += units;
      sum.count += static_cast<uint32_t>((word - units) >> kUnitBits);
    }
    if (kGroups && !__any_sync(kAllLanes, sum.count > 0)) continue;  // most sequences have fewer groups
    sum.units = warp_reduce(sum.units, Sum());
    sum.count = __reduce_add_sync(kAllLanes, sum.count);
    if (lane == 0) add_shared(sums + g, sum);
  }
}

template <bool kGroups>
__global__ void __launch_bounds__(kThreads)
    add_terms(const __grid_constant__ Terms terms, ExactSum* sums, const __grid_constant__ Faults faults) {
  note_offsets(terms.groups.sequences, faults);
  for_stretches(terms.groups, [&](int64_t sequence, const Part& part) {
    if (sequence < 0) return;
    uint64_t* words = dynamic_shared<uint64_t>() + threadIdx.x / kWarp * (kWords<kGroups> * kWarp);
    add_part<kGroups>(terms, part, words + part.rank, sums + sequence * terms.groups.each, faults);
    add_words<kGroups>(words, part, sums + sequence * terms.groups.each);
  });
}

// ---- a value for each token --------------------------------------------------------------------------------------

// Defines the results that are computed from the means: a ratio for each group, a ratio for each token, or `scale`
// times the mean.
struct Numbers {
  bool ratios, of_tokens;
  LogBounds bounds;
  float scale;

  __device__ __forceinline__ float of_group(float mean) const {
    return !ratios ? scale * mean : of_tokens ? mean : ratio_within(bounds, mean);
  }
  __device__ __forceinline__ float of_none() const { return !ratios ? kNoClip : of_tokens ? 0.f : kNoRatio; }
};

constexpr int kTable = kMostGroups + 2;  // one value for each group, from TokenGroups::kNone to kBad

// Fills the table of a sequence. Bad ids get NaN. For tokens outside of sequences, `sums` is null and all values are
// NaN.
__device__ __forceinline__ void fill_table(float* table, const ExactSum* sums, int groups, const Numbers& numbers,
                                           int rank) {
  const int group = rank - 1;
  if (rank < kTable)
    table[rank] = !sums                         ? NAN
                  : group == TokenGroups::kNone ? numbers.of_none()
                  : group < groups              ? numbers.of_group(mean_of(sums[group]))
                                                : NAN;
}

template <bool kGroups, bool kOfTokens>
__device__ __forceinline__ void write_part(const Terms& terms, const Part& part, const Numbers& numbers,
                                           const float* table, float* out) {
  for_tokens(part, terms.vectors, [&](auto width, int64_t first, int64_t step, int64_t end) {
    constexpr int kWide = decltype(width)::value;
    Tokens<kWide> tokens[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j)
      if (first + j * step < end) tokens[j] = terms.at<kGroups, kWide, kOfTokens>(first + j * step);
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (first + j * step >= end) continue;
      Few<kWide> values;
#pragma unroll
      for (int k = 0; k < kWide; ++k) {
        values.at[k] = table[tokens[j].group(k) + 1];
        if (kOfTokens) values.at[k] = ratio_within(numbers.bounds, values.at[k] + tokens[j].difference(k));
      }
      store<kWide>(out + first + j * step, values);
    }
  });
}

template <bool kGroups>
__global__ void __launch_bounds__(kThreads) write_numbers(const __grid_constant__ Terms terms, const ExactSum* sums,
                                                          const __grid_constant__ Numbers numbers, float* out) {
  float* table = dynamic_shared<float>() + threadIdx.x / kWarp * kTable;
  for_stretches(terms.groups, [&](int64_t sequence, const Part& part) {
    const int each = terms.groups.each;
    __syncwarp();  // before the table is overwritten
    fill_table(table, sequence < 0 ? nullptr : sums + sequence * each, each, numbers, part.rank);
    __syncwarp();
    numbers.of_tokens ? write_part<kGroups, true>(terms, part, numbers, table, out)
                      : write_part<kGroups, false>(terms, part, numbers, table, out);
  });
}

// There is one block for each sequence. All sequences have the same length.
template <bool kGroups>
__global__ void __launch_bounds__(kThreads)
    whole_sequences(const __grid_constant__ Terms terms, const __grid_constant__ Numbers numbers, float* out,
                    const __grid_constant__ Faults faults) {
  auto* sums = dynamic_shared<ExactSum>();
  auto* table = reinterpret_cast<float*>(sums + kMostGroups);
  auto* words = reinterpret_cast<uint64_t*>(table + kTable);
  const int rank = static_cast<int>(threadIdx.x);
  const int64_t length = terms.groups.sequences.length, begin = blockIdx.x * length;
  const Part part = {begin, begin + length, rank, static_cast<int>(blockDim.x)};
  if (rank < kMostGroups) sums[rank] = ExactSum();
  __syncthreads();
  add_part<kGroups>(terms, part, words + rank, sums, faults);
  __syncthreads();
  add_words<kGroups>(words, part, sums);
  __syncthreads();
  fill_table(table, sums, terms.groups.each, numbers, rank);
  __syncthreads();
  numbers.of_tokens ? write_part<kGroups, true>(terms, part, numbers, table, out)
                    : write_part<kGroups, false>(terms, part, numbers, table, out);
}

constexpr int64_t kShort = 8192;  // tokens that one block sums and writes in the time of two launches
constexpr int64_t kMany = 128;    // a GPU is busy with this many sequences, one block each, whatever their length

void write_group_numbers(const char* name, const char* name_of_sums, const float* a, const float* b,
                         const TokenGroups& groups, const Numbers& numbers, float* out, Device& device) {
  if (groups.tokens == 0) return;  // otherwise, empty sequences would get blocks of 0 threads
  const Terms terms(a, b, groups, out);
  const size_t words = sizeof(uint64_t) * (groups.ids ? kWords<true> : kWords<false>);  // bytes of a thread
  const Segments& sequences = groups.sequences;
  if (!sequences.ragged() && sequences.length <= (sequences.count < kMany ? kShort : kLong)) {
    const int64_t threads = std::min<int64_t>(ceil_div(sequences.length, kWarp * kWarp) * kWarp, kThreads);
    launch(name, groups.ids ? whole_sequences<true> : whole_sequences<false>, sequences.count,
           static_cast<int>(threads), kMostGroups * sizeof(ExactSum) + kTable * sizeof(float) + threads * words, device,
           terms, numbers, out, device.faults);
    return;
  }
  const int64_t count = groups.each * sequences.count, blocks = ceil_div(groups.tokens, kStretch * kThreads / kWarp);
  auto* sums = device.scratch_of<ExactSum>(count);
  clear(sums, 0, count * sizeof(ExactSum), device);
  launch("group sums", groups.ids ? add_terms<true> : add_terms<false>, blocks, kThreads, kThreads * words, device,
         terms, sums, device.faults);
  launch(name_of_sums, groups.ids ? write_numbers<true> : write_numbers<false>, blocks, kThreads,
         kThreads / kWarp * kTable * sizeof(float), device, terms, sums, numbers, out);
}

// ---- token by token ----------------------------------------------------------------------------------------------

// Sets out[i] = value(i) for each i below n. `value` has two steps, load() and of(), so that a thread can load several
// vectors before it computes.
template <class Out, class Value>
__global__ void __launch_bounds__(kThreads)
    write_each(int64_t n, bool vectors, const __grid_constant__ Value value, Out* out) {
  constexpr int kTokens = kInFlight * kVector * kThreads;
  const int64_t begin = int64_t{blockIdx.x} * kTokens;
  const Part part = {begin, begin + kTokens < n ? begin + kTokens : n, static_cast<int>(threadIdx.x), kThreads};
  for_tokens(part, vectors, [&](auto width, int64_t first, int64_t step, int64_t end) {
    constexpr int kWide = decltype(width)::value;
    decltype(value.template load<kWide>(0)) loaded[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j)
      if (first + j * step < end) loaded[j] = value.template load<kWide>(first + j * step);
#pragma unroll
    for (int j = 0; j < kInFlight; ++j)
      if (first + j * step < end) store<kWide>(out + first + j * step, value.of(loaded[j]));
  });
}

template <class Out, class Value>
void for_each_token(const char* name, int64_t n, bool vectors, const Value& value, Out* out, const Device& device) {
  launch(name, write_each<Out, Value>, ceil_div(n, kInFlight * kVector * kThreads), kThreads, 0, device, n, vectors,
         value, out);
}

// Computes of_pair(a, b) for each token.
template <class Of>
struct EachTerm {
  Terms terms;
  Of of_pair;

  template <int kWide>
  __device__ __forceinline__ Tokens<kWide> load(int64_t i) const {
    return terms.at<Of::kGroups, kWide>(i);
  }
  template <int kWide>
  __device__ __forceinline__ Few<kWide> of(const Tokens<kWide>& tokens) const {
    Few<kWide> values;
#pragma unroll
    for (int k = 0; k < kWide; ++k)
      values.at[k] = of_pair(tokens.has(k) ? tokens.a.at[k] : 0.f, tokens.has(k) ? tokens.b.at[k] : 0.f);
    return values;
  }
};

struct TokenRatio {
  static constexpr bool kGroups = false;
  LogBounds bounds;
  __device__ __forceinline__ float operator()(float logprob, float old) const {
    return ratio_within(bounds, logprob - old);
  }
};

struct TokenGradient {
  static constexpr bool kGroups = true;
  RatioLimits limits;
  __device__ __forceinline__ float operator()(float grad, float ratio) const {
    return ratio_gradient(grad, ratio, limits);
  }
};

template <class Of>
void for_each_term(const char* name, const Terms& terms, const Of& of, float* out, const Device& device) {
  for_each_token(name, terms.groups.tokens, terms.vectors, EachTerm<Of>{terms, of}, out, device);
}

struct QuantileGroup {
  Terms entropy;
  const bool* above;
  int quantiles;

  // Loads kWide tokens and returns their groups, one byte for each token.
  template <int kWide>
  __device__ __forceinline__ uint32_t load(int64_t i) const {
    const Tokens<kWide> tokens = entropy.at<false, kWide>(i);
    uint32_t groups = 0;
    for (int q = 0; q < quantiles; ++q) groups += load_bytes<kWide>(above, q * entropy.groups.tokens + i);
#pragma unroll
    for (int k = 0; k < kWide; ++k)
      if (!tokens.has(k) || tokens.a.at[k] != tokens.a.at[k]) groups |= 0xffu << 8 * k;
    return groups;
  }
  __device__ __forceinline__ uint32_t of(uint32_t groups) const { return groups; }
};

}  // namespace

void importance_ratios(const float* logprob, const float* old_logprob, const TokenGroups& groups, RatioForm form,
                       const LogBounds& bounds, float* out, Device& device) {
  if (form == RatioForm::kToken)
    return for_each_term("importance_ratio (tokens)", Terms(logprob, old_logprob, groups, out), TokenRatio{bounds}, out,
                         device);
  const Numbers numbers = {true, form == RatioForm::kMeanAndToken, bounds, 0.f};
  write_group_numbers("importance_ratio", "importance_ratio (sums)", logprob, old_logprob, groups, numbers, out,
                      device);
}

void importance_ratio_gradients(const RatioGradient& gradient, float* out, Device& device) {
  for_each_term("importance_ratio_backward", Terms(gradient.grad, gradient.ratio, gradient.groups, out),
                TokenGradient{gradient.limits}, out, device);
}

void scaled_group_means(const float* values, const TokenGroups& groups, float scale, float* out, Device& device) {
  const Numbers numbers = {false, false, {}, scale};
  write_group_numbers("adaptive_clip", "adaptive_clip (sums)", values, nullptr, groups, numbers, out, device);
}

void group_by_quantiles(const QuantileMasks& masks, int8_t* out, Device& device) {
  TokenGroups tokens;
  tokens.tokens = masks.tokens;
  tokens.mask = masks.mask;
  const Terms entropy(masks.entropy, nullptr, tokens, nullptr);
  const bool vectors = entropy.vectors && has_vectors(masks.above) && has_vectors(out) && masks.tokens % kVector == 0;
  for_each_token("entropy_groups", masks.tokens, vectors, QuantileGroup{entropy, masks.above, masks.quantiles}, out,
                 device);
}

}  // namespace d3s
