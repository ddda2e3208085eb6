// Computes the matrix products of an LM head, but only for the ids of supports. The places are divided evenly among the
// threads.
#include "../ops/support_products.h"

#include <algorithm>

#include "../torch_abi.h"
#include "support_product_loops.h"

namespace d3s {
namespace {

constexpr int64_t kGrain = 32768;  // the minimum number of multiplications for a thread

int64_t grain_of(const Matrix& matrix) { return 1 + kGrain / (matrix.columns + 1); }

// Prefetches a row of a matrix that is too large for any cache. Rows are read in no regular order, so without a
// prefetch, the processor would wait at the start of each row.
template <class T>
void prefetch(const Matrix& matrix, int64_t row) {
  const char* p = reinterpret_cast<const char*>(row_of<T>(matrix, row));
  for (int64_t byte = 0; byte < matrix.columns * static_cast<int64_t>(sizeof(T)); byte += 64)
    __builtin_prefetch(p + byte, 0, 2);
}

// A place whose logit is needed.
struct Needed {
  int64_t place, row, token;
};

std::vector<Needed> needed_places(const SupportHead& head) {
  std::vector<Needed> needed;
  needed.reserve(head.rows.supports.count);
  for (int64_t row = 0; row < head.hidden.rows; ++row) {
    const Support support = head.rows.supports[row];
    if (head.rows.masked_out(row) || head.single(row, support)) continue;
    bool joins = head.may_join(row, support);
    for (int64_t i = 0; i < support.size; ++i) {
      const int64_t token = head.rows.column(support.tokens[i]);
      if (token >= 0) needed.push_back({head.rows.supports.place(support, i), row, token});
      joins &= support.tokens[i] != head.rows.labels[row];
    }
    const int64_t label = joins ? head.rows.column(head.rows.labels[row]) : -1;
    if (label >= 0) needed.push_back({head.rows.supports.place_of_label(row), row, label});
  }
  return needed;
}

// The sort key of a place: its id first, then the place itself.
struct Entry {
  int32_t token, place;

  bool operator<(const Entry& other) const { return token != other.token ? token < other.token : place < other.place; }
};

template <class T, class To>
void add_sorted(const SupportGradient& gradient, const Matrix& hidden, const std::vector<Entry>& sorted,
                const Matrix& out, const Vector& bias_out) {
  const auto& loops = support_products();
  const auto count = static_cast<int64_t>(sorted.size());
  // Each id is assigned to the thread whose range contains the id's first entry in `sorted`.
  parallel_for(count, grain_of(hidden), [&](int64_t begin, int64_t end) {
    std::vector<float> sum(hidden.columns);
    int64_t i = begin;
    while (i > 0 && i < end && sorted[i].token == sorted[i - 1].token) ++i;
    while (i < end) {
      const int32_t token = sorted[i].token;
      std::fill(sum.begin(), sum.end(), 0.f);
      float of_bias = 0.f;
      for (; i < count && sorted[i].token == token; ++i) {
        const int32_t place = sorted[i].place;
        of_bias += gradient.grad[place];
        loops.of(Tag<T>()).add_scaled(row_of<T>(hidden, gradient.rows[place]), gradient.grad[place], hidden.columns,
                                      sum.data());
      }
      loops.of(Tag<To>()).add_to(sum.data(), hidden.columns, row_of<To>(out, token));
      if (bias_out.values) bias_out.add(token, of_bias);
    }
  });
}

}  // namespace

void support_logits(const SupportHead& head, float* out, Device&) {
  std::fill(out, out + head.places(), -INFINITY);
  const std::vector<Needed> needed = needed_places(head);
  dispatch_float(head.hidden.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto& loops = support_products().of(tag);
    parallel_for(static_cast<int64_t>(needed.size()), grain_of(head.weight), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        if (i + 1 < end) prefetch<T>(head.weight, needed[i + 1].token);
        const auto [place, row, token] = needed[i];
        const T* weight = row_of<T>(head.weight, token);
        out[place] = head.logit(loops.dot(row_of<T>(head.hidden, row), weight, head.hidden.columns), token);
      }
    });
  });
}

void sum_for_rows(const SupportGradient& gradient, const Matrix& weight, const Segments& supports,
                  const bool* undefined, const Matrix& out, Device&) {
  dispatch_sum(weight, out, [&](auto tag, auto to_tag) {
    using T = typename decltype(tag)::type;
    using To = typename decltype(to_tag)::type;
    const auto& loops = support_products();
    parallel_segments(supports, supports.limit, grain_of(weight), [&](int64_t first, int64_t last) {
      std::vector<float> sum(weight.columns);
      const auto add = [&](int64_t place) {
        if (gradient.has(place, supports.count, weight.rows))
          loops.of(tag).add_scaled(row_of<T>(weight, gradient.tokens[place]), gradient.grad[place], weight.columns,
                                   sum.data());
      };
      for (int64_t row = first; row < last; ++row) {
        const int64_t begin = supports.begin(row), end = supports.end(row);
        if (begin == end && !undefined[row]) continue;
        std::fill(sum.begin(), sum.end(), undefined[row] ? NAN : 0.f);
        for (int64_t place = begin; place < end; ++place) {
          if (place + 1 < end && gradient.has(place + 1, supports.count, weight.rows))
            prefetch<T>(weight, gradient.tokens[place + 1]);
          add(place);
        }
        add(supports.limit + row);
        To* to = row_of<To>(out, row);
        std::fill(to, to + weight.columns, from_float<To>(0.f));
        loops.of(to_tag).add_to(sum.data(), weight.columns, to);
      }
    });
  });
}

void add_for_tokens(const SupportGradient& gradient, const Matrix& hidden, const Matrix& out, const Vector& bias_out,
                    Device&) {
  std::vector<Entry> sorted;
  sorted.reserve(gradient.places);
  for (int64_t i = 0; i < gradient.places; ++i)
    if (gradient.has(i, hidden.rows, out.rows)) sorted.push_back({gradient.tokens[i], static_cast<int32_t>(i)});
  std::sort(sorted.begin(), sorted.end());
  dispatch_sum(hidden, out, [&](auto tag, auto to_tag) {
    add_sorted<typename decltype(tag)::type, typename decltype(to_tag)::type>(gradient, hidden, sorted, out, bias_out);
  });
}

}  // namespace d3s
