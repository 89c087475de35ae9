#include "train/planned_time.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/error.h"
#include "options/cluster_options.h"
#include "plan/step_time.h"
#include "runtime/device_memory.h"
#include "train/rank_hardware.h"
#include "train/rank_profile.h"

namespace troupe {
namespace {

// Ranks of a run are of one version of Troupe, on machines of one kind.
template <class T>
void append(std::string& bytes, const T* values, size_t count) {
  static_assert(std::is_trivially_copyable_v<T>);
  bytes.append(reinterpret_cast<const char*>(values), count * sizeof(T));
}
template <class T>
void take(std::string_view& bytes, T* values, size_t count) {
  TROUPE_CHECK(bytes.size() >= count * sizeof(T), "the times of a program, as they were sent");
  // An empty list may have no memory.
  if (count > 0) std::memcpy(static_cast<void*>(values), bytes.data(), count * sizeof(T));
  bytes.remove_prefix(count * sizeof(T));
}

std::string to_bytes(const TimedProgram& program) {
  std::string bytes;
  const std::array<uint64_t, 2> counts = {program.operations.size(), program.events.size()};
  append(bytes, counts.data(), counts.size());
  append(bytes, &program.place, 1);
  append(bytes, program.operations.data(), program.operations.size());
  append(bytes, program.events.data(), program.events.size());
  return bytes;
}

TimedProgram from_bytes(std::string_view bytes) {
  TimedProgram program;
  std::array<uint64_t, 2> counts{};
  take(bytes, counts.data(), counts.size());
  take(bytes, &program.place, 1);
  program.operations.resize(counts[0]);
  program.events.resize(counts[1]);
  take(bytes, program.operations.data(), program.operations.size());
  take(bytes, program.events.data(), program.events.size());
  return program;
}

GpuCluster cluster_of(const RankSession& session, const GpuModel& hardware) {
  GpuCluster cluster{.model = hardware, .gpus = session.spec().ranks};
  const auto sharing =
      static_cast<double>(ranks_that_share(session.spec(), session.group(), session.device()));
  for (double* const rate :
       {&cluster.model.bf16_flops, &cluster.model.f32_flops, &cluster.model.f64_flops,
        &cluster.model.memory_bandwidth, &cluster.model.host_bandwidth}) {
    *rate /= sharing;
  }
  const bool spans_nodes = hardware.gpus_per_nvlink > hardware.gpus_per_node;
  cluster.model.gpus_per_node =
      session.group() == nullptr ? 1
                                 : static_cast<int32_t>(session.group()->ranks_of_machine().size());
  if (!spans_nodes) cluster.model.gpus_per_nvlink = cluster.model.gpus_per_node;
  return cluster;
}

bool have_all(const RankSession& session, bool has) {
  const std::vector<uint64_t> votes = session.exchange(has ? 1 : 0);
  return std::all_of(votes.begin(), votes.end(), [](uint64_t vote) { return vote != 0; });
}

}  // namespace

std::optional<GpuModel> hardware_of_run(const std::string& name, const RankSession& session) {
  const bool has_gpu = session.device() == Device::cuda && session.spec().ranks_per_gpu <= 1;
  return hardware_of_machine(name, has_gpu ? std::optional(session.gpu()) : std::nullopt);
}

std::optional<PlannedTime> plan_time(const RankSession& session, const Program& program,
                                     const MemoryPlan& memory,
                                     const std::optional<GpuModel>& hardware) {
  if (!have_all(session, hardware.has_value())) return std::nullopt;
  const Layout& layout = session.layout();
  const TimedProgram own =
      time_program(program, memory, cluster_of(session, *hardware), layout, session.rank());
  std::vector<int32_t> first_ranks;
  for (int32_t place = 0; place < layout.pp(); ++place) {
    first_ranks.push_back(layout.rank_of(DensePlace{.pp = place}));
  }
  std::vector<TimedProgram> programs;
  for (const std::string& bytes : gather_from(session, first_ranks, to_bytes(own))) {
    programs.push_back(from_bytes(bytes));
  }
  if (!session.leads()) return std::nullopt;
  std::vector<const TimedProgram*> places;
  for (const TimedProgram& each : programs) places.push_back(&each);
  return PlannedTime{.seconds = simulate_step(places, hardware->launch_seconds).seconds,
                     .hardware = hardware->name,
                     .of_kinds = seconds_of_kinds(program, own)};
}

}  // namespace troupe
