#include "parallel/processes.h"

#ifdef TROUPE_WITH_MPI
#include "parallel/mpi/mpi_group.h"
#include "parallel/mpi/mpi_post.h"
#endif

namespace troupe {

#ifdef TROUPE_WITH_MPI

std::unique_ptr<Processes> join_processes() {
  return std::make_unique<MpiProcesses>();
}

std::string mpi_library() {
  return MpiPost::library();
}

#else

std::unique_ptr<Processes> join_processes() {
  throw_bad_request(
      "this build has no MPI, so ranks cannot be processes. Install libopenmpi-dev and build "
      "again, or run the ranks as threads of one process: --ranks N.");
}

std::string mpi_library() {
  return {};
}

#endif

}  // namespace troupe
