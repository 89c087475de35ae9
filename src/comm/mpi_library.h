// MPI, which is loaded when it is first asked for: so one program runs with Open MPI, with MPICH
// and what shares its binary interface (Intel MPI, Cray MPICH, MVAPICH), and where there is none.
//
// A library of ours for each kind lies in lib/troupe beside the program (cmake/TroupeMpi.cmake).
// The MPI itself is looked for as the linker would: in LD_LIBRARY_PATH, then in the system.
//
// Any thread.
#pragma once

#include <memory>
#include <string>

#include "comm/post/post.h"

namespace troupe {

enum class MpiKind { open_mpi, mpich };

// Loads MPI, once for the process: `first` or, where it is not found, the other kind. False: there
// is none.
bool load_mpi(MpiKind first);

// What the MPI calls itself; empty: there is none. This, mpi_problem() and join_mpi() begin with
// load_mpi(MpiKind::open_mpi).
const std::string& mpi_name();
// Why there is none, and what brings it; empty: there is one.
const std::string& mpi_problem();

// The processes that MPI's launcher has started: initialises MPI, which can be done once. A
// UserError where there is none.
std::unique_ptr<Post> join_mpi();

}  // namespace troupe
