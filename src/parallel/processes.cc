#include "parallel/processes.h"

#include "parallel/post/post_group.h"
#include "parallel/post/socket_post.h"
#ifdef TROUPE_WITH_MPI
#include "parallel/mpi/mpi_post.h"
#endif

namespace troupe {
namespace {

std::unique_ptr<Post> join_mpi() {
#ifdef TROUPE_WITH_MPI
  return std::make_unique<MpiPost>();
#else
  throw_bad_request("this build has no MPI.");
#endif
}

}  // namespace

std::unique_ptr<Processes> join_processes(const Launch& launch) {
  if (!launch.problem.empty()) throw_bad_request(launch.problem);
  std::unique_ptr<Post> post;
  if (launch.place) {
    post = std::make_unique<SocketPost>(launch.place->rank, meet(*launch.place));
  } else {
    post = join_mpi();
  }
  return std::make_unique<PostProcesses>(std::move(post));
}

std::string mpi_library() {
#ifdef TROUPE_WITH_MPI
  return MpiPost::library();
#else
  return {};
#endif
}

bool has_mpi() {
#ifdef TROUPE_WITH_MPI
  return true;
#else
  return false;
#endif
}

}  // namespace troupe
