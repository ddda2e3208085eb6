// Checks the arguments of kept_logits_backward and allocates its results.
#include "kept_logits_backward.h"

#include "arguments.h"

namespace d3s {
namespace {

using FourTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;

FourTensors kept_logits_backward(const GradientArguments& given, int64_t kept_of,
                                 const TemperatureArgument& temperature, const SoftcapArgument& softcap,
                                 const OptionalTensor& mask, const Tile& tile, const SamplingMask& sampling_mask) {
  const Tensor& logits = given.logits;
  LogitsArgument argument(logits, temperature);
  argument.set_kept_alone(sampling_mask, kept_of);
  argument.set_tile(tile);
  const float cap = softcap.checked();
  argument.set_labels(given.labels);
  argument.set_mask(mask);
  argument.set_spans(sampling_mask);
  const CheckedGradients gradients(given, argument.dims);
  const int64_t places = logits.size(1);
  const Tensor grad = empty({places}, ScalarType::Float, logits), rows = empty({places}, ScalarType::Int, logits),
               tokens = empty({places}, ScalarType::Int, logits),
               undefined = empty({argument.rows.layout.count}, ScalarType::Bool, logits);
  TorchDevice device(logits);
  kept_gradients(argument.rows, gradients.rows, cap,
                 {mutable_data<float>(grad), mutable_data<int32_t>(rows), mutable_data<int32_t>(tokens),
                  mutable_data<bool>(undefined)},
                 device);
  return {grad, rows, tokens, undefined};
}

}  // namespace

D3S_REGISTER("kept_logits_backward", kept_logits_backward)

}  // namespace d3s
