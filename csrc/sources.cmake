# The ops, for every build: this library's, and the CUDA kernels emulated on the CPU (tests/cuda_shim). A file of ops/ has
# an op's arguments and results; cpu/ and cuda/ have its kernels under the same name.
file(GLOB D3S_OP_SOURCES CONFIGURE_DEPENDS "${CMAKE_CURRENT_LIST_DIR}/ops/*.cpp")
set(D3S_CPU_SOURCES ${D3S_OP_SOURCES})
list(TRANSFORM D3S_CPU_SOURCES REPLACE "/ops/([^/]+)$" "/cpu/\\1")
set(D3S_CUDA_SOURCES ${D3S_OP_SOURCES})
list(TRANSFORM D3S_CUDA_SOURCES REPLACE "/ops/([^/]+)\\.cpp$" "/cuda/\\1.cu")
