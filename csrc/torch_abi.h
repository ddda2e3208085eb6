// The only header that uses torch. It uses only torch's stable ABI (TORCH_TARGET_VERSION in CMakeLists.txt), so that a
// library built against one torch release runs on every later release.
#pragma once

#if defined(D3S_CUDA) && !defined(D3S_EMULATED)
#define D3S_ON_GPU  // not defined in tests that emulate the CUDA kernels on the CPU
#endif

#if defined(D3S_ON_GPU)
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#endif
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/float_bits.h"
#include "core/rows.h"
#include "core/segments.h"
#include "ops/device.h"

#if !defined(STABLE_TORCH_ERROR_CODE_CHECK)  // torch 2.11 has it under another name
#define STABLE_TORCH_ERROR_CODE_CHECK(call) TORCH_ERROR_CODE_CHECK(call)
#endif

namespace d3s {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalInt = std::optional<int64_t>;
using OptionalFloat = std::optional<double>;

// ---- refusing bad arguments ------------------------------------------------------------------------------------
// In Python, std::invalid_argument becomes a ValueError (d3s_kernels/_dispatch/ops.py). A message names the argument,
// what was passed, and what the argument takes.

template <class... Parts>
void require(bool good, const char* argument, const Parts&... parts) {
  if (good) return;
  std::ostringstream message;
  message << argument << ": ";
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

// shape(tensor) and dtype(tensor) print a tensor's shape or dtype. The text is made only if a message is needed.
struct shape {
  const Tensor& tensor;
  explicit shape(const Tensor& t) : tensor(t) {}
};

inline std::string shape_text(const std::vector<int64_t>& sizes) {
  std::string text;
  for (const int64_t size : sizes) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return '[' + text + ']';
}

inline std::ostream& operator<<(std::ostream& out, const shape& s) {
  const auto sizes = s.tensor.sizes();
  return out << shape_text({sizes.data(), sizes.data() + s.tensor.dim()});
}

// The name of a dtype as Python prints it: torch.float64, not Double.
inline const char* dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::Bool:
      return "torch.bool";
    case ScalarType::Byte:
      return "torch.uint8";
    case ScalarType::Char:
      return "torch.int8";
    case ScalarType::Short:
      return "torch.int16";
    case ScalarType::Int:
      return "torch.int32";
    case ScalarType::Long:
      return "torch.int64";
    case ScalarType::Half:
      return "torch.float16";
    case ScalarType::BFloat16:
      return "torch.bfloat16";
    case ScalarType::Float:
      return "torch.float32";
    case ScalarType::Double:
      return "torch.float64";
    case ScalarType::ComplexFloat:
      return "torch.complex64";
    case ScalarType::ComplexDouble:
      return "torch.complex128";
    default:
      return torch::headeronly::toString(type);
  }
}

struct dtype {
  const Tensor& tensor;
  explicit dtype(const Tensor& t) : tensor(t) {}
};

inline std::ostream& operator<<(std::ostream& out, const dtype& d) { return out << dtype_name(d.tensor.scalar_type()); }

inline bool same_shape(const Tensor& a, const Tensor& b, int64_t dims) {
  if (a.dim() < dims || b.dim() < dims) return false;
  for (int64_t i = 0; i < dims; ++i)
    if (a.size(i) != b.size(i)) return false;
  return true;
}

inline void require_same_device(const char* argument, const Tensor& tensor, const Tensor& other) {
  const auto device = tensor.device(), wanted = other.device();
  require(device == wanted, argument, "is on another device than the other tensors; takes one on the same device");
}

inline bool is_float(ScalarType type) {
  return type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half;
}
inline void require_float(const char* argument, const Tensor& tensor) {
  require(is_float(tensor.scalar_type()), argument, "got dtype ", dtype(tensor),
          "; takes float32, bfloat16 or float16");
}

inline FloatType float_type(ScalarType type) {
  switch (type) {
    case ScalarType::BFloat16:
      return FloatType::kBfloat16;
    case ScalarType::Half:
      return FloatType::kFloat16;
    case ScalarType::Double:
      return FloatType::kFloat64;
    default:
      return FloatType::kFloat32;
  }
}
inline FloatType float_type(const Tensor& tensor) { return float_type(tensor.scalar_type()); }

