// How processes that were started one by one find each other and connect, each with every other
// one over TCP.
//
// One of them, the host, listens where all know it: at the address and port that the launcher has
// told them. The others come there and say who they are and where they listen themselves; when all
// have come, the host gives everybody the list. Who comes without the run's name is a stranger and
// is turned away, by the host and, with a random number that the list carries, by all others.
//
// The network is trusted beyond that, as MPI and NCCL trust theirs: nothing is encrypted.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "parallel/post/socket.h"

namespace troupe {

// What a process knows of the others before it has met them. The same for all but `rank` and
// `may_host`.
struct MeetingPlace {
  int rank = 0;
  int size = 1;
  std::string address;          // of the host, or its machine's name
  std::vector<uint16_t> ports;  // the host takes the first that is free
  std::string run;              // what this run alone has
  // One process is the host: the one that may be; or, of several that may be only on the machine
  // with the address, the first to come there.
  bool may_host = false;
  bool hosts_only_at_address = false;
};

struct Connections {
  std::vector<Socket> sockets;           // by rank; none to this one itself
  std::vector<int32_t> machine_of_rank;  // by rank: the first one on its machine
};

// How long the processes wait for each other.
inline constexpr std::chrono::milliseconds kMeetingLimit{60'000};

// Connects this process with all others, which must call it, too. A UserError says who is missing
// after `limit` and where all were to meet. It has no text in processes that were told so by the
// host, which says it.
Connections meet(const MeetingPlace& place, std::chrono::milliseconds limit = kMeetingLimit);

}  // namespace troupe
