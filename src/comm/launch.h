// How this process was started: alone, or by a launcher as one rank of several, which leaves its
// rank and where ranks find each other in the environment. What the variables of mpirun, srun and
// torchrun mean.
//
// Pure functions of the variables, which the caller looks up; any thread.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "comm/mpi_library.h"
#include "comm/post/rendezvous.h"

namespace troupe {

// A variable's value; null: it is not set.
using Variables = std::function<const char*(const char* name)>;

struct Launch {
  // None: MPI knows the ranks, and whether there are several.
  std::optional<RendezvousPoint> point;
  // What is wrong with the variables; empty: nothing.
  std::string problem;

  bool is_of_mpi() const { return !point; }
};

// Empty: this process is alone. In this order, as each may stand in what another has started:
// torchrun, which says so; launchers of MPI, where `has_mpi`, which is asked then, says that MPI
// can be loaded (load_mpi()); RANK and WORLD_SIZE by hand or by another launcher; srun without MPI.
std::optional<Launch> find_launch(const Variables& variables,
                                  const std::function<bool(MpiKind)>& has_mpi);

// One of several processes that MPI has not joined, although their launcher is MPI's: there is
// none, or another MPI. What says so, and how many they are.
struct ForeignLaunch {
  std::string source;
  int processes = 1;
};
std::optional<ForeignLaunch> find_foreign_launch(const Variables& variables);

// "node01" of Slurm's "node[01-04,07],gpu3".
std::string first_host(const std::string& host_list);

}  // namespace troupe
