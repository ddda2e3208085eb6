# The sources of the ops, for this library and for tests/cuda_shim, which emulates the CUDA kernels on the CPU. A file
# in ops/ checks arguments and allocates results; files of the same name in cpu/ and cuda/ contain the kernels.
file(GLOB D3S_OP_SOURCES CONFIGURE_DEPENDS "${CMAKE_CURRENT_LIST_DIR}/ops/*.cpp")
set(D3S_CPU_SOURCES ${D3S_OP_SOURCES})
list(TRANSFORM D3S_CPU_SOURCES REPLACE "/ops/([^/]+)$" "/cpu/\\1")
set(D3S_CUDA_SOURCES ${D3S_OP_SOURCES})
list(TRANSFORM D3S_CUDA_SOURCES REPLACE "/ops/([^/]+)\\.cpp$" "/cuda/\\1.cu")
