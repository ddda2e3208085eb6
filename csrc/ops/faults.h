// Reports invalid values of tensors on a GPU, since checking these values before the op would cause a host sync. A
// kernel that reads an invalid value writes NaN or selects nothing, and sets a byte in host memory. Before the next op,
// d3s_kernels/_dispatch/faults.py reads these bytes, and warns if a byte is set. Nothing here depends on torch.
#pragma once

#include "../core/macros.h"

namespace d3s {

// d3s_kernels/_dispatch/faults.py has the message of each fault, in the same order.
enum class Fault { kRatio, kKeep, kOffsets, kGroups, kLabels, kTemperature, kSupports, kDenseRows, kTokenIds };
constexpr int kFaultKinds = static_cast<int>(Fault::kTokenIds) + 1;

// The public ops whose kernels report faults. d3s_kernels/_dispatch/faults.py has the names, in the same order.
enum class PublicOp {
  kEntropy,
  kLogprobEntropy,
  kLinearLogprobEntropy,
  kTokenLogprobs,
  kTopkLogprobs,
  kTopkMask,
  kSelectTokens,
  kSelectTokensFromLogits,
  kMaxVarianceSelect,
  kGroupAdvantages,
  kImportanceRatio,
  kEntropyGroups,
  kAdaptiveClip
};
constexpr int kPublicOps = static_cast<int>(PublicOp::kAdaptiveClip) + 1;

// The bytes in which kernels note the faults of one op, one byte for each Fault. On a CPU, `of_op` is null, since
// values are checked before the kernels run.
struct Faults {
  unsigned char* of_op = nullptr;

  D3S_HOST_DEVICE void note(Fault fault) const {
    if (of_op) of_op[static_cast<int>(fault)] = 1;
  }
};

// Returns the bytes of an op. All GPUs of the process can write to these bytes, which are in host memory
// (cuda/faults.cu).
Faults faults_of(PublicOp op);

}  // namespace d3s
