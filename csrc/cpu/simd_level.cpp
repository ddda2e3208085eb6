#include "simd_level.h"

#include <cstdlib>
#include <cstring>
#include <initializer_list>

#if defined(D3S_X86_LEVELS)
#include <cpuid.h>
#endif

namespace d3s {
namespace {

#if defined(D3S_X86_LEVELS)
// Clang's __builtin_cpu_supports does not know this feature.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
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
#else
  return SimdLevel::D3S_ONLY_LEVEL;
#endif
}

SimdLevel chosen_level() {
  const SimdLevel best = best_level();
  const char* asked = std::getenv("D3S_KERNELS_SIMD");
  if (!asked || best == SimdLevel::neon) return best;
  for (SimdLevel level : {SimdLevel::baseline, SimdLevel::avx2, SimdLevel::avx512, SimdLevel::avx512_bf16})
    if (std::strcmp(asked, simd_level_name(level)) == 0) return level < best ? level : best;
  return best;
}

}  // namespace

SimdLevel simd_level() {
  static const SimdLevel level = chosen_level();
  return level;
}

const char* simd_level_name(SimdLevel level) {
  static const char* const names[] = {"baseline", "avx2", "avx512", "avx512_bf16", "neon"};
  return names[static_cast<int>(level)];
}

}  // namespace d3s
