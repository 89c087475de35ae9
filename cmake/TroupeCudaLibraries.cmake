# The libraries of CUDA builds that no toolkit contains: cuDNN (attention) with its C++ frontend, and
# NCCL (collectives). Each is taken from the usual places, from the toolkit's folder, or from the
# Python packages that carry it, wherever python3 looks for packages, in
# <source folder>/build-dependencies, or in TROUPE_PYTHON_PACKAGES.
#
# Defines the target troupe_cuda_headers, and TROUPE_CUDNN_LIBRARY and TROUPE_NCCL_LIBRARY. As a
# script (cmake -P) it prints the Python packages of those that are missing, for
# scripts/install_dependencies.sh.
include_guard()

set(TROUPE_PYTHON_PACKAGES "" CACHE PATH "Folder of Python packages with cuDNN and NCCL")

get_filename_component(troupe_source_dir "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)
find_program(TROUPE_NVCC nvcc HINTS /usr/local/cuda/bin)
find_program(TROUPE_PYTHON python3)
mark_as_advanced(TROUPE_NVCC TROUPE_PYTHON)

set(troupe_package_folders ${TROUPE_PYTHON_PACKAGES} "${troupe_source_dir}/build-dependencies")
if(TROUPE_PYTHON)
  execute_process(OUTPUT_VARIABLE output ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE
    COMMAND "${TROUPE_PYTHON}" -c
            "import site; print(';'.join([site.getusersitepackages()] + site.getsitepackages()))")
  list(APPEND troupe_package_folders ${output})
endif()
set(troupe_roots /usr /usr/local)
if(TROUPE_NVCC)
  get_filename_component(nvcc "${TROUPE_NVCC}" REALPATH)
  get_filename_component(toolkit "${nvcc}/../.." ABSOLUTE)
  list(APPEND troupe_roots "${toolkit}" "${toolkit}/targets/x86_64-linux")
endif()
foreach(folder IN LISTS troupe_package_folders)
  list(APPEND troupe_roots "${folder}" "${folder}/nvidia/cudnn" "${folder}/nvidia/nccl")
endforeach()
list(TRANSFORM troupe_roots APPEND /include OUTPUT_VARIABLE troupe_include_folders)

set(troupe_missing "")

# <variable>_INCLUDE and, with a soname, <variable>_LIBRARY, both from the same place if they can be:
# the library next to the header comes first. Python packages have no libX.so, so the library is
# looked for under its full name. The folders <variable>_first come before those of the system.
macro(troupe_find variable package header)
  find_path(${variable}_INCLUDE ${header} HINTS ${${variable}_first} PATHS ${troupe_include_folders})
  set(${variable}_found "${${variable}_INCLUDE}")
  mark_as_advanced(${variable}_INCLUDE)
  if(${variable}_found AND ${ARGC} GREATER 3)
    find_library(${variable}_LIBRARY ${ARGV3}
      HINTS "${${variable}_INCLUDE}/../lib" "${${variable}_INCLUDE}/../lib64"
            "${${variable}_INCLUDE}/../lib/x86_64-linux-gnu"
            "${${variable}_INCLUDE}/../../lib/x86_64-linux-gnu")
    set(${variable}_found "${${variable}_LIBRARY}")
    mark_as_advanced(${variable}_LIBRARY)
  endif()
  if(NOT ${variable}_found)
    list(APPEND troupe_missing "${package}")
  endif()
endmacro()

# Older ones write outside their memory in replayed CUDA graphs (src/runtime/cuda_libraries.h, which
# looks again at run time).
set(troupe_oldest_cudnn 9.15.1)

# <is_new>: whether the folder has headers of a cuDNN that is new enough.
function(troupe_judge_cudnn folder is_new)
  set(lines "")
  if(EXISTS "${folder}/cudnn_version.h")
    file(STRINGS "${folder}/cudnn_version.h" lines
         REGEX "^#define CUDNN_(MAJOR|MINOR|PATCHLEVEL) +[0-9]+")
  endif()
  list(TRANSFORM lines REPLACE "^[^0-9]*([0-9]+).*$" "\\1")
  list(JOIN lines "." version)
  set(${is_new} FALSE PARENT_SCOPE)
  if(version VERSION_GREATER_EQUAL troupe_oldest_cudnn)
    set(${is_new} TRUE PARENT_SCOPE)
  endif()
endfunction()

# A folder with one that is new enough comes before those of the system, and before an older one
# that an earlier configuration has chosen.
set(TROUPE_CUDNN_first "")
foreach(folder IN LISTS troupe_include_folders)
  troupe_judge_cudnn("${folder}" is_new)
  if(is_new)
    list(APPEND TROUPE_CUDNN_first "${folder}")
  endif()
endforeach()
troupe_judge_cudnn("${TROUPE_CUDNN_INCLUDE}" is_new)
if(NOT is_new)
  unset(TROUPE_CUDNN_INCLUDE CACHE)
  unset(TROUPE_CUDNN_LIBRARY CACHE)
endif()

# The versions that the figures in docs/benchmarks were measured with.
set(troupe_cudnn_package nvidia-cudnn-cu13==9.19.*)
troupe_find(TROUPE_CUDNN ${troupe_cudnn_package} cudnn.h libcudnn.so.9)
troupe_judge_cudnn("${TROUPE_CUDNN_INCLUDE}" is_new)
set(troupe_found_old "")
if(TROUPE_CUDNN_found AND NOT is_new)
  list(APPEND troupe_missing ${troupe_cudnn_package})
  set(troupe_found_old "\nThe cuDNN in ${TROUPE_CUDNN_INCLUDE} is too old.")
endif()
troupe_find(TROUPE_CUDNN_FRONTEND nvidia-cudnn-frontend==1.23.* cudnn_frontend.h)
troupe_find(TROUPE_NCCL nvidia-nccl-cu13==2.28.* nccl.h libnccl.so.2)

if(CMAKE_SCRIPT_MODE_FILE)
  list(JOIN troupe_missing "\n" text)
  execute_process(COMMAND "${CMAKE_COMMAND}" -E echo "${text}")
  return()
endif()
if(troupe_missing)
  list(JOIN troupe_missing "' '" packages)
  message(FATAL_ERROR "Builds with CUDA need libraries that were not found. Run\n"
    "  scripts/install_dependencies.sh cuda\n"
    "which is: python3 -m pip install --target build-dependencies --no-deps '${packages}'\n"
    "or install cuDNN ${troupe_oldest_cudnn} or newer (libcudnn9-dev-cuda-13), NCCL (libnccl-dev) "
    "and the headers of cudnn-frontend from NVIDIA's repositories. Folders of Python packages "
    "elsewhere: -DTROUPE_PYTHON_PACKAGES=<folder>; other folders: -DCMAKE_PREFIX_PATH=<folder>."
    "${troupe_found_old}")
endif()

# Kernels (.cu) use none of them.
add_library(troupe_cuda_headers INTERFACE)
foreach(name CUDNN CUDNN_FRONTEND NCCL)
  target_include_directories(troupe_cuda_headers SYSTEM INTERFACE
                             "$<$<COMPILE_LANGUAGE:CXX>:${TROUPE_${name}_INCLUDE}>")
endforeach()
