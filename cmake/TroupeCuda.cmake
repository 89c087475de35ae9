# CUDA, only with -DTROUPE_CUDA=ON. Kernels (.cu) lie beside the rooms' other sources. Code that
# exists only in these builds asks for TROUPE_WITH_CUDA.
include_guard()

set(TROUPE_CUDA_ARCH "90a" CACHE STRING "GPU architectures, separated by commas, e.g. 90a,100a")

# CMake is told nothing about architectures: older versions do not know 90a.
set(CMAKE_CUDA_ARCHITECTURES OFF)
if(NOT CMAKE_CUDA_COMPILER)
  find_program(CMAKE_CUDA_COMPILER nvcc HINTS /usr/local/cuda/bin)
endif()
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)

string(REPLACE "," ";" architectures "${TROUPE_CUDA_ARCH}")
foreach(architecture IN LISTS architectures)
  target_compile_options(troupe_options INTERFACE
    "$<$<COMPILE_LANGUAGE:CUDA>:-gencode=arch=compute_${architecture},code=sm_${architecture}>")
endforeach()
target_compile_options(troupe_options INTERFACE
  $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr -lineinfo -Xcompiler=-Wall>)
if(TROUPE_WERROR)
  target_compile_options(troupe_options INTERFACE
    $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings -Xcompiler=-Werror>)
endif()
target_compile_definitions(troupe_options INTERFACE TROUPE_WITH_CUDA)
target_link_libraries(troupe_dependencies INTERFACE CUDA::cudart)
