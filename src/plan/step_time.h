// How long a training step takes on a cluster: the programs of one rank of each place in the
// pipeline, carried out on queues and links.
//
// An operation begins when its queue is free, the operations of other queues that it waits for
// (passes/queue_events.h) have ended, and, of a message or of a collective that spans the pipeline,
// the other ranks are there. It takes its own time (kernel_rates.h), of a collective at least that
// of its link: bytes to ranks that NVLink joins over its bandwidth, all others over the network's,
// whichever takes longer, and a latency for each round. Ranks that differ in nothing but their data
// are taken to arrive together, and no rank is slower than another. An exchange over NVLink takes
// as much time from the compute queue as it runs beside it, unless it is beside a product that
// leaves it multiprocessors. Collectives of two queues that take the same kind of link take turns;
// messages, copies and other ranks do not slow them down.
// How fast an exchange is does not depend on how many multiprocessors it has.
//
// Where the loads of experts are not even (GpuCluster::expert_load), each layer's rows are those of
// its fullest rank, for which the others wait at the exchanges before and after the experts: its
// load times the expected ones, up to as many as there is room for. What the rank receives grows by
// as much, which is too much where a token has several of its experts: it goes there once.
//
// Pure functions; any thread.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/layout.h"
#include "passes/queue_events.h"
#include "plan/gpu_cluster.h"
#include "plan/kernel_rates.h"
#include "program/op_spec.h"

namespace troupe {

// Of NVLink's bandwidth between two GPUs: what exchanges of rows with the ranks of their experts
// reach in a step, and all other collectives; and what those reach with nothing beside them.
inline constexpr double kShareOfRows = 0.5;
inline constexpr double kShareOfCollectives = 0.72;
inline constexpr double kShareOfCollectivesAlone = 0.84;

// Of collectives; messages of a pipeline have times of their own.
enum class Link : uint8_t { none, nvlink, network };
inline constexpr int kLinkCount = static_cast<int>(Link::network) + 1;

struct TimedOperation {
  double seconds = 0;
  Queue queue = Queue::compute;
  TimePart part = TimePart::memory_bound;
  RankGroup group = RankGroup::world;  // of an exchange
  bool spans_pipeline = false;         // a collective of ranks at several places
  Link link = Link::none;              // that a collective takes
  bool leaves_room = false;            // of the compute queue: no exchange slows it down
  int32_t peer = -1;                   // of a message: the other rank's place in the pipeline
  MessageUse::Action action = MessageUse::Action::send;
};

// A rank's program with the time of each operation.
struct TimedProgram {
  int32_t place = 0;  // in the pipeline
  std::vector<TimedOperation> operations;
  std::vector<QueueEvent> events;
  bool is_serial = false;  // one operation runs at a time, whatever their queues: on a CPU
  double seconds() const;  // of all operations of the compute queue
};
TimedProgram time_program(const Program& program, const MemoryPlan& memory,
                          const GpuCluster& cluster, const Layout& layout, int32_t rank);

// Of all operations of each kind, whatever they wait for and run beside.
std::map<std::string_view, double> seconds_of_kinds(const Program& program,
                                                    const TimedProgram& timed);

// Where the time of a step goes, on average over the places of the pipeline. The parts add up.
struct StepTime {
  double seconds = 0;
  std::array<double, kTimePartCount> compute{};   // of the compute queue, by what limits it
  std::array<double, kRankGroupCount> exposed{};  // it waits for an exchange of the group
  double bubble = 0;                              // it waits for other places of the pipeline
  double copies = 0;                              // it waits for copies from or to the host
  double idle = 0;                                // between operations

  double exposed_seconds() const;
  double products() const;  // compute in matrix products, attention included
  double memory() const;    // compute bound by memory
};

// What takes the largest part: "compute", "memory bandwidth", "communication", "pipeline" or
// "host".
std::string_view limit_of(const StepTime& time);

// Of one rank of each place, in their order; each place is there once.
StepTime simulate_step(std::span<const TimedProgram* const> programs, double launch_seconds);

// The same of the slowest rank of each of N places; each place is there at least once.
StepTime simulate_slowest(std::span<const TimedProgram* const> programs, int32_t places,
                          double launch_seconds);

// Of one rank as if it never waited for other places of the pipeline: to compare programs that do
// the same work.
double seconds_alone(TimedProgram program, double launch_seconds);

}  // namespace troupe
