// Gathers the support logits of a row with a support, and treats them as a short dense row. The arguments have been
// checked: every id is in the vocabulary, and if an unmasked row has a label, the set of the row contains the label.
#pragma once

#include <algorithm>
#include <vector>

#include "../ops/support_logprob_entropy.h"
#include "softmax_rows.h"

namespace d3s {

// The ids of a row's set, stored as places: indices into the row's logits. Each thread reuses one object for all its
// rows.
template <class T>
class SupportRow {
 public:
  explicit SupportRow(const SupportRows& rows) : rows_(rows) {}

  SupportSet set{};

  void read(int64_t row) {
    const RowLayout& layout = rows_.layout;
    const Support support = rows_.supports[row];
    const int64_t label = rows_.labels[row];
    row_ = static_cast<const T*>(rows_.logits) + layout.offset(row);
    places_.clear();
    label_ = -1;
    bool found = false;
    for (int64_t i = 0; i < support.size; ++i) {
      found |= support.tokens[i] == label;
      if (rows_.column(support.tokens[i]) < 0) continue;
      places_.push_back(rows_.place(support, i));
      if (support.tokens[i] == label) label_ = places_.back();
    }
    set = rows_.supports.set_of(support, label, INT64_MAX, found, false);
    if (set.label_joins && rows_.column(label) >= 0) places_.push_back(label_ = rows_.place_of_label(row));
  }

  bool any_in_tile() const { return !places_.empty(); }
  bool label_in_tile() const { return label_ >= 0; }
  float label_logit() const { return to_float(row_[label_]); }

  // Returns `state` merged with the support logits.
  SoftmaxState merge_into(SoftmaxState state, const SoftmaxLoops<T>& loops, float temperature) {
    for_slices([&](const int64_t*, int64_t n) {
      const SoftmaxSums sums = loops.slice(logits_, n, kLog2E / temperature, logits_);
      state = merge(state, {sums.max, sums.sum, sums.dot}, 1.f / temperature);
    });
    return state;
  }

  // Writes the gradient of the support logits to their places in `gradient`.
  void write_gradient(const SoftmaxLoops<T>& loops, const GradientRow& row, T* gradient) {
    for_slices([&](const int64_t* places, int64_t n) {
      loops.gradient(logits_, n, row, logits_);
      for (int64_t i = 0; i < n; ++i) gradient[places[i]] = logits_[i];
    });
  }

  int64_t label_place() const { return label_; }
  const std::vector<int64_t>& places() const { return places_; }

 private:
  // Calls body(places, n) for each slice of the places. Before each call, the n logits of the slice are gathered in
  // logits_.
  template <class Body>
  void for_slices(const Body& body) {
    for (int64_t begin = 0; begin < static_cast<int64_t>(places_.size()); begin += kSlice) {
      const int64_t* places = places_.data() + begin;
      const int64_t n = std::min(kSlice, static_cast<int64_t>(places_.size()) - begin);
      for (int64_t i = 0; i < n; ++i) logits_[i] = row_[places[i]];
      body(places, n);
    }
  }

  const SupportRows& rows_;
  const T* row_ = nullptr;
  int64_t label_ = -1;  // the label's place, or -1 if the label is not in the set or not in the tile
  std::vector<int64_t> places_;
  T logits_[kSlice];
};

}  // namespace d3s
