// The kernels for log-probabilities at given ids of each row, implemented in cpu/ and cuda/. ops/token_logprobs.cpp has
// checked the arguments. Nothing here depends on torch.
//
// The ids of a row that are not given are the row's tail. The given ids and the tail have separate softmax states, so
// that the log-probability of the tail is accurate even if the given ids have nearly all of the probability.
#pragma once

#include "../core/token_gradient.h"
#include "logprob_entropy.h"

namespace d3s {

// The given ids of all rows, [rows][width].
struct TokenIds {
  static constexpr int64_t kFill = -1;  // stands for no id

  const int32_t* ids32 = nullptr;  // one of ids32 and ids64 is set
  const int64_t* ids64 = nullptr;
  int64_t width = 0;

  D3S_HOST_DEVICE int64_t at(int64_t row, int64_t i) const {
    return ids32 ? ids32[row * width + i] : ids64[row * width + i];
  }
  // Returns whether an id comes earlier in its row.
  D3S_HOST_DEVICE bool repeated(int64_t row, int64_t i) const {
    const int64_t id = at(row, i);
    for (int64_t j = 0; j < i; ++j)
      if (at(row, j) == id) return true;
    return false;
  }
};

// The logits at the given ids, [shards][rows][width], in float32. They are NaN in a shard that does not have the id.
struct TakenLogits {
  const float* logits = nullptr;
  int64_t shards = 1, rows = 0, width = 0;

  D3S_HOST_DEVICE float at(int64_t row, int64_t i) const {
    float z = NAN;
    for (int64_t shard = 0; shard < shards && z != z; ++shard) z = logits[(shard * rows + row) * width + i];
    return z;
  }
};

struct TokenOutputs {
  float* logprobs = nullptr;  // [rows][width]; the others have one float for each row
  float* tail_logprob = nullptr;
  float* logprob = nullptr;
  float* entropy = nullptr;
  // The maximum and log S of the tail alone. If the tail has no probability, those of the whole row.
  float* tail_max = nullptr;
  float* tail_log_sum = nullptr;

  // Writes the results of a row, except for `logprobs`.
  D3S_HOST_DEVICE void write(int64_t row, const RowState& tail, const RowStatistics& whole, float temperature) const {
    const bool undefined = whole.log_sum != whole.log_sum, no_tail = tail.sum < 0.5f;
    const float log_sum = no_tail ? -INFINITY : logf(tail.sum);
    tail_logprob[row] = undefined ? NAN : (tail.max - whole.max) / temperature + log_sum - whole.log_sum;
    logprob[row] = log_probability(tail.label_logit, whole, temperature);
    entropy[row] = whole.entropy;
    tail_max[row] = no_tail ? whole.max : tail.max;
    tail_log_sum[row] = undefined ? NAN : no_tail ? whole.log_sum : log_sum;
  }
};

// The values from which the gradients are computed. Each array has one value for each row, except for g_logprobs and
// logprobs, which are [rows][width]. Each incoming gradient may be null.
struct TokenGradients {
  const float* g_logprobs = nullptr;
  const float* g_tail_logprob = nullptr;
  const float* g_logprob = nullptr;
  const float* g_entropy = nullptr;
  const float* logprobs = nullptr;
  const float* tail_logprob = nullptr;
  const float* logprob = nullptr;
  const float* entropy = nullptr;
  const bool* mask = nullptr;
  Labels labels;
  TokenIds ids;
  Temperatures temperatures;

  D3S_HOST_DEVICE bool masked_out(int64_t row) const { return mask && !mask[row]; }
  D3S_HOST_DEVICE float of_id(int64_t row, int64_t i) const {
    return g_logprobs && !masked_out(row) && ids.at(row, i) != TokenIds::kFill ? g_logprobs[row * ids.width + i] : 0.f;
  }
  D3S_HOST_DEVICE float of_label(int64_t row) const {
    return g_logprob && !masked_out(row) && labels[row] != kNoTarget ? g_logprob[row] : 0.f;
  }
  // Returns the gradient of a row. `of_ids` is the sum of the ids' incoming gradients, and `any` says whether one of
  // them is not 0.
  D3S_HOST_DEVICE TokenGradient of(int64_t row, float of_ids, bool any) const {
    const float tail = g_tail_logprob ? g_tail_logprob[row] : 0.f, label = of_label(row),
                entropies = g_entropy ? g_entropy[row] : 0.f;
    if (masked_out(row) || !(any || tail != 0.f || label != 0.f || entropies != 0.f))
      return {0.f, 0.f, 0.f, -INFINITY, 0.f, 1.f};  // without a gradient, all values are 0, even if the row is NaN
    const bool undefined = tail_logprob[row] != tail_logprob[row] || (label != 0.f && logprob[row] != logprob[row]);
    // If the tail has no probability, its log-probability is a constant.
    const float g_tail = tail_logprob[row] == -INFINITY ? 0.f : tail;
    return {undefined ? NAN : of_ids + g_tail + label, g_tail,       entropies,
            undefined ? NAN : tail_logprob[row],       entropy[row], temperatures[row]};
  }
};

// The results from which the gradient of the logits is written: see core/token_gradient.h.
struct TokenGradientOutputs {
  float* tail_grad_logprob = nullptr;
  float* tail_grad_entropy = nullptr;
  float* tail_entropy = nullptr;
  float* values = nullptr;  // [rows][width + 1]: the gradients at the given ids, and at the label

  D3S_HOST_DEVICE void write(int64_t row, const TokenGradient& gradient) const {
    tail_grad_logprob[row] = gradient.tail_grad_logprob();
    tail_grad_entropy[row] = gradient.tail_grad_entropy();
    tail_entropy[row] = gradient.tail_entropy();
  }
};

// Merges the columns of a tile that are not among the row's given ids into the row's state, and writes the logits of
// the given ids that are in the tile to `taken`. Rows that are masked out are not read or written.
void merge_tail(const LogitsRows& rows, const TokenIds& ids, RowState* states, float* taken, Device& device);

// Computes the results of rows from the states of their tails and the logits of their given ids.
void finish_tokens(const RowStates& tails, const TakenLogits& taken, const TokenIds& ids,
                   const Temperatures& temperatures, const TokenOutputs& outputs, Device& device);

void token_gradients(const TokenGradients& given, int64_t rows, const TokenGradientOutputs& outputs, Device& device);

// Writes the values at the given ids and labels of a tile to the gradient of the tile. `rows` has the places of the
// gradient in place of logits.
void put_token_gradients(const LogitsRows& rows, const TokenIds& ids, const float* values, void* gradient,
                         Device& device);

}  // namespace d3s
