# Compiler and linker settings shared by every target.
#
# Numerics: results must not depend on the optimiser's mood, so -ffast-math stays off. The two
# relaxations below change no value: they only say that nothing reads errno after a math function
# and that nothing unmasks floating-point traps.
include_guard()

set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Debug, Release or RelWithDebInfo" FORCE)
endif()

if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 11)
  message(FATAL_ERROR "Troupe needs g++ 11 or newer; found ${CMAKE_CXX_COMPILER_VERSION}.")
elseif(CMAKE_CXX_COMPILER_ID STREQUAL "Clang" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 14)
  message(FATAL_ERROR "Troupe needs clang 14 or newer; found ${CMAKE_CXX_COMPILER_VERSION}.")
endif()

add_library(troupe_compiler INTERFACE)
target_include_directories(troupe_compiler INTERFACE "${PROJECT_SOURCE_DIR}/src")
# The standard is a plain option: CMAKE_CXX_STANDARD would also be asked of nvcc, and CMake before
# 3.26 does not know that nvcc 13 can do it.
target_compile_options(troupe_compiler INTERFACE
  $<$<COMPILE_LANGUAGE:CXX,CUDA>:-std=c++20>
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -fno-math-errno -fno-trapping-math>)
# Messages that name a source name it below the project's folder, wherever that lay.
set(troupe_paths "-fmacro-prefix-map=${PROJECT_SOURCE_DIR}/=")
target_compile_options(troupe_compiler INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:${troupe_paths}> $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=${troupe_paths}>)
if(TROUPE_WERROR)
  target_compile_options(troupe_compiler INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()
# g++ 12 sees overlapping copies in std::string's operator+ where there are none (GCC PR 105651).
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  target_compile_options(troupe_compiler INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>)
endif()
# The first is for all code but the CPU kernels, which are compiled for each (TroupeRooms.cmake).
string(REPLACE "," ";" troupe_levels "${TROUPE_ARCH}")
if(troupe_levels)
  list(GET troupe_levels 0 lowest)
  set(level $<TARGET_PROPERTY:TROUPE_LEVEL>)
  target_compile_options(troupe_compiler INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-march=$<IF:$<BOOL:${level}>,${level},${lowest}>>)
endif()

if(TROUPE_SANITIZE)
  target_compile_options(troupe_compiler INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${TROUPE_SANITIZE} -fno-sanitize-recover=all
                              -fno-omit-frame-pointer>)
  target_link_options(troupe_compiler INTERFACE -fsanitize=${TROUPE_SANITIZE})
  # GCC 13 with AddressSanitizer aligns stack frames to less than it then stores with AVX-512 (its
  # bug 110027).
  if(TROUPE_SANITIZE MATCHES address AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND
     CMAKE_SYSTEM_PROCESSOR STREQUAL "x86_64")
    target_compile_options(troupe_compiler INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-mno-avx512f>)
  endif()
endif()

find_program(TROUPE_CCACHE ccache)
mark_as_advanced(TROUPE_CCACHE)
if(TROUPE_CCACHE)
  foreach(language CXX CUDA)
    if(NOT DEFINED CMAKE_${language}_COMPILER_LAUNCHER)
      set(CMAKE_${language}_COMPILER_LAUNCHER "${TROUPE_CCACHE}")
    endif()
  endforeach()
endif()

# The fastest linker that this compiler accepts (g++ 11 does not know -fuse-ld=mold).
include(CheckCXXSourceCompiles)
foreach(linker mold lld)
  set(CMAKE_REQUIRED_LINK_OPTIONS -fuse-ld=${linker})
  check_cxx_source_compiles("int main() { return 0; }" TROUPE_LINKER_${linker})
  unset(CMAKE_REQUIRED_LINK_OPTIONS)
  if(TROUPE_LINKER_${linker})
    add_link_options(-fuse-ld=${linker})
    break()
  endif()
endforeach()
