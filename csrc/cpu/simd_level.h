// Chooses the SIMD level for this machine among the compiled levels.
//
// A file with time-critical loops is compiled once for each level (CMakeLists.txt). It defines a table of its loops in
// the namespace D3S_LEVEL, and variants.cpp picks one of the tables. Such a file keeps everything else in unnamed
// namespaces, and uses no templates of the standard library. Otherwise, the linker might take an inline function that
// was compiled for AVX-512, and use it in the whole library. The library would then crash on an older machine.
#pragma once

#include <string>

namespace d3s {

// The levels *_bf16 add a dot-product instruction for bfloat16. Only wide_product_loops.cpp is compiled for them.
enum class SimdLevel { baseline, avx2, avx512, avx512_bf16, neon, neon_bf16 };

// Returns the highest compiled level that this machine can run. If the environment variable
// D3S_KERNELS_SIMD=baseline|avx2|avx512|neon names a lower compiled level, returns that level. Throws if this machine
// can run none of the compiled levels. This may happen with D3S_FIRST_LOOK: such a build has only the level of the
// machine that it was built on.
SimdLevel simd_level();

const char* simd_level_name(SimdLevel level);

// Returns the names of the compiled levels, from the lowest to the highest, joined by `between`.
std::string compiled_simd_levels(const char* between);

}  // namespace d3s
