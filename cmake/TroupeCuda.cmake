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

# CUDA's runtime is part of the program. NVIDIA's other libraries are loaded when a GPU is first used
# (src/base/cuda/nvidia_libraries.h): programs look for them in these folders, too.
function(troupe_use_cuda target)
  target_compile_definitions(${target} PRIVATE TROUPE_WITH_CUDA)
  target_include_directories(${target} SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS}
                                                      ${CUDAToolkit_CUPTI_INCLUDE_DIR})
  target_link_libraries(${target} PRIVATE CUDA::cudart_static troupe_cuda_headers)
endfunction()
foreach(library CUDA::cublasLt CUDA::nvrtc CUDA::cupti)
  get_target_property(location ${library} IMPORTED_LOCATION)
  list(APPEND TROUPE_CUDA_LIBRARIES "${location}")
endforeach()
list(APPEND TROUPE_CUDA_LIBRARIES "${TROUPE_CUDNN_LIBRARY}" "${TROUPE_NCCL_LIBRARY}")
set(TROUPE_CUDA_LIBRARY_FOLDERS "")
foreach(library IN LISTS TROUPE_CUDA_LIBRARIES)
  get_filename_component(folder "${library}" DIRECTORY)
  list(APPEND TROUPE_CUDA_LIBRARY_FOLDERS "${folder}")
endforeach()
list(REMOVE_DUPLICATES TROUPE_CUDA_LIBRARY_FOLDERS)
set(CMAKE_BUILD_RPATH ${TROUPE_CUDA_LIBRARY_FOLDERS})
