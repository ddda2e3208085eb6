// What this build contains, for d3s_kernels.build_info(). It is no op, so it uses pybind11 instead of torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "cpu/simd_level.h"

namespace py = pybind11;

PYBIND11_MODULE(_build_info, m) {
  m.doc() = "What this build of d3s_kernels holds and what runs here.";
  m.def("build_info", [] {
    py::dict info;
    info["version"] = D3S_VERSION;
    info["compiler"] = D3S_COMPILER;
    info["torch_target"] = D3S_TORCH_TARGET;
    info["torch_built_against"] = D3S_TORCH_BUILT_AGAINST;
#if defined(D3S_X86_LEVELS)
    info["simd_levels"] = std::vector<std::string>{"baseline", "avx2", "avx512", "avx512_bf16"};
#else
    info["simd_levels"] = std::vector<std::string>{"baseline"};
#endif
    info["simd"] = d3s::simd_level_name(d3s::simd_level());
    const std::string cuda = D3S_CUDA_VERSION;
    info["cuda"] = cuda.empty() ? py::object(py::none()) : py::object(py::str(cuda));
    info["cuda_architectures"] = D3S_CUDA_ARCHITECTURES;
    return info;
  });
}
