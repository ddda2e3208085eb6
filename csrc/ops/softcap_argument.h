// The soft cap of an LM head's logits, as an argument of a schema.
#pragma once

#include "../torch_abi.h"

namespace d3s {

struct SoftcapArgument {
  OptionalFloat number;

  // Returns the soft cap, or 0 if there is none.
  float checked() const {
    require(!number || *number > 0, "logit_softcap", "takes a number above 0");
    return static_cast<float>(number.value_or(0));
  }
};

template <>
struct Parameter<SoftcapArgument> : Together<SoftcapArgument, OptionalFloat> {};

}  // namespace d3s
