// What this build contains and what runs here, in JSON: the source of d3s_kernels.build_info() on every Python.
#pragma once

#include <string>

namespace d3s {

std::string build_facts();

}  // namespace d3s
