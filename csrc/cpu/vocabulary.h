// What the ops over logits share: the temperature of a row, and the statistics of many rows.
#pragma once

#include "../core/softmax_state.h"
#include "../torch_abi.h"

namespace d3s {

// One temperature for all rows (a number, or a 0-d tensor), or one for each.
class Temperatures {
 public:
  Temperatures(double temperature, const OptionalTensor& tensor, const Tensor& logits, int64_t row_dims);

  float operator[](int64_t row) const { return per_row_ ? per_row_[row] : one_; }

 private:
  OptionalTensor contiguous_;
  const float* per_row_ = nullptr;
  float one_ = 1.f;
};

// Labels of rows as int64, -100 where there is none. A label outside the vocabulary is refused.
class Labels {
 public:
  Labels(const OptionalTensor& labels, const Tensor& logits, int64_t row_dims, int64_t vocabulary);

  // The label's place in a tile of `columns` tokens from first_token on, or -1.
  int64_t in_tile(int64_t row, int64_t first_token, int64_t columns) const {
    if (!labels64_ && !labels32_) return -1;
    const int64_t place = (labels64_ ? labels64_[row] : labels32_[row]) - first_token;
    return place >= 0 && place < columns ? place : -1;
  }

 private:
  OptionalTensor contiguous_;
  const int64_t* labels64_ = nullptr;
  const int32_t* labels32_ = nullptr;
};

struct RowOutputs {  // each of one float a row, or null
  float* logprob = nullptr;
  float* entropy = nullptr;
  float* row_max = nullptr;
  float* log_sum = nullptr;

  void write(int64_t row, const RowStatistics& statistics, float label_logprob) const {
    if (logprob) logprob[row] = label_logprob;
    if (entropy) entropy[row] = statistics.entropy;
    if (row_max) row_max[row] = statistics.max;
    if (log_sum) log_sum[row] = statistics.log_sum;
  }
};

// Statistics of all rows of `logits`, zeros for rows that row_mask leaves out (they are not read).
void row_statistics(const Tensor& logits, const Labels& labels, const Temperatures& temperatures, const bool* row_mask,
                    const RowOutputs& outputs);

}  // namespace d3s
