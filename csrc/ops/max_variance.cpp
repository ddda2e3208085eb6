// Checks the arguments of max_variance_select and allocates its result.
#include "rollouts.h"
#include "selection_arguments.h"

namespace d3s {

namespace {

Tensor max_variance_select(const Tensor& values, const KeepArgument& keep, const OptionalTensor& mask,
                           const SegmentsArgument& where) {
  require_float("values", values);
  Keep number = keep_of("keep", keep, values);
  const PooledSegments segments(values, where, "values");
  SegmentedValues segmented;
  segmented.segments = segments.selected;
  segmented.total = values.numel();
  segmented.longest = segments.longest;
  number.times = segments.together;
  require(segmented.total < int64_t{1} << 32, "values", "got ", segmented.total, " of them; takes fewer than 2^32");
  const OptionalTensor usable = require_mask("mask", mask, values, values.dim());
  const Tensor source = packed(values);
  const Tensor out = empty(leading_sizes(values, values.dim()), ScalarType::Bool, values);
  segmented.values = source.const_data_ptr();
  segmented.type = float_type(source);
  segmented.mask = data<bool>(usable);
  TorchDevice device(values, PublicOp::kMaxVarianceSelect);
  max_variance_mask(segmented, number, mutable_data<bool>(out), device);
  return out;
}

}  // namespace

D3S_REGISTER(
    "max_variance_select(Tensor values, SymInt? keep=None, Tensor? keep_tensor=None, Tensor? mask=None, "
    "Tensor? offsets=None, SymInt? max_segment=None, bool pooled=False) -> Tensor",
    max_variance_select)

}  // namespace d3s
