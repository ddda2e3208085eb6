// Arguments that several ops take, checked and brought into the form that the back-ends take.
#pragma once

#include "../torch_abi.h"
#include "logprob_entropy.h"
#include "rollouts.h"
#include "topk_mask.h"

namespace d3s {

// The rows of logits with all that belongs to them, and the tensors that what it points at lives in.
class LogitsArgument {
 public:
  LogitsArgument(const Tensor& logits, double temperature, const OptionalTensor& temperature_tensor);

  void set_labels(const OptionalTensor& labels, int64_t vocabulary);
  void set_mask(const OptionalTensor& mask);

  int64_t dims;  // that the rows have
  LogitsRows rows;

 private:
  const Tensor& logits_;
  OptionalTensor temperatures_, labels_, mask_;
};

// For states, which have no logits any more.
Temperatures temperatures_of(double temperature, const OptionalTensor& tensor, const Tensor& like, int64_t row_dims,
                             OptionalTensor& owner);

// A number of values to keep, at least 1. A 0-d tensor on the device is read there, and here only to be checked.
Keep keep_of(const char* argument, const OptionalInt& keep, const OptionalTensor& keep_tensor, const Tensor& like);

// The same, or a ratio in its place.
Quota quota_of(const OptionalFloat& ratio, const OptionalTensor& ratio_tensor, const OptionalInt& k,
               const OptionalTensor& k_tensor, const Tensor& like);

// Which of its three shapes the advantages have. Where [S] with offsets is both, it is one for each token.
Scores::Advantages kind_of(const Tensor& advantages, const Tensor& entropy, const Segments& sequences);

}  // namespace d3s
