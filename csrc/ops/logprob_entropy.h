// The kernels over logits, implemented in cpu/ and cuda/. ops/logprob_entropy.cpp has checked the arguments. Nothing
// here depends on torch.
#pragma once

#include "../core/order_key.h"
#include "../core/rows.h"
#include "../core/segments.h"
#include "../core/softmax_state.h"
#include "device.h"
#include "topk_mask.h"

namespace d3s {

constexpr int64_t kNoTarget = -100;

// Either one temperature for all rows (a number, or a value on the device), or one temperature for each row.
struct Temperatures {
  // Outside of these limits, 1 / t^2 or the product (z - m) t would not fit in float32.
  static constexpr double kLowest = 1e-15, kHighest = 1e15;

  const float* values = nullptr;
  bool per_row = false;
  float one = 1.f;

  // A temperature on the device may be unchecked. A bad temperature is read as NaN, which makes the results NaN.
  D3S_HOST_DEVICE float operator[](int64_t row) const {
    if (!values) return one;
    const float t = values[per_row ? row : 0];
    return t > 0.999f * static_cast<float>(kLowest) && t < 1.001f * static_cast<float>(kHighest) ? t : NAN;
  }
};

// One label for each row; kNoTarget for a row without a label.
struct Labels {
  const int64_t* labels64 = nullptr;  // at most one of labels64 and labels32 is set
  const int32_t* labels32 = nullptr;

  D3S_HOST_DEVICE int64_t operator[](int64_t row) const {
    return labels64 ? labels64[row] : labels32 ? labels32[row] : kNoTarget;
  }

  // Returns whether the label of a row is neither an id of the vocabulary nor kNoTarget. Labels on the device may be
  // unchecked.
  D3S_HOST_DEVICE bool bad(int64_t row, int64_t vocabulary) const {
    const int64_t label = (*this)[row];
    return label != kNoTarget && (label < 0 || label >= vocabulary);
  }
};

// Rows of logits. The columns are either all ids or, in a tile, the consecutive ids from first_token on.
struct LogitsRows {
  const void* logits = nullptr;
  FloatType type = FloatType::kFloat32;
  RowLayout layout;
  int64_t first_token = 0;
  int64_t vocabulary = 0;  // the number of ids; INT64_MAX for a tile, where the number is unknown
  Labels labels;
  Temperatures temperatures;
  const bool* mask = nullptr;  // where the mask is false, the row is not read, and its results are 0

  D3S_HOST_DEVICE bool masked_out(int64_t row) const { return mask && !mask[row]; }
  // Returns the column of an id, or -1 if the id has no column. Labels and ids on a GPU may be unchecked.
  D3S_HOST_DEVICE int64_t column(int64_t token) const {
    const int64_t column = token - first_token;
    return column >= 0 && column < layout.columns ? column : -1;
  }
  D3S_HOST_DEVICE int64_t id(int64_t column) const { return first_token + column; }
};

struct RowOutputs {  // each pointer is null, or has one float for each row
  float* logprob = nullptr;
  float* entropy = nullptr;
  float* row_max = nullptr;
  float* log_sum = nullptr;

  D3S_HOST_DEVICE void write(int64_t row, const RowStatistics& statistics, float label_logprob) const {
    if (logprob) logprob[row] = label_logprob;
    if (entropy) entropy[row] = statistics.entropy;
    if (row_max) row_max[row] = statistics.max;
    if (log_sum) log_sum[row] = statistics.log_sum;
  }
};

// The values from which the gradients of rows are computed. Each array has one value for each row.
struct RowGradients {
  const float* g_logprob = nullptr;  // g_logprob or g_entropy is null if there is no such gradient
  const float* g_entropy = nullptr;
  const float* entropy = nullptr;
  const float* row_max = nullptr;
  const float* log_sum = nullptr;

  D3S_HOST_DEVICE float of_logprob(int64_t row, const Labels& labels) const {
    return g_logprob && labels[row] != kNoTarget ? g_logprob[row] : 0.f;
  }
  D3S_HOST_DEVICE float of_entropy(int64_t row) const { return g_entropy ? g_entropy[row] : 0.f; }
  D3S_HOST_DEVICE RowStatistics statistics(int64_t row) const { return {entropy[row], row_max[row], log_sum[row]}; }

