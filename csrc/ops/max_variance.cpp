// Checks the arguments of max_variance_select and allocates its result.
#include "arguments.h"

namespace d3s {

Keep keep_of(const char* argument, const KeepArgument& keep, const Tensor& like) {
  require(keep.number.has_value() != keep.tensor.has_value(), argument, "takes one number or one 0-d tensor");
  const auto require_some = [&](int64_t k) { require(k >= 1, argument, "got ", k, "; takes at least 1"); };
  Keep number;
  if (keep.number) {
    require_some(*keep.number);
    number.number = *keep.number;
    return number;
  }
  const Tensor& given = *keep.tensor;
  const bool wide = given.scalar_type() == ScalarType::Long;
  require(given.numel() == 1 && (wide || given.scalar_type() == ScalarType::Int), argument, "got shape ", shape(given),
          " of ", dtype(given), "; takes a number or a 0-d int64 or int32 tensor");
  require_same_device(argument, given, like);
  if (wide)
    number.on_device64 = data<int64_t>(given);
  else
    number.on_device32 = data<int32_t>(given);
  if (const OptionalTensor known = on_host(given)) require_some(wide ? *data<int64_t>(*known) : *data<int32_t>(*known));
  return number;
}

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

D3S_REGISTER("max_variance_select", max_variance_select)

}  // namespace d3s
