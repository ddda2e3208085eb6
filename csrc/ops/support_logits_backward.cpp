// Checks the arguments of support_logits_backward and allocates its results.
#include "support_logits_backward.h"

#include "softcap_argument.h"
#include "support_argument.h"

namespace d3s {
namespace {

using FourTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;

FourTensors support_logits_backward(const GradientArguments& given, int64_t support_of, const SupportArgument& support,
                                    const TemperatureArgument& temperature, const SoftcapArgument& softcap,
                                    const OptionalTensor& mask, const Tile& tile) {
  const Tensor& logits = given.logits;
  const SupportRowsArgument argument(logits, given.labels, support, temperature, mask, tile, support_of);
  const float cap = softcap.checked();
  const CheckedGradients gradients(given, argument.dims());
  const int64_t places = logits.size(1);
  const Tensor grad = empty({places}, ScalarType::Float, logits), rows = empty({places}, ScalarType::Int, logits),
               tokens = empty({places}, ScalarType::Int, logits),
               undefined = empty({argument.rows.layout.count}, ScalarType::Bool, logits);
  TorchDevice device(logits);
  support_gradients(argument.rows, gradients.rows, cap,
                    {mutable_data<float>(grad), mutable_data<int32_t>(rows), mutable_data<int32_t>(tokens),
                     mutable_data<bool>(undefined)},
                    device);
  return {grad, rows, tokens, undefined};
}

}  // namespace

// Returns three lists of the same length as the list of support logits: the gradient of each logit, its row (-1 if it
// has no gradient), and its id.
D3S_REGISTER(
    "support_logits_backward(Tensor? grad_logprob, Tensor? grad_entropy, Tensor logits, Tensor? labels, "
    "Tensor entropy, Tensor row_max, Tensor log_sum, SymInt support_of, Tensor support_ids, Tensor support_offsets, "
    "bool include_label=False, float temperature=1.0, Tensor? temperature_tensor=None, float? logit_softcap=None, "
    "Tensor? mask=None, SymInt? first_token=None) "
    "-> (Tensor grad, Tensor rows, Tensor tokens, Tensor undefined)",
    support_logits_backward)

}  // namespace d3s
