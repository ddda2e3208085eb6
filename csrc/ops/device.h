// The device that an op runs on, without torch: .cu files know no more of torch's device than this.
#pragma once

#include <cstdint>

#include "../core/macros.h"
#include "faults.h"

namespace d3s {

class Device {
 public:
  virtual ~Device() = default;
  // Memory on the device that lives until the op returns; on a GPU, until the kernels that the op launched have run.
  virtual void* scratch(int64_t bytes) = 0;

  template <class T>
  T* scratch_of(int64_t count) {
    return static_cast<T*>(scratch(count * static_cast<int64_t>(sizeof(T))));
  }

  int index = 0;
  void* stream = nullptr;  // a GPU's current stream
  Faults faults;           // where the kernels of the op note what they meet
};

}  // namespace d3s
