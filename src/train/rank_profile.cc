#include "train/rank_profile.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <span>
#include <utility>

#include "base/error.h"
#include "train/rank_hardware.h"

namespace troupe {

ProfileLimits measure_limits_of_rank(const RankSession& session, DType compute_dtype) {
  ProfileLimits limits;
  if (session.leads()) {
    const DeviceSpec& spec = session.spec();
    ThreadPool all_threads(spec.thread_count());
    const auto sharing = static_cast<double>(ranks_that_share(spec, session.group(), spec.device));
    limits = measure_limits(compute_dtype, all_threads, spec.device);
    limits.flops /= sharing;
    limits.copy_bytes /= sharing;
  }
  const auto of_rank_0 = [&](double value) {
    return std::bit_cast<double>(session.exchange(std::bit_cast<uint64_t>(value)).front());
  };
  limits.flops = of_rank_0(limits.flops);
  limits.copy_bytes = of_rank_0(limits.copy_bytes);
  return limits;
}

void add_profiled_run(Interpreter& interpreter, const RankSession& session, StepProfile& profile) {
  using Clock = std::chrono::steady_clock;
  if (session.group() == nullptr) return profile.add(interpreter.run_profiled());
  session.barrier();
  const auto begin = static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch())
          .count());
  std::vector<WorkSpan> spans = interpreter.run_profiled();
  const std::vector<uint64_t> begins = session.exchange(begin);
  uint64_t first = begin;
  for (const int32_t other : session.group()->ranks_of_machine()) {
    first = std::min(first, begins[static_cast<size_t>(other)]);
  }
  profile.add(std::move(spans), static_cast<double>(begin - first) * 1e-9);
}

std::vector<std::string> gather_from(const RankSession& session, const std::vector<int32_t>& chosen,
                                     const std::string& text) {
  if (session.group() == nullptr) return {text};
  const int32_t rank = session.rank();
  const bool is_chosen = std::find(chosen.begin(), chosen.end(), rank) != chosen.end();
  const std::vector<std::string> all =
      session.group()->gather(rank, is_chosen ? text : std::string());
  std::vector<std::string> gathered;
  for (const int32_t each : chosen) {
    if (!all.empty()) gathered.push_back(all[static_cast<size_t>(each)]);
  }
  return gathered;
}

WrittenTimelines write_timelines(const RankSession& session, const std::string& folder,
                                 int64_t step, const std::vector<int32_t>& chosen,
                                 const StepProfile& profile) {
  const auto path = [&](const std::string& whose) {
    return fmt::format("{}/{}_step{}.json", folder, whose, step);
  };
  const int32_t rank = session.rank();
  const std::string events = profile.timeline_events(rank);
  std::string fault;
  const auto write = [&](const std::string& whose, std::span<const std::string> all) {
    try {
      write_timeline(path(whose), all);
    } catch (const UserError& error) {
      fault = error.what();
    }
  };
  if (std::find(chosen.begin(), chosen.end(), rank) != chosen.end()) {
    write(fmt::format("rank{}", rank), {&events, 1});
  }
  if (chosen.size() > 1) {
    const std::vector<std::string> all = gather_from(session, chosen, events);
    if (rank == 0) write("ranks", all);
  }
  if (session.group() != nullptr) {
    std::string first;
    for (const std::string& each : session.group()->gather(rank, fault)) {
      if (first.empty()) first = each;
    }
    fault = first;
  }
  if (rank != 0) return {};
  if (chosen.size() == 1) {
    return {.note = fmt::format("step {} of rank {}: timeline in {}", step, chosen.front(),
                                path(fmt::format("rank{}", chosen.front()))),
            .fault = fault};
  }
  return {.note = fmt::format("step {} of the ranks {}: timelines in {}, all together in {}", step,
                              fmt::join(chosen, ", "), path("rank<R>"), path("ranks")),
          .fault = fault};
}

}  // namespace troupe
