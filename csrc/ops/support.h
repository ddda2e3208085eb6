// The supports of rows: for each row, the ids that could have been sampled. Nothing here depends on torch.
#pragma once

#include <cstdint>

#include "../core/macros.h"

namespace d3s {

// The ids of one row, out of the whole vocabulary, in any order. A row without ids has no support: every id could have
// been sampled, and the kernels of dense rows compute the row.
struct Support {
  const int32_t* tokens;
  int64_t size;  // below 0 if the row's offsets are bad: offsets on the device may be unchecked
};

// Describes the set of a row: the ids over which the row's log-probability and entropy are computed. The set consists
// of the ids of the support and, if `label_joins` is true, the label.
struct SupportSet {
  int64_t size;
  bool has_label;
  bool label_joins;  // the label is in the set but not among the ids
  bool bad;          // the row's offsets or one of its ids are bad, so its results are NaN

  // Returns whether the set is a single id. Then logprob, entropy and gradient are 0, and no logit is read.
  D3S_HOST_DEVICE bool single() const { return size == 1 && !bad; }
};

struct Supports {
  const int32_t* tokens = nullptr;
  int64_t count = 0;                   // the number of ids, over all rows
  const int32_t* offsets32 = nullptr;  // one of offsets32 and offsets64 is set
  const int64_t* offsets64 = nullptr;
  bool include_label = false;  // if true, a label that is not among the ids of its row joins the row's set

  D3S_HOST_DEVICE bool good(int64_t row) const {
    const int64_t begin = offset(row), end = offset(row + 1);
    return 0 <= begin && begin <= end && end <= count && (row > 0 || begin == 0);
  }
  D3S_HOST_DEVICE Support operator[](int64_t row) const {
    const bool is_good = good(row);
    return {tokens + (is_good ? offset(row) : 0), is_good ? offset(row + 1) - offset(row) : -1};
  }
  // These two functions return places: indices into a list of support logits. The list has one place for each id, in
  // the order of the ids, and then one place for each row. The place of a row is used if its label joins its set.
  D3S_HOST_DEVICE int64_t place(const Support& support, int64_t i) const { return support.tokens - tokens + i; }
  D3S_HOST_DEVICE int64_t place_of_label(int64_t row) const { return count + row; }

  // Returns the row of the id at this place, or -1 if the id belongs to no row.
  D3S_HOST_DEVICE int64_t row_at(int64_t place, int64_t rows) const {
    int64_t low = 0, high = rows;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (offset(middle + 1) <= place)
        low = middle + 1;
      else
        high = middle;
    }
    return low < rows && offset(low) <= place ? low : -1;
  }

  // Returns the set of a row. `label_found` tells whether the label is among the ids, and `bad_token` tells whether one
  // of the ids is bad. A label below 0 is no id, so it never joins the set.
  D3S_HOST_DEVICE SupportSet set_of(const Support& support, int64_t label, int64_t vocabulary, bool label_found,
                                    bool bad_token) const {
    const bool joins = include_label && !label_found && label >= 0 && label < vocabulary;
    return {support.size + joins, label_found || joins, joins, bad_token || support.size < 0};
  }

 private:
  D3S_HOST_DEVICE int64_t offset(int64_t i) const { return offsets32 ? offsets32[i] : offsets64[i]; }
};

}  // namespace d3s
