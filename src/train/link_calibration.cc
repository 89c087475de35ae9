#include "train/link_calibration.h"

#include <algorithm>
#include <array>
#include <span>
#include <utility>

#include "base/error.h"
#include "ops/exchange/all_gather/all_gather.h"
#include "ops/exchange/reduce_scatter/reduce_scatter.h"
#include "ops/exchange/sum_over_ranks/sum_over_ranks.h"
#include "parallel/layout.h"
#include "parallel/rank_communicators.h"
#include "plan/link_traffic.h"
#include "plan/step_time.h"
#include "runtime/device_memory.h"
#include "train/program_meter.h"
#include "train/rank_hardware.h"

namespace troupe {
namespace {

constexpr int kRepeats = 8;  // of a collective, so that coming late to the first one counts little
constexpr std::array<int64_t, 3> kBytes = {16 << 10, 256 << 10, 4 << 20};  // of a rank's tensor
constexpr std::array<int64_t, 4> kBytesOfGpu = {64 << 10, 1 << 20, 16 << 20, 64 << 20};
constexpr std::array<std::string_view, 3> kKinds = {"all_gather", "reduce_scatter",
                                                    "sum_over_ranks"};
constexpr double kShareOfNetwork = 1;

std::span<const int64_t> sizes_of(Device device) {
  if (device == Device::cuda) return kBytesOfGpu;
  return kBytes;
}

int32_t ranks_of_machine(const ProcessGroup& group) {
  return static_cast<int32_t>(group.ranks_of_machine().size());
}

// Ranks of a machine are those of `tp`, ranks at the same place of all machines those of `dp`.
Layout layout_of(const ProcessGroup& group) {
  const int32_t of_machine = ranks_of_machine(group);
  const std::vector<int32_t>& machines = group.machine_of_rank();
  for (int32_t rank = 0; rank < group.size(); ++rank) {
    if (group.size() % of_machine == 0 &&
        machines[static_cast<size_t>(rank)] == rank / of_machine * of_machine) {
      continue;
    }
    throw_bad_request(
        "--calibrate: links are measured where each machine has as many ranks as the others, and "
        "they are numbered machine by machine.");
  }
  return Layout({.world_size = group.size(), .tensor_parallel = of_machine});
}

void add_times(const Program& program, const StepProfile& profile, int32_t ranks, uint64_t bytes,
               LinkCalibration& link) {
  for (const std::string_view kind : kKinds) {
    for (int32_t index = 0; index < program.op_count(); ++index) {
      const Op& op = program.op(index);
      if (op.spec->name != kind) continue;
      const LinkTraffic sent = link_traffic(OpView{program, op}, ranks);
      link.times.push_back({.kind = kind,
                            .bytes = bytes,
                            .sent_bytes = sent.bytes,
                            .rounds = sent.messages / (ranks - 1),
                            .seconds = time_of(profile, kind).seconds / kRepeats});
      break;
    }
  }
}

LinkCalibration measure_link(ProgramMeter& meter, RankGroup kind, int32_t ranks,
                             const std::function<void()>& done) {
  LinkCalibration link{.ranks = ranks};
  for (const int64_t bytes : sizes_of(meter.device())) {
    const auto elements = bytes / static_cast<int64_t>(sizeof(float));
    meter.profile(
        {{.name = "x", .shape = {elements / 64, 64}}},
        [&](Builder& builder, const std::vector<ValueId>& values) {
          ValueId x = values[0];
          for (int i = 0; i < kRepeats; ++i) {
            const ValueId all = all_gather(builder, x, {.group = kind, .ranks = ranks}, "all");
            const ValueId part =
                reduce_scatter(builder, all, {.group = kind, .ranks = ranks}, "part");
            x = sum_over_ranks(builder, part, {.group = kind}, "sum");
          }
          return x;
        },
        [&](const Program& program, const StepProfile& profile) {
          add_times(program, profile, ranks, static_cast<uint64_t>(bytes), link);
        });
    done();
  }
  return link;
}

}  // namespace

void fit_link(double share, LinkCalibration& link) {
  TROUPE_CHECK(!link.times.empty(), "times to fit to");
  const auto [least, most] = std::minmax_element(
      link.times.begin(), link.times.end(),
      [](const CollectiveTime& a, const CollectiveTime& b) { return a.bytes < b.bytes; });
  const auto median_of = [&](uint64_t bytes, const auto& value) {
    std::vector<double> values;
    for (const CollectiveTime& time : link.times) {
      if (time.bytes == bytes) values.push_back(value(time));
    }
    return median(std::move(values));
  };
  constexpr double kLeastPart = 0.05;  // of a time that is not latency
  link.latency = 0;
  // Each is found with the other; twice is enough where the sizes are far apart.
  for (int pass = 0; pass < 2; ++pass) {
    link.bandwidth = median_of(most->bytes, [&](const CollectiveTime& time) {
      const double seconds =
          std::max(time.seconds - time.rounds * link.latency, kLeastPart * time.seconds);
      return time.sent_bytes / seconds / share;
    });
    link.latency = median_of(least->bytes, [&](const CollectiveTime& time) {
      const double seconds = time.seconds - time.sent_bytes / (link.bandwidth * share);
      return std::max(seconds, 0.0) / time.rounds;
    });
  }
}

uint64_t link_programs(const DeviceSpec& spec, const ProcessGroup& group) {
  const int32_t of_machine = ranks_of_machine(group);
  const int links = (of_machine > 1 ? 1 : 0) + (of_machine < group.size() ? 1 : 0);
  return static_cast<uint64_t>(links) * sizes_of(spec.device).size();
}

LinkCalibrations measure_links(const DeviceSpec& spec, ProcessGroup& group, int32_t rank,
                               const std::function<void()>& done) {
  const Layout layout = layout_of(group);
  int gpu = 0;
  if (spec.device == Device::cuda) {
    gpu = gpu_of_rank(&group, rank, spec.ranks_per_gpu);
    require_own_gpu(group, rank, gpu_identity(gpu), spec.ranks_per_gpu);
  }
  ProgramMeter meter(spec.device, gpu, threads_of_rank(spec, &group),
                     communicators_of(group, layout, rank));
  LinkCalibrations links;
  if (layout.tp() > 1) {
    links.within_machine = measure_link(meter, RankGroup::tp, layout.tp(), done);
    fit_link(kShareOfCollectivesAlone, *links.within_machine);
  }
  if (layout.dp() > 1) {
    links.across_machines = measure_link(meter, RankGroup::dp, layout.dp(), done);
    fit_link(kShareOfNetwork, *links.across_machines);
  }
  return links;
}

}  // namespace troupe
