// How processes that were started one by one find each other and connect, each with every other
// one over TCP.
//
// One of them, the server, listens where all know it: at the address and port that the launcher has
// told them. The others connect there, say who they are and where they listen themselves; when all
// have come, the server sends everybody the list of members, and each connects to the ranks below
// its own. On every connection both sides prove that they have the run's secret (handshake.h). Who
// does not is turned away; what says nothing for a few seconds is, too, and delays no rank.
//
// Sockets listen on the addresses that the ranks use, not on all of the machine. Without a secret
// everybody who reaches these and knows the run's name can take part.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "comm/post/socket.h"

namespace troupe {

// What a process knows of the others before it has found them. The same for all but `rank` and
// `may_serve`.
struct RendezvousPoint {
  int rank = 0;
  int size = 1;
  std::string address;          // of the server, or its machine's name
  std::vector<uint16_t> ports;  // the server takes the first that is free
  std::string run;              // what this run alone has
  std::string secret = {};      // empty: none
  // One process is the server: the one that may be; or, of several that may be only on the machine
  // with the address, the first to come there.
  bool may_serve = false;
  bool serves_only_at_address = false;
  bool is_on_one_machine = false;  // are all processes, as far as the launcher says?
};

struct Connections {
  std::vector<Socket> sockets;                    // by rank; none to this one itself
  std::vector<int32_t> machine_of_rank;           // by rank: the first one on its machine
  std::vector<std::string> process_of_rank = {};  // by rank: "node1, process 4711"
};

// How long the processes wait for each other unless they are told otherwise.
inline constexpr std::chrono::milliseconds kRendezvousLimit{60'000};

// Connects this process with all others, which must call it, too. A UserError says who is missing
// after `limit` and where the server was expected; at once, that the port is taken, that a rank has
// another secret, or was started as one of another number of ranks. It has no text in processes
// that were told so by the server, which says it.
Connections connect_ranks(const RendezvousPoint& point,
                          std::chrono::milliseconds limit = kRendezvousLimit);

}  // namespace troupe
