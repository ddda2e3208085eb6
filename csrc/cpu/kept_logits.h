// Rows with a span of a sampling mask on a CPU: their kept logits are gathered, and then reduced as a row of so many
// logits is. Arguments come checked: every id is a token, and a row that counts has its label in its set.
#pragma once

#include <algorithm>
#include <vector>

#include "../ops/logprob_entropy.h"
#include "softmax_rows.h"

namespace d3s {

// The kept tokens of one row after the other, as places in its logits. A thread has one of these for all of its rows.
template <class T>
class KeptLogits {
 public:
  KeptLogits(const LogitsRows& rows, int64_t first_token) : rows_(rows), first_token_(first_token) {}

  KeptSet set{};

  void read(int64_t row) {
    const RowLayout& layout = rows_.layout;
    const Span span = rows_.spans[row];
    const int64_t label = rows_.labels[row];
    row_ = static_cast<const T*>(rows_.logits) + layout.offset(row);
    places_.clear();
    label_ = -1;
    bool found = false;
    for (int64_t i = 0; i < span.size; ++i) {
      found |= span.tokens[i] == label;
      if (!in_tile(span.tokens[i])) continue;
      places_.push_back(rows_.place(span, i, first_token_));
      if (span.tokens[i] == label) label_ = places_.back();
    }
    set = rows_.spans.set_of(span, label, INT64_MAX, found, false);
    if (set.label_joins && in_tile(label)) places_.push_back(label_ = rows_.place_of_label(row, first_token_));
  }

  bool any_in_tile() const { return !places_.empty(); }
  bool label_in_tile() const { return label_ >= 0; }
  float label_logit() const { return to_float(row_[label_]); }

  // `state`, with the kept logits merged into it.
  SoftmaxState merge_into(SoftmaxState state, const SoftmaxLoops<T>& loops, float temperature) {
    for_slices([&](const int64_t*, int64_t n) {
      const SoftmaxSums sums = loops.slice(logits_, n, kLog2E / temperature, logits_);
      state = merge(state, {sums.max, sums.sum, sums.dot}, 1.f / temperature);
    });
    return state;
  }

  // Writes the gradient of the kept logits to their places in `gradient`.
  void write_gradient(const SoftmaxLoops<T>& loops, const GradientRow& row, T* gradient) {
    for_slices([&](const int64_t* places, int64_t n) {
      loops.gradient(logits_, n, row, logits_);
      for (int64_t i = 0; i < n; ++i) gradient[places[i]] = logits_[i];
    });
  }

  int64_t label_place() const { return label_; }
  const std::vector<int64_t>& places() const { return places_; }

 private:
  bool in_tile(int64_t token) const { return token >= first_token_ && token - first_token_ < rows_.layout.columns; }

  // body(places, n) with the logits of n places gathered in logits_.
  template <class Body>
  void for_slices(const Body& body) {
    for (int64_t begin = 0; begin < static_cast<int64_t>(places_.size()); begin += kSlice) {
      const int64_t* places = places_.data() + begin;
      const int64_t n = std::min(kSlice, static_cast<int64_t>(places_.size()) - begin);
      for (int64_t i = 0; i < n; ++i) logits_[i] = row_[places[i]];
      body(places, n);
    }
  }

  const LogitsRows& rows_;
  const int64_t first_token_;
  const T* row_ = nullptr;
  int64_t label_ = -1;  // its place, if it is in the set and in the tile
  std::vector<int64_t> places_;
  T logits_[kSlice];
};

}  // namespace d3s
