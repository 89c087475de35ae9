# CUDA, only with -DTROUPE_CUDA=ON. Kernels (.cu) lie beside the rooms' other sources. Code that
# exists only in these builds asks for TROUPE_WITH_CUDA, which is known in the rooms that have
# kernels or talk to the GPU; all others are compiled as in a build without CUDA.
include_guard()

set(TROUPE_CUDA_ARCH "90a" CACHE STRING "GPU architectures, separated by commas, e.g. 90a,100a")
string(REPLACE "," ";" architectures "${TROUPE_CUDA_ARCH}")
if(NOT architectures)
  message(FATAL_ERROR "TROUPE_CUDA_ARCH is empty: name the GPU's architecture, e.g. 90a for Hopper.")
endif()
foreach(architecture IN LISTS architectures)
  if(NOT architecture MATCHES "^[0-9]+[af]?$")
    message(FATAL_ERROR "TROUPE_CUDA_ARCH=${TROUPE_CUDA_ARCH}: '${architecture}' is no architecture. "
                        "Write numbers as nvcc does, e.g. 90a or 90a,100a.")
  endif()
  # The experts' products on Hopper use instructions that plain 90 does not have.
  if(architecture STREQUAL "90")
    message(FATAL_ERROR "TROUPE_CUDA_ARCH=${TROUPE_CUDA_ARCH}: Hopper GPUs need 90a, with the a. Use "
                        "-DTROUPE_CUDA_ARCH=90a.")
  endif()
endforeach()

# CMake is told nothing about architectures: older versions do not know 90a.
set(CMAKE_CUDA_ARCHITECTURES OFF)
if(NOT CMAKE_CUDA_COMPILER)
  find_program(CMAKE_CUDA_COMPILER nvcc HINTS /usr/local/cuda/bin)
endif()
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
include(TroupeCudaLibraries)

foreach(architecture IN LISTS architectures)
  target_compile_options(troupe_compiler INTERFACE
    "$<$<COMPILE_LANGUAGE:CUDA>:-gencode=arch=compute_${architecture},code=sm_${architecture}>")
endforeach()
target_compile_options(troupe_compiler INTERFACE
  $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr -lineinfo -Xcompiler=-Wall,-Wextra>)
if(TROUPE_WERROR)
  target_compile_options(troupe_compiler INTERFACE
    $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings -Xcompiler=-Werror>)
endif()
set(TROUPE_CUDA_ROOMS comm ops runtime)

function(troupe_use_cuda target)
  target_compile_definitions(${target} PRIVATE TROUPE_WITH_CUDA)
  target_link_libraries(${target} PRIVATE CUDA::cudart CUDA::cublasLt CUDA::cupti CUDA::nvrtc
                                          troupe_cuda_libraries)
endfunction()