inline Tensor packed(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

// Requires one value for each row of `like`: the shape of `tensor` must be the first `dims` dimensions of `like`.
// Returns `tensor`, made contiguous.
inline Tensor require_per_row(const char* argument, const Tensor& tensor, const Tensor& like, int64_t dims) {
  require(tensor.dim() == dims && same_shape(tensor, like, dims), argument, "got shape ", shape(tensor),
          "; takes one value for each row, of a tensor of shape ", shape(like));
  require_same_device(argument, tensor, like);
  return packed(tensor);
}

inline OptionalTensor require_mask(const char* argument, const OptionalTensor& mask, const Tensor& like, int64_t dims) {
  if (!mask) return mask;
  require(mask->scalar_type() == ScalarType::Bool, argument, "got dtype ", dtype(*mask), "; takes bool");
  return require_per_row(argument, *mask, like, dims);
}

// ---- new tensors -----------------------------------------------------------------------------------------------

inline Tensor empty(const std::vector<int64_t>& sizes, ScalarType type, const Tensor& like) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= sizes[i] > 0 ? sizes[i] : 1;
  }
  int32_t device_type;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  AtenTensorHandle handle;
  // torch::stable::empty goes through the dispatcher, which costs ten times as much as this call.
  const auto error = aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                                              static_cast<int32_t>(torch::stable::detail::from(type)), device_type,
                                              like.get_device_index(), &handle);
  if (error != TORCH_SUCCESS)  // _dispatch/ops.py raises torch.OutOfMemoryError, as torch does on a GPU
    throw std::runtime_error("d3s_kernels: out of memory: cannot allocate " + shape_text(sizes) + " of " +
                             dtype_name(type) + " on " +
                             (like.is_cuda() ? "cuda:" + std::to_string(like.get_device_index()) : "the CPU"));
  return Tensor(handle);
}

inline std::vector<int64_t> leading_sizes(const Tensor& tensor, int64_t dims) {
  const auto sizes = tensor.sizes();
  return std::vector<int64_t>(sizes.data(), sizes.data() + dims);
}

// ---- the device ------------------------------------------------------------------------------------------------

// If the values of the tensor must be checked, returns the tensor on the host; otherwise, returns nothing. Values on a
// GPU are checked only if D3S_KERNELS_CHECK=1 is set, since reading them causes a host sync.
inline OptionalTensor on_host(const Tensor& tensor) {
  constexpr auto kCpu = torch::headeronly::DeviceType::CPU;
  const bool here = tensor.device().type() == kCpu;
#if !defined(D3S_EMULATED)  // in emulation tests, CPU tensors stand for GPU tensors
  if (here) return tensor;
#endif
  const char* setting = std::getenv("D3S_KERNELS_CHECK");
  if (!setting || std::string(setting) != "1") return std::nullopt;
  return here ? tensor : torch::stable::to(tensor, torch::stable::Device(kCpu));
}

// While this object lives, ops on this thread check their arguments, and end before they compute anything.
class OnlyChecked {
 public:
  struct Done {};

  OnlyChecked() { active() = true; }
  ~OnlyChecked() { active() = false; }
  static bool& active() {
    static thread_local bool is_active = false;
    return is_active;
  }
};

// Makes the device of `like` the current device while this object lives. An op creates this object after it has checked
// all arguments.
class TorchDevice : public Device {
 public:
  // If `op` is set, the kernels report invalid values as faults of `op`.
  explicit TorchDevice(const Tensor& like, [[maybe_unused]] std::optional<PublicOp> op = std::nullopt) : like_(like) {
    if (OnlyChecked::active()) throw OnlyChecked::Done();
#if defined(D3S_ON_GPU)
    index = like.get_device_index();
    guard_.emplace(index);
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index, &stream));
#endif
#if defined(D3S_CUDA)
    if (op) faults = faults_of(*op);  // the first call may create a CUDA context, so the right device must be current
#endif
  }

  // The memory comes from torch's allocator. After the op has returned, only later work on the same stream can reuse
  // this memory.
  void* scratch(int64_t bytes) override {
    rooms_.push_back(empty({bytes > 0 ? bytes : 1}, ScalarType::Byte, like_));
    return rooms_.back().mutable_data_ptr();
  }

 private:
  const Tensor& like_;
  std::vector<Tensor> rooms_;
#if defined(D3S_ON_GPU)
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
#endif
};

// ---- looking at tensors ----------------------------------------------------------------------------------------

