// Checks the arguments of compact and allocates its results.
#include "compact.h"

#include "../torch_abi.h"

namespace d3s {
namespace {

std::tuple<Tensor, Tensor> compact(const Tensor& mask, int64_t capacity) {
  require(mask.scalar_type() == ScalarType::Bool, "mask", "got dtype ", dtype(mask), "; takes bool");
  require(capacity >= 0, "capacity", "got ", capacity, "; takes at least 0");
  const Tensor source = packed(mask);
  const Tensor indices = empty({capacity}, ScalarType::Long, mask), count = empty({1}, ScalarType::Long, mask);
  TorchDevice device(mask);
  compact_indices(data<uint8_t>(source), source.numel(), mutable_data<int64_t>(indices), capacity,
                  mutable_data<int64_t>(count), device);
  return {indices, count};
}

}  // namespace

D3S_REGISTER("compact(Tensor mask, SymInt capacity) -> (Tensor indices, Tensor count)", compact)

}  // namespace d3s
