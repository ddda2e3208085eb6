#include "simd_level.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "compiled_levels.h"  // written by CMakeLists.txt

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__linux__)
#include <sys/auxv.h>
#endif

namespace d3s {
namespace {

constexpr SimdLevel kCompiled[] = {
#define D3S_ENTRY(level, _) SimdLevel::level,
    D3S_LEVELS(D3S_ENTRY, _) D3S_BF16_LEVELS(D3S_ENTRY, _)};

#if defined(__x86_64__)
// Clang's __builtin_cpu_supports does not know this feature.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c(); }

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#elif defined(__aarch64__)
bool has_bf16() {
#if defined(__APPLE__)
  int has = 0;
  size_t size = sizeof has;
  return sysctlbyname("hw.optional.arm.FEAT_BF16", &has, &size, nullptr, 0) == 0 && has != 0;
#elif defined(__linux__)
  return (getauxval(AT_HWCAP2) & (1u << 14)) != 0;  // HWCAP2_BF16, which old headers do not name
#else
  return false;
#endif
}
#endif

bool runs_here(SimdLevel level) {
  switch (level) {
#if defined(__x86_64__)
    case SimdLevel::avx2:
      return has_avx2();
    case SimdLevel::avx512:
      return has_avx512();
    case SimdLevel::avx512_bf16:
      return has_avx512() && __builtin_cpu_supports("avx512bf16");
#elif defined(__aarch64__)
    case SimdLevel::neon:
      return true;
    case SimdLevel::neon_bf16:
      return has_bf16();
#endif
    default:
      return level == SimdLevel::baseline;
  }
}

SimdLevel chosen_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
  const char* asked = std::getenv("D3S_KERNELS_SIMD");
  const SimdLevel* best = nullptr;
  for (const SimdLevel& level : kCompiled) {
    if (!runs_here(level)) break;
    best = &level;
    if (asked && std::strcmp(asked, simd_level_name(level)) == 0) break;
  }
  if (best) return *best;
  throw std::runtime_error("d3s_kernels: compiled for " + compiled_simd_levels(" and ") +
                           " alone, which this processor does not have; build it here, or without D3S_FIRST_LOOK");
}

}  // namespace

SimdLevel simd_level() {
  static const SimdLevel level = chosen_level();
  return level;
}

const char* simd_level_name(SimdLevel level) {
  static const char* const names[] = {"baseline", "avx2", "avx512", "avx512_bf16", "neon", "neon_bf16"};
  return names[static_cast<int>(level)];
}

std::string compiled_simd_levels(const char* between) {
  std::string names;
  for (const SimdLevel level : kCompiled) names += (names.empty() ? "" : between) + std::string(simd_level_name(level));
  return names;
}

}  // namespace d3s
