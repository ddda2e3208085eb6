# The ops, by the files that have them, for every build: this library's, and the CUDA kernels emulated on the CPU
# (tests/cuda_shim). ops/ has an op's arguments and results, cpu/ and cuda/ the kernels under the same name.
set(D3S_OPS logprob_entropy topk_mask topk_steps compact group_advantages max_variance ratios)
set(D3S_OP_SOURCES ${D3S_OPS})
list(TRANSFORM D3S_OP_SOURCES REPLACE "(.+)" "${CMAKE_CURRENT_LIST_DIR}/ops/\\1.cpp")
set(D3S_CPU_SOURCES ${D3S_OPS})
list(TRANSFORM D3S_CPU_SOURCES REPLACE "(.+)" "${CMAKE_CURRENT_LIST_DIR}/cpu/\\1.cpp")
set(D3S_CUDA_SOURCES ${D3S_OPS})
list(TRANSFORM D3S_CUDA_SOURCES REPLACE "(.+)" "${CMAKE_CURRENT_LIST_DIR}/cuda/\\1.cu")
