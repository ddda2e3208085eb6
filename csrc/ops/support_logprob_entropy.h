// The kernels for rows of logits that have a support, implemented in cpu/ and cuda/. They read and write only these
// rows; the kernels of logprob_entropy.h compute the dense rows. ops/support_logprob_entropy.cpp has checked the
// arguments. Nothing here depends on torch.
#pragma once

#include "logprob_entropy.h"
#include "support.h"

namespace d3s {

// Rows of logits with their supports.
struct SupportRows : LogitsRows {
  Supports supports;
  // If true, `logits` is one list with the support logits of all rows. Supports::place says where the logits of a row
  // are in the list. layout.columns is then the number of ids in the vocabulary or tile.
  bool listed = false;
  const bool* exceeded = nullptr;  // on the device; if it is set and true, the results of all unmasked rows are NaN

  // place() returns the index of the i-th id in the row of logits, and place_of_label() returns the index of the label.
  // If `listed` is true, these are indices into the list. The id or label must have a column.
  D3S_HOST_DEVICE int64_t place(const Support& support, int64_t i) const {
    return listed ? supports.place(support, i) : support.tokens[i] - first_token;
  }
  D3S_HOST_DEVICE int64_t place_of_label(int64_t row) const {
    return listed ? supports.place_of_label(row) : labels[row] - first_token;
  }
};

// Writes dense[row]: whether the row is unmasked and has no support. Writes `exceeded`: whether there are more dense
// rows than `bound`; false if `bound` is below 0. `mask` may be null.
void find_dense_rows(const Supports& supports, int64_t rows, const bool* mask, int64_t bound, bool* dense,
                     bool* exceeded, Device& device);

// Writes the results of the rows that have a support, and 0 for the rows that are masked out. If `rows.exceeded` points
// to true, writes NaN for all other rows, with one exception: the log-probability of a row without a label is 0.
void support_statistics(const SupportRows& rows, const RowOutputs& outputs, Device& device);

// Merges the support logits in a tile into the states of the rows that have a support. If `rows.exceeded` points to
// true, the states of all unmasked rows become NaN.
void merge_supports(const SupportRows& rows, RowState* states, Device& device);

// Writes the gradient of the support logits into `out`, which has the dtype of the logits. The rows of `out` that have
// a support must be 0. Where the gradient of a row is NaN, the whole row of `out` becomes NaN.
void add_support_gradients(const SupportRows& rows, const RowGradients& gradients, const GradientOutput& out,
                           Device& device);

}  // namespace d3s
