#include "comm/join_processes.h"

#include <string>

#include "base/error.h"
#include "comm/mpi_library.h"
#include "comm/post/post_group.h"
#include "comm/post/secret.h"
#include "comm/post/socket_post.h"

namespace troupe {
namespace {

std::unique_ptr<Post> join_over_tcp(RendezvousPoint point, std::chrono::milliseconds limit) {
  try {
    if (point.secret.empty() && point.is_on_one_machine) point.secret = machine_secret();
    return std::make_unique<SocketPost>(point.rank, connect_ranks(point, limit));
  } catch (const UserError& error) {
    const std::string message = error.what();  // empty where another rank says it
    throw UserError(error.status(), message.empty() ? message : message + time_for_logs());
  }
}

}  // namespace

std::unique_ptr<Processes> join_processes(const Launch& launch, std::chrono::milliseconds limit) {
  if (!launch.problem.empty()) throw_bad_request(launch.problem);
  std::unique_ptr<Post> post = launch.point ? join_over_tcp(*launch.point, limit) : join_mpi();
  return std::make_unique<PostProcesses>(std::move(post));
}

}  // namespace troupe
