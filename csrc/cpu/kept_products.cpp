// Products of the kept rows of an LM head's weight. Threads share the pairs evenly.
#include "../ops/kept_products.h"

#include <algorithm>

#include "../torch_abi.h"
#include "kept_product_loops.h"

namespace d3s {
namespace {

constexpr int64_t kGrain = 32768;  // products of a thread

template <class T>
const T* row_of(const Matrix& matrix, int64_t row) {
  return static_cast<const T*>(matrix.values) + row * matrix.stride;
}

// Pairs are sorted by these: by token, and those of a token in their order.
struct Entry {
  int32_t token;
  int64_t pair;

  bool operator<(const Entry& other) const { return token != other.token ? token < other.token : pair < other.pair; }
};

template <class T, class To>
void add_sorted(const float* grad, const Matrix& hidden, const Pairs& pairs, const std::vector<Entry>& sorted,
                const Matrix& out) {
  const auto& loops = D3S_PICK_VARIANT(kept_products);
  const auto count = static_cast<int64_t>(sorted.size());
  // A thread gets the tokens whose first pair lies in its share.
  parallel_for(count, 1 + kGrain / (hidden.columns + 1), [&](int64_t begin, int64_t end) {
    std::vector<float> sum(hidden.columns);
    int64_t i = begin;
    while (i > 0 && i < end && sorted[i].token == sorted[i - 1].token) ++i;
    while (i < end) {
      const int32_t token = sorted[i].token;
      std::fill(sum.begin(), sum.end(), 0.f);
      for (; i < count && sorted[i].token == token; ++i) {
        const int64_t pair = sorted[i].pair;
        loops.of(Tag<T>()).add_scaled(row_of<T>(hidden, pairs.rows[pair]), grad[pair], hidden.columns, sum.data());
      }
      loops.of(Tag<To>()).add_to(sum.data(), hidden.columns, const_cast<To*>(row_of<To>(out, token)));
    }
  });
}

}  // namespace

void pair_products(const Matrix& hidden, const Matrix& weight, const Pairs& pairs, float* out, Device&) {
  dispatch_float(hidden.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto& loops = D3S_PICK_VARIANT(kept_products).of(tag);
    parallel_for(pairs.count, 1 + kGrain / (hidden.columns + 1), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        out[i] = pairs.has(i, hidden.rows, weight.rows)
                     ? loops.dot(row_of<T>(hidden, pairs.rows[i]), row_of<T>(weight, pairs.tokens[i]), hidden.columns)
                     : 0.f;
    });
  });
}

void sum_for_rows(const float* grad, const Matrix& weight, const int32_t* tokens, const Segments& segments, float* out,
                  Device&) {
  dispatch_float(weight.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto& loops = D3S_PICK_VARIANT(kept_products).of(tag);
    parallel_segments(segments, segments.limit, 1 + kGrain / (weight.columns + 1), [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        float* sum = out + row * weight.columns;
        std::fill(sum, sum + weight.columns, 0.f);
        for (int64_t i = segments.begin(row); i < segments.end(row); ++i)
          if (tokens[i] >= 0 && tokens[i] < weight.rows)
            loops.add_scaled(row_of<T>(weight, tokens[i]), grad[i], weight.columns, sum);
      }
    });
  });
}

void add_for_tokens(const float* grad, const Matrix& hidden, const Pairs& pairs, const Matrix& out, Device&) {
  std::vector<Entry> sorted;
  sorted.reserve(pairs.count);
  for (int64_t i = 0; i < pairs.count; ++i)
    if (pairs.has(i, hidden.rows, out.rows)) sorted.push_back({pairs.tokens[i], i});
  std::sort(sorted.begin(), sorted.end());
  dispatch_float(hidden.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (out.type == hidden.type)
      add_sorted<T, T>(grad, hidden, pairs, sorted, out);
    else
      add_sorted<T, float>(grad, hidden, pairs, sorted, out);
  });
}

}  // namespace d3s
