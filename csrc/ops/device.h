// The device that an op runs on. The class does not depend on torch, since the .cu files use this class.
#pragma once

#include <cstdint>

#include "../core/macros.h"
#include "faults.h"

namespace d3s {

class Device {
 public:
  virtual ~Device() = default;
  // Allocates memory on the device. On a CPU, the memory stays valid until the op returns. On a GPU, it stays valid
  // until the kernels that the op launched have run.
  virtual void* scratch(int64_t bytes) = 0;

  template <class T>
  T* scratch_of(int64_t count) {
    return static_cast<T*>(scratch(count * static_cast<int64_t>(sizeof(T))));
  }

  int index = 0;
  void* stream = nullptr;  // a GPU's current stream
  Faults faults;           // where the kernels of the op record invalid values
};

}  // namespace d3s
