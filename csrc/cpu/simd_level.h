// Which of the compiled SIMD levels runs here.
//
// A file with time-critical loops is compiled once for each level (CMakeLists.txt), with D3S_LEVEL as the namespace of
// the table that it defines; variants.cpp picks one. Such files keep everything else in unnamed namespaces and use no
// templates of the standard library: the linker might pick an inline function compiled for AVX-512 for the whole
// library, which would crash on an older machine.
#pragma once

#include <string>

namespace d3s {

// A level with _bf16 is the level before it plus a dot product of bfloat16; only wide_product_loops.cpp has a variant
// for it.
enum class SimdLevel { baseline, avx2, avx512, avx512_bf16, neon, neon_bf16 };

// The best level that was compiled and that the machine runs. D3S_KERNELS_SIMD=baseline|avx2|avx512|neon asks for a
// lower level. Throws where the machine runs none: the build was a first look (D3S_FIRST_LOOK) on another one.
SimdLevel simd_level();

const char* simd_level_name(SimdLevel level);

// The names of the compiled levels, from the lowest to the highest, with `between` between them.
std::string compiled_simd_levels(const char* between);

}  // namespace d3s
