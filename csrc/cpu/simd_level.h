// Which of the compiled SIMD variants runs here.
//
// A file whose loops matter is compiled once for each level (CMakeLists.txt), with D3S_LEVEL as the namespace of what
// it defines. Such files keep everything else in unnamed namespaces and away from the standard library's templates:
// an inline function compiled for AVX-512 that the linker picks for all would crash an older machine.
#pragma once

namespace d3s {

enum class SimdLevel { baseline, avx2, avx512, avx512_bf16 };

// The best that was built and that the machine runs; D3S_KERNELS_SIMD=baseline|avx2|avx512 asks for less.
// avx512_bf16 is avx512 with a dot product of bfloat16, which one file has a variant for.
SimdLevel simd_level();

const char* simd_level_name(SimdLevel level);

}  // namespace d3s

#if defined(D3S_X86_LEVELS)
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
#define D3S_DECLARE_VARIANTS(type, name) \
  namespace baseline {                   \
  extern const type name;                \
  }
#define D3S_PICK_VARIANT(name) (::d3s::baseline::name)
#endif
