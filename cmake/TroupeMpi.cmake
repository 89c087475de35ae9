# MPI, which the program loads when a launcher of MPI has started it (src/comm/mpi_library.h): a
# library of ours for each kind of MPI whose headers are here. The kinds are Open MPI and MPICH, whose
# binary interface Intel MPI, Cray MPICH and MVAPICH share. Only src/comm/mpi includes mpi.h.
#
# Sets TROUPE_MPI_LIBRARIES, the targets, and TROUPE_MPI_LAUNCHERS: the mpirun of each, for tests.
include_guard()
set(TROUPE_MPI_LIBRARIES "")
set(TROUPE_MPI_LAUNCHERS "")

# kind: openmpi or mpich. Other arguments: folders of headers.
function(troupe_add_mpi kind launcher)
  set(name troupe_${kind})
  if(name IN_LIST TROUPE_MPI_LIBRARIES)
    return()
  endif()
  # It stands alone: what it uses of other rooms is compiled into it.
  add_library(${name} MODULE src/comm/mpi/mpi_post.cc src/base/error.cc src/base/text.cc)
  target_include_directories(${name} SYSTEM PRIVATE ${ARGN})
  target_compile_definitions(${name} PRIVATE OMPI_SKIP_MPICXX MPICH_SKIP_MPICXX) # C++ bindings
  target_link_libraries(${name} PRIVATE troupe_compiler fmt::fmt-header-only)
  set_target_properties(${name} PROPERTIES
    LIBRARY_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/lib/troupe"
    CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
  add_dependencies(troupe_comm ${name})
  set(TROUPE_MPI_LIBRARIES ${TROUPE_MPI_LIBRARIES} ${name} PARENT_SCOPE)
  if(launcher)
    set(TROUPE_MPI_LAUNCHERS ${TROUPE_MPI_LAUNCHERS} "${launcher}" PARENT_SCOPE)
  endif()
endfunction()

if(NOT TROUPE_MPI)
  return()
endif()

# The one that the user's mpicxx belongs to, then MPICH as Debian has it beside Open MPI.
find_package(MPI QUIET COMPONENTS CXX)
if(MPI_CXX_FOUND)
  find_file(TROUPE_MPI_HEADER mpi.h NO_DEFAULT_PATH PATHS ${MPI_CXX_INCLUDE_DIRS})
  mark_as_advanced(TROUPE_MPI_HEADER)
  file(STRINGS "${TROUPE_MPI_HEADER}" lines REGEX "define OPEN_MPI")
  if(lines)
    troupe_add_mpi(openmpi "${MPIEXEC_EXECUTABLE}" ${MPI_CXX_INCLUDE_DIRS})
  else()
    troupe_add_mpi(mpich "${MPIEXEC_EXECUTABLE}" ${MPI_CXX_INCLUDE_DIRS})
  endif()
endif()
find_path(TROUPE_MPICH_INCLUDE mpi.h NO_DEFAULT_PATH
          PATHS "/usr/include/${CMAKE_LIBRARY_ARCHITECTURE}/mpich")
find_program(TROUPE_MPICH_RUN mpirun.mpich)
mark_as_advanced(TROUPE_MPICH_INCLUDE TROUPE_MPICH_RUN)
if(TROUPE_MPICH_INCLUDE)
  troupe_add_mpi(mpich "${TROUPE_MPICH_RUN}" "${TROUPE_MPICH_INCLUDE}")
endif()
if(NOT TROUPE_MPI_LIBRARIES)
  message(STATUS "No MPI (libopenmpi-dev): ranks are threads of one process, or found over TCP")
endif()
