// Describes, in JSON, what this build contains and which SIMD level this machine runs. d3s_kernels.build_info() returns
// these facts on every Python version.
#pragma once

#include <string>

namespace d3s {

std::string build_facts();

}  // namespace d3s
