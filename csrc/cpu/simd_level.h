// The SIMD level that runs here, out of the compiled levels.
//
// A file with time-critical loops is compiled once for each level (CMakeLists.txt). It defines a table of its loops in
// the namespace D3S_LEVEL, and variants.cpp picks one of the tables. Such a file keeps everything else in unnamed
// namespaces, and uses no templates of the standard library. Otherwise, the linker might use an inline function that
// was compiled for AVX-512 in the whole library, which would crash on an older machine.
#pragma once

#include <string>

namespace d3s {

// A level with _bf16 in its name is the level before it, plus a dot product of bfloat16. Only wide_product_loops.cpp is
// compiled for these levels.
enum class SimdLevel { baseline, avx2, avx512, avx512_bf16, neon, neon_bf16 };

// The best of the compiled levels that this machine can run. D3S_KERNELS_SIMD=baseline|avx2|avx512|neon asks for a
// lower level. Throws if the machine can run none of them: then the library was built as a first look (D3S_FIRST_LOOK)
// on another machine.
SimdLevel simd_level();

const char* simd_level_name(SimdLevel level);

// The names of the compiled levels, from the lowest to the highest, joined by `between`.
std::string compiled_simd_levels(const char* between);

}  // namespace d3s