  // Returns whether the row's result or an incoming gradient is NaN. If so, the row's whole gradient is NaN.
  D3S_HOST_DEVICE bool any_nan(int64_t row, const Labels& labels) const {
    const float g_logprob = of_logprob(row, labels), g_entropy = of_entropy(row);
    return log_sum[row] != log_sum[row] || g_logprob != g_logprob || g_entropy != g_entropy;
  }
};

// Tells which row of the logits each packed row has. If there are packed rows, all other values are those of the packed
// rows; only the logits are not packed.
struct PackedRows {
  const int64_t* rows = nullptr;
  int64_t count = 0;  // the number of rows of logits

  // Returns whether the row of a packed row does not exist. Rows on a GPU may be unchecked.
  D3S_HOST_DEVICE bool bad(int64_t packed) const { return rows[packed] < 0 || rows[packed] >= count; }
};

// The memory to which the gradient is written. A gradient with the dtype of the logits may overwrite the logits. A
// half-precision gradient of float32 logits overwrites the front half of each row, or is written to other memory.
struct GradientOutput {
  void* gradient = nullptr;
  FloatType type = FloatType::kFloat32;
  RowLayout layout;
};

// Calls `body` with the Tags of the element types of the logits and of the gradient.
template <class Body>
void dispatch_gradient(FloatType logits, FloatType gradient, const Body& body) {
  dispatch_float(gradient, [&](auto to) {
    if (logits == gradient)
      body(to, to);
    else
      body(Tag<float>(), to);
  });
}

// The state of a row whose logits come tile by tile: four floats.
struct RowState {
  float max, sum, dot;
  float label_logit;  // NaN until the label's tile is merged

  D3S_HOST_DEVICE SoftmaxState get() const { return {max, sum, dot}; }
  D3S_HOST_DEVICE void set(const SoftmaxState& state) { max = state.max, sum = state.sum, dot = state.dot; }

  // Returns the state of a row whose support is one id. The id's logit is not read; 0 is used instead.
  D3S_HOST_DEVICE static RowState of_single(bool is_label) { return {0.f, 1.f, 0.f, is_label ? 0.f : NAN}; }
};

// The states of all rows, [shards][count]: one state for each vocabulary shard and row.
struct RowStates {
  const RowState* states = nullptr;
  int64_t shards = 1;
  int64_t count = 0;  // the number of rows

  // Merges the states of a row in the order of the shards. The label's logit comes from the first shard that has it.
  D3S_HOST_DEVICE RowState merged(int64_t row, float temperature) const {
    RowState all = states[row];
    for (int64_t shard = 1; shard < shards; ++shard) {
      const RowState& next = states[shard * count + row];
      all.set(merge(all.get(), next.get(), 1.f / temperature));
      if (all.label_logit != all.label_logit) all.label_logit = next.label_logit;
    }
    return all;
  }
};

// The memory for the order keys of |A| * H. A back-end whose kMakesKeys is true writes the keys together with the
// entropies. The other back-ends write no keys.
struct KeyOutput {
  Scores scores;
  uint32_t* keys = nullptr;  // one for each row, or null
};
extern const bool kMakesKeys;

// Writes the results of all rows; the results of a row that is masked out are 0.
void row_statistics(const LogitsRows& rows, const RowOutputs& outputs, const KeyOutput& keys, Device& device);

// Writes the gradient of each row, or 0 if the row has no incoming gradient.
void row_gradients(const LogitsRows& rows, const RowGradients& gradients, const GradientOutput& out, Device& device);

// Writes the gradient of each packed row to memory that shares nothing with the logits.
void packed_row_gradients(const LogitsRows& rows, const PackedRows& packed, const RowGradients& gradients,
                          const GradientOutput& out, Device& device);

// Merges a tile into the states of the rows that are not masked out.
void merge_tile(const LogitsRows& rows, RowState* states, Device& device);

// Computes the results of rows from their finished states.
void finish_states(const RowStates& states, const Temperatures& temperatures, const RowOutputs& outputs,
                   Device& device);

}  // namespace d3s
