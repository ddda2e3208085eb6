#include "simd_level.h"

#include <cstdlib>
#include <cstring>

#if defined(D3S_X86_LEVELS)
#include <cpuid.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__linux__)
#include <sys/auxv.h>
#endif

namespace d3s {
namespace {

#if defined(D3S_X86_LEVELS)
// Clang's __builtin_cpu_supports does not know this feature.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#elif defined(D3S_BF16_LEVEL)
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

SimdLevel best_level() {
#if defined(D3S_X86_LEVELS)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx512 && __builtin_cpu_supports("avx512bf16")) return SimdLevel::avx512_bf16;
  return avx512 ? SimdLevel::avx512 : avx2 ? SimdLevel::avx2 : SimdLevel::baseline;
#elif defined(D3S_BF16_LEVEL)
  return has_bf16() ? SimdLevel::neon_bf16 : SimdLevel::neon;
#else
  return SimdLevel::baseline;
#endif
}

SimdLevel chosen_level() {
  const SimdLevel best = best_level();
  const char* asked = std::getenv("D3S_KERNELS_SIMD");
  for (SimdLevel level = best; asked && level >= SimdLevel::D3S_LOWEST_LEVEL;
       level = static_cast<SimdLevel>(static_cast<int>(level) - 1))
    if (std::strcmp(asked, simd_level_name(level)) == 0) return level;
  return best;
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

}  // namespace d3s
