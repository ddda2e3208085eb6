// Arguments that several ops take, checked and brought into the form that the back-ends take.
#pragma once

#include "../torch_abi.h"
#include "logprob_entropy.h"
#include "rollouts.h"
#include "topk_mask.h"

namespace d3s {

// A sampling mask as the ops take it.
struct SamplingMask {
  const OptionalTensor &ids, &offsets;  // both or none
  bool include_label;
  const OptionalInt& max_dense_rows;
};

// The rows of logits with all that belongs to them. Owns the tensors that `rows` points into.
class LogitsArgument {
 public:
  LogitsArgument(const Tensor& logits, double temperature, const OptionalTensor& temperature_tensor);

  void set_labels(const OptionalTensor& labels, int64_t vocabulary);
  void set_mask(const OptionalTensor& mask);
  // After labels and mask. The spans' tokens are of a vocabulary of this size, which is INT64_MAX for a tile.
  void set_spans(const SamplingMask& sampling_mask, int64_t vocabulary);
  // Before all others. The logits are those of the kept tokens alone, of so many tokens.
  void set_kept_alone(const SamplingMask& sampling_mask, int64_t tokens);

  int64_t dims;  // leading dimensions of the logits, which the rows have
  LogitsRows rows;

 private:
  const Tensor& logits_;
  OptionalTensor temperatures_, labels_, mask_, offsets_, tokens_;
};

// What the gradient of the rows is made from. Owns the tensors that `rows` points into.
class GradientsArgument {
 public:
  GradientsArgument(const OptionalTensor& grad_logprob, const OptionalTensor& grad_entropy, const Tensor& entropy,
                    const Tensor& row_max, const Tensor& log_sum, const Tensor& logits, int64_t dims) {
    const auto checked = [&](const char* argument, const Tensor& tensor) {
      require(tensor.scalar_type() == ScalarType::Float, argument, "got dtype ", dtype(tensor), "; takes float32");
      owners_.push_back(require_per_row(argument, tensor, logits, dims));
      return data<float>(owners_.back());
    };
    if (grad_logprob) rows.g_logprob = checked("grad_logprob", *grad_logprob);
    if (grad_entropy) rows.g_entropy = checked("grad_entropy", *grad_entropy);
    rows.entropy = checked("entropy", entropy);
    rows.row_max = checked("row_max", row_max);
    rows.log_sum = checked("log_sum", log_sum);
  }

  RowGradients rows;

 private:
  std::vector<Tensor> owners_;
};

inline void require_token(const char* argument, int64_t token) {
  require(token >= 0, argument, "got ", token, "; takes at least 0");
}

// Checks temperatures and keeps their tensor alive in `owner`. Softmax states, which have no logits, need only these.
Temperatures temperatures_of(double temperature, const OptionalTensor& tensor, const Tensor& like, int64_t row_dims,
                             OptionalTensor& owner);

// A number of values to keep, at least 1. Kernels read a 0-d tensor on the device; the host reads it only to check it.
Keep keep_of(const char* argument, const OptionalInt& keep, const OptionalTensor& keep_tensor, const Tensor& like);

// The same, or a ratio instead.
Quota quota_of(const OptionalFloat& ratio, const OptionalTensor& ratio_tensor, const OptionalInt& k,
               const OptionalTensor& k_tensor, const Tensor& like);

// Whether there is one advantage, one for each sequence or one for each token. If a shape fits both, it is per token.
Scores::Advantages kind_of(const Tensor& advantages, const Tensor& entropy, const Segments& sequences);

}  // namespace d3s
