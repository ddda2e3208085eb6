#include "build_facts.h"

#include "cpu/simd_level.h"

namespace d3s {

namespace {

// Returns the value in quotes. Nothing is escaped, since the values are only versions, and names of compilers, SIMD
// levels and architectures.
std::string text(const std::string& value) { return '"' + value + '"'; }

}  // namespace

std::string build_facts() {
  const std::string cuda = D3S_CUDA_VERSION;
  return "{\"version\": " + text(D3S_VERSION) + ", \"compiler\": " + text(D3S_COMPILER) +
         ", \"torch_target\": " + text(D3S_TORCH_TARGET) +
         ", \"torch_built_against\": " + text(D3S_TORCH_BUILT_AGAINST) + ", \"simd_levels\": [" +
         text(compiled_simd_levels("\", \"")) + "], \"simd\": " + text(simd_level_name(simd_level())) +
         ", \"cuda\": " + (cuda.empty() ? std::string("null") : text(cuda)) +
         ", \"cuda_architectures\": " + text(D3S_CUDA_ARCHITECTURES) + "}";
}

}  // namespace d3s

// d3s_kernels/_dispatch/build.py calls this function of _cpu.so if the wheel has no _build_info module for the running
// Python version.
extern "C" __attribute__((visibility("default"))) const char* d3s_kernels_build_facts() {
  static const std::string facts = d3s::build_facts();
  return facts.c_str();
}
