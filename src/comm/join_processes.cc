#include "comm/join_processes.h"

#include "comm/post/post_group.h"
#include "comm/post/secret.h"
#include "comm/post/socket_post.h"
#ifdef TROUPE_WITH_MPI
#include "comm/mpi/mpi_post.h"
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

std::unique_ptr<Post> join_over_tcp(RendezvousPoint point, std::chrono::milliseconds limit) {
  if (point.secret.empty() && point.is_on_one_machine) point.secret = machine_secret();
  return std::make_unique<SocketPost>(point.rank, connect_ranks(point, limit));
}

}  // namespace

std::unique_ptr<Processes> join_processes(const Launch& launch, std::chrono::milliseconds limit) {
  if (!launch.problem.empty()) throw_bad_request(launch.problem);
  std::unique_ptr<Post> post = launch.point ? join_over_tcp(*launch.point, limit) : join_mpi();
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
