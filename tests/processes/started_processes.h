// The other processes of a test program, however they were started.
#pragma once

#include <cstdlib>
#include <memory>

#include "comm/join_processes.h"
#include "comm/launch.h"

namespace troupe {

inline std::unique_ptr<Processes> join_started_processes() {
  const auto launch = find_launch([](const char* name) { return std::getenv(name); }, load_mpi);
  TROUPE_CHECK(launch.has_value(), "this program is started as several processes");
  return join_processes(*launch);
}

}  // namespace troupe
