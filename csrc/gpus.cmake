# Chooses the GPUs for which the CUDA kernels are compiled (tested in tests/test_gpus_of_a_build.py).

# The GPUs of the wheels: machine code for each generation, and PTX of the last generation for future GPUs.
set(D3S_ALL_GPUS 80-real 86-real 89-real 90-real 100-real 120)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64")
  list(FILTER D3S_ALL_GPUS EXCLUDE REGEX "^8") # with such a processor, no GPU is older than GH200
endif()

set(D3S_GPUS here CACHE STRING "Compile the CUDA kernels for the GPUs that are here, or for all")

# Sets `found` to the architectures of this machine's GPUs (machine code only). If `found` is empty, `why_not` says why.
function(d3s_find_gpus nvcc seconds)
  set(found "" PARENT_SCOPE)
  execute_process(
    COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
    TIMEOUT ${seconds}
    RESULT_VARIABLE result
    OUTPUT_VARIABLE said OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  set(problem "")
  if(NOT result STREQUAL "0")
    string(REGEX REPLACE "^([0-9]+)$" "exit status \\1" problem "${result}")
  elseif(NOT said MATCHES "^[0-9]+\\.[0-9]+([ \r\n]+[0-9]+\\.[0-9]+)*$")
    string(REGEX REPLACE "[\r\n].*" "" line "${said}")
    set(problem "it says '${line}'")
  endif()
  if(problem)
    set(why_not "nvidia-smi shows no GPU here: ${problem}" PARENT_SCOPE)
    return()
  endif()

  string(REGEX MATCHALL "[0-9.]+" capabilities "${said}")
  list(REMOVE_DUPLICATES capabilities)
  list(SORT capabilities COMPARE NATURAL)
  list(FILTER capabilities EXCLUDE REGEX "^[1-7]\\.") # the kernels do not compile for capabilities below 8.0
  set(why_not "no GPU here has compute capability 8.0 or higher" PARENT_SCOPE)
  execute_process(COMMAND "${nvcc}" --list-gpu-code OUTPUT_VARIABLE known ERROR_QUIET)
  string(REGEX MATCHALL "sm_[0-9]+" known "${known}")
  set(gpus "")
  foreach(capability IN LISTS capabilities)
    string(REPLACE "." "" number "${capability}")
    if(NOT "sm_${number}" IN_LIST known)
      set(why_not "nvcc does not know compute capability ${capability}, which a GPU here has" PARENT_SCOPE)
      return()
    endif()
    list(APPEND gpus ${number}-real)
  endforeach()
  set(found "${gpus}" PARENT_SCOPE)
endfunction()

# If CMAKE_CUDA_ARCHITECTURES is not set, sets it from CUDAARCHS or D3S_GPUS. Prints the choice and the reason.
function(d3s_choose_gpus nvcc seconds)
  if(NOT D3S_GPUS MATCHES "^(here|all)$")
    message(FATAL_ERROR "D3S_GPUS: got '${D3S_GPUS}'; takes here or all")
  endif()
  set(chosen "${D3S_ALL_GPUS}")
  if(NOT "${CMAKE_CUDA_ARCHITECTURES}" STREQUAL "")
    set(chosen "${CMAKE_CUDA_ARCHITECTURES}")
    set(why "as CMAKE_CUDA_ARCHITECTURES says")
  elseif(NOT "$ENV{CUDAARCHS}" STREQUAL "")
    set(chosen "$ENV{CUDAARCHS}")
    set(why "as CUDAARCHS says")
  elseif(D3S_GPUS STREQUAL "all")
    set(why "all, as D3S_GPUS says")
  elseif(CMAKE_CROSSCOMPILING)
    set(why "all, in a build for another machine")
  else()
    d3s_find_gpus("${nvcc}" ${seconds})
    set(why "all, because ${why_not}")
    if(found)
      set(chosen "${found}")
      set(why "the GPUs here")
    endif()
  endif()
  list(JOIN chosen " " names)
  message(STATUS "CUDA kernels for ${names}: ${why}")
  set(CMAKE_CUDA_ARCHITECTURES "${chosen}" PARENT_SCOPE)
endfunction()
