// Which of the compiled SIMD variants runs here.
//
// A file with time-critical loops is compiled once for each level (CMakeLists.txt), with D3S_LEVEL as the namespace of
// what it defines. Such files keep everything else in unnamed namespaces and use no templates of the standard library:
// the linker might pick an inline function compiled for AVX-512 for the whole library, which would crash on an older
// machine.
#pragma once

namespace d3s {

enum class SimdLevel { baseline, avx2, avx512, avx512_bf16, neon, neon_bf16 };

// The best level that was built and that the machine runs. D3S_KERNELS_SIMD=baseline|avx2|avx512|neon asks for a lower
// level. Every aarch64 machine runs neon. A level with _bf16 is the level before it plus a dot product of bfloat16;
// only wide_product_loops.cpp has a variant for it.
SimdLevel simd_level();

const char* simd_level_name(SimdLevel level);

}  // namespace d3s

#if defined(D3S_X86_LEVELS)
#define D3S_LOWEST_LEVEL baseline
#define D3S_BF16_LEVEL avx512_bf16
#define D3S_DECLARE_VARIANTS(type, name) \
  namespace baseline {                   \
  extern const type name;                \
  }                                      \
  namespace avx2 {                       \
  extern const type name;                \
  }                                      \
  namespace avx512 {                     \
  extern const type name;                \
  }
#define D3S_PICK_VARIANT(name)                                           \
  (::d3s::simd_level() >= ::d3s::SimdLevel::avx512 ? ::d3s::avx512::name \
   : ::d3s::simd_level() == ::d3s::SimdLevel::avx2 ? ::d3s::avx2::name   \
                                                   : ::d3s::baseline::name)
#else
#if defined(__aarch64__) && !defined(D3S_GENERIC)
#define D3S_LOWEST_LEVEL neon
#define D3S_BF16_LEVEL neon_bf16
#else
#define D3S_LOWEST_LEVEL baseline
#endif
#define D3S_DECLARE_VARIANTS(type, name) \
  namespace D3S_LOWEST_LEVEL {           \
  extern const type name;                \
  }
#define D3S_PICK_VARIANT(name) (::d3s::D3S_LOWEST_LEVEL::name)
#endif
