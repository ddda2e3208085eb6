// Exposes the facts of build_facts.h as a Python module. This module is the only file of a wheel that is bound to one
// Python version.
#include <pybind11/pybind11.h>

#include "build_facts.h"

PYBIND11_MODULE(_build_info, m) {
  m.doc() = "What this build of d3s_kernels holds and what runs here.";
  m.def("build_facts", &d3s::build_facts, "The facts as JSON.");
}