template <class T>
const T* data(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

template <class T>
const T* data(const OptionalTensor& tensor) {
  return tensor ? data<T>(*tensor) : nullptr;
}

template <class T>
T* mutable_data(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

// Returns the layout of the rows along the last dimension. The other dimensions may have any strides.
inline RowLayout rows_of(const char* argument, const Tensor& tensor) {
  const int64_t dims = tensor.dim();
  require(dims >= 1, argument, "got a 0-d tensor; takes [..., V]");
  RowLayout rows;
  rows.columns = tensor.size(dims - 1);
  require(rows.columns <= 1 || tensor.stride(dims - 1) == 1, argument, "the last dimension has stride ",
          tensor.stride(dims - 1), "; takes stride 1 (any stride in the others), call .contiguous()");
  for (int64_t i = 0; i < dims - 1; ++i) {
    const int64_t size = tensor.size(i), stride = tensor.stride(i);
    rows.count *= size;
    if (size == 1) continue;
    if (rows.dims > 0 && rows.strides[rows.dims - 1] == size * stride) {  // merge the two dimensions
      rows.sizes[rows.dims - 1] *= size;
      rows.strides[rows.dims - 1] = stride;
    } else {
      require(rows.dims < RowLayout::kMaxDims, argument, "its strides take more than ", int{RowLayout::kMaxDims},
              " dimensions to describe; call .contiguous()");
      rows.sizes[rows.dims] = size;
      rows.strides[rows.dims++] = stride;
    }
  }
  return rows;
}

template <class Offset>
void require_offsets(const Offset* offsets, const Segments& segments, const char* argument) {
  require(offsets[0] == 0, "offsets", "starts at ", offsets[0], "; must start at 0");
  for (int64_t i = 0; i < segments.count; ++i)
    require(offsets[i] <= offsets[i + 1], "offsets", "decreases from ", offsets[i], " to ", offsets[i + 1], " at ",
            i + 1, "; must not decrease");
  require(offsets[segments.count] == segments.limit, "offsets", "ends at ", offsets[segments.count],
          "; must end at the length of ", argument, ", ", segments.limit);
}

// Returns the segments of `values`. Without `offsets`, the segments are the rows along the last dimension. With
// `offsets`, they are the parts of a 1-D tensor between the offsets.
inline Segments segments_of(const Tensor& values, const OptionalTensor& offsets, const char* argument) {
  require(values.dim() >= 1, argument, "got a 0-d tensor; takes [..., n]");
  Segments segments;
  if (!offsets) {
    segments.length = values.size(values.dim() - 1);
    segments.count = 1;
    for (int64_t i = 0; i < values.dim() - 1; ++i) segments.count *= values.size(i);
    return segments;
  }
  require(values.dim() == 1, argument, "got shape ", shape(values), " with offsets; takes a 1-D tensor with offsets");
  const auto type = offsets->scalar_type();
  require(type == ScalarType::Int || type == ScalarType::Long, "offsets", "got dtype ", dtype(*offsets),
          "; takes int32 or int64");
  require(offsets->dim() == 1 && offsets->size(0) >= 1 && offsets->is_contiguous(), "offsets", "got shape ",
          shape(*offsets), "; takes a contiguous 1-D tensor of segments + 1");
  require_same_device("offsets", *offsets, values);
  segments.count = offsets->size(0) - 1;
  if (type == ScalarType::Int)
    segments.offsets32 = data<int32_t>(*offsets);
  else
    segments.offsets64 = data<int64_t>(*offsets);
  segments.limit = values.size(0);
  if (const OptionalTensor known = on_host(*offsets)) {
    if (type == ScalarType::Int)
      require_offsets(data<int32_t>(*known), segments, argument);
    else
      require_offsets(data<int64_t>(*known), segments, argument);
  }
  return segments;
}

// Returns one segment that contains all of `values`.
inline Segments pool(const Tensor& values) {
  Segments all;
  all.count = 1;
  all.length = values.numel();
  return all;
}

// ---- running in parallel ---------------------------------------------------------------------------------------

// Calls body(begin, end) on torch's threads, for pieces of [0, n). Each piece has about `grain` elements or more. If n
// is at most `grain`, calls body(0, n) once, on this thread.
template <class Body>
void parallel_for(int64_t n, int64_t grain, const Body& body) {
  if (n <= 0) return;
  if (n <= grain)
    body(int64_t{0}, n);
  else
    torch::stable::parallel_for(0, n, grain, body);
}

// Calls body(first, last) in parallel, for ranges of segments that together cover all segments. The values are divided
// evenly among the threads, about `grain` values or more for each thread. A segment is assigned to the thread whose
// range contains the segment's start.
template <class Body>
void parallel_segments(const Segments& segments, int64_t values, int64_t grain, const Body& body) {
  const auto share = [&](int64_t begin, int64_t end) {
    const int64_t first = begin > 0 ? segments.first_from(begin) : 0;
    const int64_t last = end < values ? segments.first_from(end) : segments.count;
    if (first < last) body(first, last);
  };
  if (values > 0)
    parallel_for(values, grain, share);
  else
    share(0, 0);  // empty segments have results too
}

}  // namespace d3s

// ---- the kernel of an op ---------------------------------------------------------------------------------------
// A kernel's parameter is one argument of the op's schema, or a struct of several neighbouring arguments.

namespace d3s {

template <class T>
struct Parameter {
  static constexpr uint64_t kArguments = 1;
  static T take(StableIValue*& argument) { return torch::stable::detail::to<T>(*argument++); }
};

template <class T, class... Fields>
struct Together {
  static constexpr uint64_t kArguments = sizeof...(Fields);
  static T take(StableIValue*& argument) { return T{Parameter<Fields>::take(argument)...}; }
};

template <auto kernel>
struct Boxed;

template <class Result, class... Parameters, Result (*kernel)(Parameters...)>
struct Boxed<kernel> {
  static void call(StableIValue* stack, uint64_t arguments, uint64_t) {
    const auto parameters = taken(stack, arguments);
    if constexpr (std::is_void_v<Result>)
      std::apply(kernel, parameters);
    else
      put(stack, std::apply(kernel, parameters));
  }

  static void check(StableIValue* stack, uint64_t arguments, uint64_t) {
    const auto parameters = taken(stack, arguments);
    const OnlyChecked scope;
    try {
      std::apply(kernel, parameters);
    } catch (const OnlyChecked::Done&) {
    }
  }

 private:
  template <class T>
  using Value = std::remove_cv_t<std::remove_reference_t<T>>;

  static std::tuple<Value<Parameters>...> taken(StableIValue* stack, uint64_t arguments) {
    constexpr uint64_t kArguments = (Parameter<Value<Parameters>>::kArguments + ... + 0);
    if (arguments != kArguments)
      throw std::logic_error("d3s_kernels: an op's schema has " + std::to_string(arguments) +
                             " arguments, and its kernel takes " + std::to_string(kArguments));
    return {Parameter<Value<Parameters>>::take(stack)...};  // braces guarantee evaluation from left to right
  }

  template <class T>
  static void put(StableIValue* stack, const T& result) {
    *stack = torch::stable::detail::from(result);
  }
  template <class... Ts>
  static void put(StableIValue* stack, const std::tuple<Ts...>& results) {
    torch::stable::detail::box_from_tuple<Ts...>(stack, results);
  }
};

// Returns the name of the op. It is not inlined, so that a library contains its schemas as whole texts: a test of the
// CUDA library, which loads only where torch has CUDA, looks for them.
[[gnu::noinline]] inline std::string name_in(const char* schema) {
  return std::string(schema, std::strchr(schema, '('));
}

inline std::string without_results(const std::string& schema) { return schema.substr(0, schema.find("->")) + "-> ()"; }

}  // namespace d3s

// In a schema, numbers that trainers change from step to step are a SymInt (capacity, max_segment) or a tensor
// (ratio_tensor, temperature_tensor), because torch.compile must not compile again for each new value. k and keep can
// be passed as a SymInt or as a tensor. Some neighbouring arguments of a schema are one argument of its kernel: a
// struct in C++ (ops/*_argument*.h), an object in Python (d3s_kernels/_arguments/bundles.py). For example, `k` and
// `k_tensor` become one such argument, and so do the ids and the offsets of supports.
//
// D3S_REGISTER(schema, kernel) registers the kernel of an op for the dispatch key of this library. The CPU library,
// which every process loads first, also declares the op. And it declares the op in d3s_checks, where the op only checks
// its arguments: kernels that are written in Python call it first, so that a wrong argument gives the same message on
// every back-end.
#if defined(D3S_CUDA)
#define D3S_DECLARE_OP(schema, kernel)
#else
#define D3S_DECLARE_OP(schema, kernel)                                                                      \
  STABLE_TORCH_LIBRARY_FRAGMENT(d3s_kernels, library) { library.def(schema); }                              \
  STABLE_TORCH_LIBRARY_FRAGMENT(d3s_checks, library) { library.def(d3s::without_results(schema).c_str()); } \
  STABLE_TORCH_LIBRARY_IMPL(d3s_checks, CompositeExplicitAutograd, library) {                               \
    library.impl(d3s::name_in(schema).c_str(), d3s::Boxed<&kernel>::check);                                 \
  }
#endif
#if defined(D3S_ON_GPU)
#define D3S_DISPATCH_KEY CUDA
#else
#define D3S_DISPATCH_KEY CPU
#endif
#define D3S_REGISTER(schema, kernel)                                       \
  D3S_DECLARE_OP(schema, kernel)                                           \
  STABLE_TORCH_LIBRARY_IMPL(d3s_kernels, D3S_DISPATCH_KEY, library) {      \
    library.impl(d3s::name_in(schema).c_str(), d3s::Boxed<&kernel>::call); \
  }
