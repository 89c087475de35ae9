# CUDA, only with -DTROUPE_CUDA=ON. Kernels (.cu) lie beside the rooms' other sources. Code that
# exists only in these builds asks for TROUPE_WITH_CUDA, which only those sources know that name
# kernels or talk to the GPU; all others are compiled as in a build without CUDA.
include_guard()

set(TROUPE_CUDA_ARCH "90a" CACHE STRING "GPU architectures, separated by commas, e.g. 90a,100a")

# CMake is told nothing about architectures: older versions do not know 90a.
set(CMAKE_CUDA_ARCHITECTURES OFF)
if(NOT CMAKE_CUDA_COMPILER)
  find_program(CMAKE_CUDA_COMPILER nvcc HINTS /usr/local/cuda/bin)
endif()
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
include(TroupeCudaLibraries)

string(REPLACE "," ";" architectures "${TROUPE_CUDA_ARCH}")
foreach(architecture IN LISTS architectures)
  target_compile_options(troupe_options INTERFACE
    "$<$<COMPILE_LANGUAGE:CUDA>:-gencode=arch=compute_${architecture},code=sm_${architecture}>")
endforeach()
target_compile_options(troupe_options INTERFACE
  $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr -lineinfo -Xcompiler=-Wall,-Wextra>)
if(TROUPE_WERROR)
  target_compile_options(troupe_options INTERFACE
    $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings -Xcompiler=-Werror>)
endif()
set(TROUPE_CUDA_ROOMS ops runtime)

function(troupe_use_cuda target)
  get_target_property(sources ${target} SOURCES)
  list(FILTER sources EXCLUDE REGEX "_cpu\\.cc$|/cpu/")
  set_property(SOURCE ${sources} APPEND PROPERTY COMPILE_DEFINITIONS TROUPE_WITH_CUDA)
  target_link_libraries(${target} PRIVATE CUDA::cudart CUDA::cublasLt CUDA::cupti CUDA::nvrtc
                                          troupe_cuda_libraries)
endfunction()
