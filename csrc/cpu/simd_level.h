// Chooses the SIMD level for this machine among the compiled levels.
//
// A file with time-critical loops is compiled once for each level (CMakeLists.txt). It defines a table of its loops in
// the namespace D3S_LEVEL, and variants.cpp picks one of the tables. Such a file keeps everything else in unnamed
// namespaces, and uses no templates of the standard library. Otherwise, the linker might pick an inline function that
// was compiled for AVX-512, and use it in the whole library. The library would then crash on an older machine.
#pragma once

#include <string>

namespace d3s {

// A level whose name ends in _bf16 is the level of the same name without _bf16, plus a dot-product instruction for
// bfloat16. Only wide_product_loops.cpp is compiled for these levels.
enum class SimdLevel { baseline, avx2, avx512, avx512_bf16, neon, neon_bf16 };

// Returns the highest compiled level that this machine can run. The environment variable
// D3S_KERNELS_SIMD=baseline|avx2|avx512|neon asks for a lower level. Throws if this machine can run none of the
// compiled levels. This happens if the library was built on another machine with D3S_FIRST_LOOK, which compiles only
// that machine's level.
SimdLevel simd_level();

const char* simd_level_name(SimdLevel level);

// Returns the names of the compiled levels, from the lowest to the highest, joined by `between`.
std::string compiled_simd_levels(const char* between);

}  // namespace d3s
