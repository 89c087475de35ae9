# troupe_add_room(<room>)             the static library troupe_<room> from src/<room>/**
# troupe_add_program(<name> <room>)   the executable <name> from src/<room>/**, linking every room
#
# Files under a folder named `cuda` and .cu files belong to CUDA builds only, those under `mpi` to
# libraries of their own (TroupeMpi.cmake).
#
# Sources of a room are compiled eight at a time: a header is parsed once for eight, which takes a
# quarter of the time. So they must not give two things one name. Kernels (.cu) are always compiled
# one by one, as cmake before 3.31 does by itself: the compiler of a kernel takes far longer than its
# headers. TROUPE_UNITY=OFF compiles all one by one, for tools that ask how a single file is compiled.
#
# Rooms in which nothing takes long (troupe_brief_rooms) are compiled with -O1, which takes two thirds
# of the time of -O3.
#
# Where TROUPE_ARCH names several levels of processors, CPU kernels (*_cpu.cc and ops/cpu/) are
# compiled for each of them, and one is chosen at start (src/ops/kernel_level.h).
include_guard()
option(TROUPE_UNITY "Compile several sources of a room at a time" ON)
# A source that is included is taken for a header, whose classes should hold nothing of one source.
if(TROUPE_UNITY AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  target_compile_options(troupe_compiler INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-Wno-subobject-linkage>)
endif()

set(TROUPE_LIBRARIES "")
set(troupe_brief_rooms options report cli)

function(troupe_use_brief_room target room)
  if(room IN_LIST troupe_brief_rooms)
    target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O1>)
  endif()
endfunction()

function(troupe_glob_sources room result)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/${room}/*.cc")
  if(TROUPE_CUDA)
    file(GLOB_RECURSE cuda_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/${room}/*.cu")
    set_source_files_properties(${cuda_sources} PROPERTIES SKIP_UNITY_BUILD_INCLUSION TRUE)
    list(APPEND sources ${cuda_sources})
  else()
    list(FILTER sources EXCLUDE REGEX "/src/${room}/(.*/)?cuda/")
  endif()
  list(FILTER sources EXCLUDE REGEX "/src/${room}/(.*/)?mpi/")
  set(${result} "${sources}" PARENT_SCOPE)
endfunction()

# <result>: an object file with the sources compiled for every level.
function(troupe_add_kernel_levels sources result)
  set(arguments "")
  foreach(level IN LISTS troupe_levels)
    set(name troupe_kernels_${level})
    add_library(${name} OBJECT ${sources})
    target_link_libraries(${name} PRIVATE ${TROUPE_LIBRARIES} troupe_compiler troupe_dependencies)
    set_target_properties(${name} PROPERTIES TROUPE_LEVEL ${level} UNITY_BUILD ${TROUPE_UNITY}
                                             UNITY_BUILD_BATCH_SIZE 8)
    list(APPEND arguments --level ${level} $<TARGET_OBJECTS:${name}>)
    list(APPEND objects $<TARGET_OBJECTS:${name}>)
  endforeach()
  set(script "${PROJECT_SOURCE_DIR}/cmake/link_kernel_levels.sh")
  set(object "${PROJECT_BINARY_DIR}/generated/kernels.o")
  add_custom_command(OUTPUT "${object}" VERBATIM COMMAND_EXPAND_LISTS
    DEPENDS "${script}" ${objects}
    COMMAND ${CMAKE_COMMAND} -E env "CXX=${CMAKE_CXX_COMPILER}" "NM=${CMAKE_NM}"
            "OBJCOPY=${CMAKE_OBJCOPY}" "OBJDUMP=${CMAKE_OBJDUMP}"
            bash "${script}" "${object}" ${arguments})
  set_source_files_properties("${object}" PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
  set(${result} "${object}" PARENT_SCOPE)
endfunction()

function(troupe_add_room room)
  troupe_glob_sources(${room} sources)
  if(NOT sources)
    return()
  endif()
  list(LENGTH troupe_levels levels)
  if(room STREQUAL "ops" AND levels GREATER 1)
    set(kernels ${sources})
    list(FILTER kernels INCLUDE REGEX "_cpu[.]cc$|/ops/cpu/[^/]*[.]cc$")
    list(REMOVE_ITEM sources ${kernels})
    troupe_add_kernel_levels("${kernels}" object)
    list(APPEND sources "${object}")
    list(JOIN troupe_levels "\",\"" names)
    set_source_files_properties(src/ops/kernel_level.cc PROPERTIES
      COMPILE_DEFINITIONS "TROUPE_KERNEL_LEVELS=\"${names}\"" SKIP_UNITY_BUILD_INCLUSION TRUE)
  endif()
  add_library(troupe_${room} STATIC ${sources})
  target_link_libraries(troupe_${room} PUBLIC ${TROUPE_LIBRARIES} troupe_compiler
                                              troupe_dependencies)
  set_target_properties(troupe_${room} PROPERTIES UNITY_BUILD ${TROUPE_UNITY}
                                                  UNITY_BUILD_BATCH_SIZE 8)
  troupe_use_brief_room(troupe_${room} ${room})
  if(TROUPE_CUDA AND room IN_LIST TROUPE_CUDA_ROOMS)
    troupe_use_cuda(troupe_${room})
  endif()
  set(TROUPE_LIBRARIES troupe_${room} ${TROUPE_LIBRARIES} PARENT_SCOPE)
endfunction()

# The executable lies in bin/; <build folder>/troupe is a link to it, so that `make build` can point
# build/troupe at the preset that was built last without confusing the build tool.
function(troupe_add_program name room)
  troupe_glob_sources(${room} sources)
  if(NOT sources)
    return()
  endif()
  add_executable(${name} ${sources})
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/bin"
                        UNITY_BUILD ${TROUPE_UNITY} UNITY_BUILD_BATCH_SIZE 8)
  target_link_libraries(${name} PRIVATE ${TROUPE_LIBRARIES})
  troupe_use_brief_room(${name} ${room})
  add_custom_command(TARGET ${name} POST_BUILD VERBATIM
    COMMAND ${CMAKE_COMMAND} -E create_symlink bin/${name} "${PROJECT_BINARY_DIR}/${name}")
endfunction()
