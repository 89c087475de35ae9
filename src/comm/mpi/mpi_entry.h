// What a library for one kind of MPI gives the program that loads it (comm/mpi_library.h).
#pragma once

#include <string>

#include "comm/post/post.h"

namespace troupe {

struct MpiEntry {
  // What the MPI calls itself. Needs no Post.
  std::string (*name)();
  // A new MpiPost, the caller's. UserErrors pass through.
  Post* (*join)();
};

// Its symbol.
inline constexpr const char* kMpiEntryName = "troupe_mpi_entry";

}  // namespace troupe
