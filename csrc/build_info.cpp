// The facts of this build as a Python module. Nothing else in a wheel is bound to one version of Python.
#include <pybind11/pybind11.h>

#include "build_facts.h"

PYBIND11_MODULE(_build_info, m) {
  m.doc() = "What this build of d3s_kernels holds and what runs here.";
  m.def("build_facts", &d3s::build_facts, "The facts as JSON.");
}
