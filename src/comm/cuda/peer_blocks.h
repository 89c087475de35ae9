// Pieces of memory that the ranks of a staged group (peers.h) send each other.
#pragma once

#include <cstdint>

namespace troupe {

// Memory of this rank for one member of a staged group, or from it.
struct PeerBlock {
  int place = 0;
  void* data = nullptr;
  int64_t bytes = 0;
};

// A block of each member, all of one size, that all members of a staged group get, by place.
struct PeerWhole {
  const void* own = nullptr;
  void* all = nullptr;  // may contain `own`, at its place
  int64_t bytes = 0;    // of one
};

}  // namespace troupe
