// A group of ranks whose GPUs do not reach each other's memory, connected through NCCL: what
// CudaPeers (peers.h) of such a group works with. Only in builds with CUDA.
//
// Collectives have one communicator of NCCL for all members. Messages have one of two ranks for
// each way from a rank to another one, with a stream of its own for the sender: NCCL's sends wait
// for their receivers, and nothing else that the rank does may wait with them. All are made and
// connected in the constructor, so that nothing waits for another host later, when steps run and
// are captured. The destructor synchronises the members, too, and in the same order.
//
// What NCCL waits in without limit there is watched: see Alarm (base/alarm.h).
//
// Everything is launched on the stream of the operation and can be captured. Blocks are copied;
// NCCL sums nothing, since its order of terms is not ours. What the GPU waits in is written down in
// memory of the host (progress), which PeerConnection looks at.
//
// In the first run of a program hosts meet before each exchange, and messages go by way of the
// hosts (see peers.h: no kernel may wait for a rank whose host waits for this GPU).
//
// One thread at a time: the rank's. Errors are UserErrors that name the group and the operation.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "comm/cuda/peer_blocks.h"
#include "program/communicator.h"
#include "program/cuda_kernel.h"

struct ncclComm;    // what ncclComm_t points to
struct CUevent_st;  // what cudaEvent_t points to

namespace troupe {

// No operation waits for another rank.
inline constexpr int32_t kNoProgress = -1;

// Writes a number down, in memory of the host, when everything before it on the stream is done.
void launch_mark(const CudaKernelArguments& args, int32_t* place, int32_t value);

// Shared by a rank's groups: lets the host be no more than a few exchanges ahead of its GPU. Where
// a rank is missing the GPU works no more, and a host that launches more than a stream can hold
// would wait without limit. Does nothing while a stream is captured.
class NcclPace {
 public:
  // `watch` returns when what it is given says anything but cudaErrorNotReady, or throws.
  using Watch = std::function<void(const std::function<int()>& query)>;
  explicit NcclPace(Watch watch) : watch_(std::move(watch)) {}
  ~NcclPace();
  NcclPace(const NcclPace&) = delete;
  NcclPace& operator=(const NcclPace&) = delete;

  // Around what an operation launches.
  void begin(CUstream_st* stream);
  void end(CUstream_st* stream);

 private:
  static constexpr size_t kAhead = 4;
  Watch watch_;
  std::array<CUevent_st*, kAhead> ended_{};
  size_t count_ = 0;
};

class NcclGroup {
 public:
  struct Options {
    std::string name;                      // of the kinds of groups that it is
    Communicator* communicator = nullptr;  // of the hosts
    ThreadPool* pool = nullptr;            // for what they exchange
    bool has_collectives = false;
    // messages[from][to]: how many one run of the ranks' programs sends, by place.
    std::vector<std::vector<int64_t>> messages;
    int32_t* progress = nullptr;  // in memory of the host
    const bool* is_first_run = nullptr;
    NcclPace* pace = nullptr;
  };
  // On the GPU that the calling thread uses. All members must call it at once.
  explicit NcclGroup(Options options);
  ~NcclGroup();
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  const Communicator& communicator() const { return *options_.communicator; }

  // See CudaPeers.
  void exchange(const CudaKernelArguments& args, const CollectiveCall& call,
                std::span<const PeerBlock> sends, std::span<const PeerBlock> receives,
                std::span<const PeerWhole> wholes);
  void send(const CudaKernelArguments& args, const CollectiveCall& call, int to);
  void finish_send(const CudaKernelArguments& args, const CollectiveCall& call, int to);
  void receive(const CudaKernelArguments& args, const CollectiveCall& call, int from);

  // Throws when NCCL has failed since: a network, or a rank, that is gone.
  void check() const;
  // Everything that was launched has ended, on this rank.
  void is_idle() { is_idle_ = true; }
  // Ends what is under way, incomplete. Nothing can be done with the group afterwards. Where NCCL
  // cannot end, this prints the reason, a sentence or several, and ends the process.
  void abort(const std::string& reason);
  // Of a wait that timed out.
  std::string missing_text(const CollectiveCall& call) const;

 private:
  // Messages from this rank to a member, or from it to this one.
  struct Way {
    ncclComm* comm = nullptr;
    CUstream_st* stream = nullptr;
    CUevent_st* posted = nullptr;
    std::vector<CUevent_st*> ended;  // of a run's sends
    size_t sent = 0;
    size_t finished = 0;
    // In the first run.
    std::deque<std::vector<std::byte>> by_host;
  };

  std::string describe() const;
  void require(int result, ncclComm* comm, const std::string& what) const;
  // Every member's `bytes`, by place.
  std::vector<std::byte> gather(const void* bytes, size_t count, const CollectiveCall& call) const;
  ncclComm* make_comm(const void* id, int place, int size, int most_blocks) const;
  void make_ways();
  // Of a call that waits for all members: says so and ends the process if it takes too long.
  std::string alarm_text(const std::string& what) const;
  std::chrono::milliseconds connect_limit() const;
  // Sends and receives a little, which connects.
  void connect(ncclComm* comm, int place, int size, bool gathers) const;
  // Until the stream has done what it was given.
  void wait_for(CUstream_st* stream, const CollectiveCall& call);
  Way& to(int place) { return *to_[static_cast<size_t>(place)]; }
  Way& from(int place) { return *from_[static_cast<size_t>(place)]; }

  Options options_;
  ncclComm* comm_ = nullptr;
  // In one order on all members. To end a communicator synchronises its ranks, too.
  std::vector<std::unique_ptr<Way>> ways_;
  std::vector<Way*> to_;    // by place; null: no messages
  std::vector<Way*> from_;  // by place; null: no messages
  bool is_idle_ = true;
};

}  // namespace troupe
