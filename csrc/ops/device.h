// What a kernel is given of the device it runs on, free of torch: .cu files see this and nothing else.
#pragma once

#include <cstdint>

#include "../core/macros.h"

namespace d3s {

class Device {
 public:
  virtual ~Device() = default;
  // Memory on the device that lives until the op returns; on a GPU, until what the op launched has run.
  virtual void* scratch(int64_t bytes) = 0;

  template <class T>
  T* scratch_of(int64_t count) {
    return static_cast<T*>(scratch(count * static_cast<int64_t>(sizeof(T))));
  }

  int index = 0;
  void* stream = nullptr;  // the current one; a GPU's
};

}  // namespace d3s
