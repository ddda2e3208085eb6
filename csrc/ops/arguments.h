// The arguments of a schema that belong together, for ops of any subject.
#pragma once

#include "../torch_abi.h"

namespace d3s {

// A number that is passed in either as `number` or as the 0-d tensor `tensor`.
template <class Number>
struct NumberOrTensor {
  std::optional<Number> number;
  OptionalTensor tensor;
};
using RatioArgument = NumberOrTensor<double>;
using KeepArgument = NumberOrTensor<int64_t>;

template <class Number>
struct Parameter<NumberOrTensor<Number>> : Together<NumberOrTensor<Number>, std::optional<Number>, OptionalTensor> {};

}  // namespace d3s
