// Computes log-probabilities at given ids. A slice of a row with given ids is copied, and the copy has -inf in place of
// these ids. Temporary memory holds a list of the rows, a slice for each thread, and, if there are too few rows to keep
// all threads busy, 12 bytes for each slice of a row.
#include "../ops/token_logprobs.h"

#include <algorithm>
#include <numeric>

#include "../torch_abi.h"
#include "row_slices.h"

namespace d3s {
namespace {

// The state of a slice without the row's given ids.
template <class T>
class TailSlices {
 public:
  TailSlices(const LogitsRows& rows, const TokenIds& ids, float* taken) : rows_(rows), ids_(ids), taken_(taken) {}

  SoftmaxSums operator()(int64_t row, const T* logits, int64_t begin, int64_t n, float scale, const T* next) {
    const T* slice = logits + begin;
    for (int64_t i = 0; i < ids_.width; ++i) {
      const int64_t place = rows_.column(ids_.at(row, i)) - begin;
      if (place < 0 || place >= n) continue;
      if (slice != copy_) {
        memcpy(copy_, slice, n * sizeof(T));
        slice = copy_;
      }
      copy_[place] = from_float<T>(-INFINITY);
      taken_[row * ids_.width + i] = to_float(logits[begin + place]);
    }
    return loops_.slice(slice, n, scale, next);
  }

 private:
  const LogitsRows& rows_;
  const TokenIds& ids_;
  float* taken_;
  const SoftmaxLoops<T>& loops_ = softmax_rows().of(Tag<T>());
  T copy_[kSlice];
};

// Finds, for each given id of a row, the first place with the same id. Each thread reuses one object for all its rows.
class FirstPlaces {
 public:
  explicit FirstPlaces(const TokenIds& ids) : ids_(ids), first_(ids.width), order_(ids.width) {}

  void read(int64_t row) {
    std::iota(order_.begin(), order_.end(), 0);
    std::sort(order_.begin(), order_.end(), [&](int64_t a, int64_t b) {
      const int64_t id_a = ids_.at(row, a), id_b = ids_.at(row, b);
      return id_a != id_b ? id_a < id_b : a < b;
    });
    for (int64_t i = 0; i < ids_.width; ++i) {
      const bool repeated = i > 0 && ids_.at(row, order_[i]) == ids_.at(row, order_[i - 1]);
      first_[order_[i]] = repeated ? first_[order_[i - 1]] : order_[i];
    }
  }
  int64_t operator[](int64_t i) const { return first_[i]; }

 private:
  const TokenIds& ids_;
  std::vector<int64_t> first_, order_;
};

// Calls body(row, first places of the row) for each row.
template <class Body>
void for_each_row_of_ids(const TokenIds& ids, int64_t rows, const Body& body) {
  constexpr int64_t kGrain = 4096;  // the minimum number of ids for a thread
  parallel_for(rows, 1 + kGrain / (ids.width + 1), [&](int64_t begin, int64_t end) {
    FirstPlaces first(ids);
    for (int64_t row = begin; row < end; ++row) {
      first.read(row);
      body(row, first);
    }
  });
}

}  // namespace

void merge_tail(const LogitsRows& rows, const TokenIds& ids, RowState* states, float* taken, Device&) {
  dispatch_float(rows.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    merge_slices<T>(rows, [&] { return TailSlices<T>(rows, ids, taken); }, states);
  });
}

void finish_tokens(const RowStates& tails, const TakenLogits& taken, const TokenIds& ids,
                   const Temperatures& temperatures, const TokenOutputs& outputs, Device&) {
  const SoftmaxLoops<float>& loops = softmax_rows().float32;
  for_each_row_of_ids(ids, tails.count, [&](int64_t row, const FirstPlaces& first) {
    const float temperature = temperatures[row];
    const RowState tail = tails.merged(row, temperature);
    SoftmaxState all = tail.get();
    float distinct[256];
    int64_t n = 0;
    const auto merge_distinct = [&] {
      const SoftmaxSums sums = loops.slice(distinct, n, kLog2E / temperature, distinct);
      all = merge(all, {sums.max, sums.sum, sums.dot}, 1.f / temperature);
      n = 0;
    };
    float* logprobs = outputs.logprobs + row * ids.width;
    for (int64_t i = 0; i < ids.width; ++i) {
      const bool is_fill = ids.at(row, i) == TokenIds::kFill;
      logprobs[i] = is_fill ? -INFINITY : taken.at(row, i);
      if (is_fill || first[i] != i) continue;
      distinct[n++] = logprobs[i];
      if (n == static_cast<int64_t>(std::size(distinct))) merge_distinct();
    }
    if (n > 0) merge_distinct();
    const RowStatistics whole = finish(all, temperature);
    outputs.write(row, tail, whole, temperature);
    for (int64_t i = 0; i < ids.width; ++i)
      if (ids.at(row, i) != TokenIds::kFill) logprobs[i] = log_probability(logprobs[i], whole, temperature);
  });
}

void token_gradients(const TokenGradients& given, int64_t rows, const TokenGradientOutputs& outputs, Device&) {
  const int64_t width = given.ids.width;
  for_each_row_of_ids(given.ids, rows, [&](int64_t row, const FirstPlaces& first) {
    float* values = outputs.values + row * (width + 1);
    std::fill(values, values + width + 1, 0.f);
    float of_ids = 0.f;
    bool any = false;
    const int64_t label = given.labels[row];
    int64_t label_at = -1;
    for (int64_t i = 0; i < width; ++i) {
      const float own = given.of_id(row, i);
      any |= own != 0.f;
      of_ids += own;
      values[first[i]] += own;
      if (label_at < 0 && label != kNoTarget && given.ids.at(row, i) == label) label_at = i;
    }
    const float of_label = given.of_label(row);
    if (label_at >= 0) values[label_at] += of_label;
    const TokenGradient gradient = given.of(row, of_ids, any);
    outputs.write(row, gradient);
    const float* logprobs = given.logprobs + row * width;
    for (int64_t i = 0; i < width; ++i)
      values[i] = first[i] == i ? gradient.at_given(logprobs[i], values[i]) : values[first[i]];
    values[width] = label_at >= 0        ? values[label_at]
                    : label == kNoTarget ? 0.f
                                         : gradient.at_label_in_tail(given.logprob[row], of_label);
  });
}

void put_token_gradients(const LogitsRows& rows, const TokenIds& ids, const float* values, void* gradient, Device&) {
  dispatch_float(rows.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (int64_t row = 0; row < rows.layout.count; ++row) {
      T* to = static_cast<T*>(gradient) + rows.layout.offset(row);
      const float* value = values + row * (ids.width + 1);
      const auto put = [&](int64_t id, float number) {
        if (id >= 0 && rows.column(id) >= 0) to[rows.column(id)] = from_float<T>(number);
      };
      for (int64_t i = 0; i < ids.width; ++i) put(ids.at(row, i), value[i]);
      put(rows.labels[row], value[ids.width]);
    }
  });
}

}  // namespace d3s
