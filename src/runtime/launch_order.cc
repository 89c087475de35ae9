#include "runtime/launch_order.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <tuple>

#include "passes/memory_plan.h"

namespace troupe {

LaunchOrder::LaunchOrder(const Program& program, std::span<const LaunchRecord> attributed) {
  std::array<int64_t, kQueueCount> places{};
  for (const LaunchRecord& record : attributed) {
    const Queue queue = record.op < 0 ? Queue::compute : program.op(record.op).place.queue;
    const auto number = static_cast<size_t>(queue);
    std::vector<Launches>& all = by_name_[record.name];
    auto found = std::find_if(all.begin(), all.end(),
                              [&](const Launches& each) { return each.queue == number; });
    if (found == all.end()) found = all.insert(all.end(), Launches{number, {}, {}});
    found->ops.push_back(record.op);
    found->places.push_back(places[number]++);
  }
}

void LaunchOrder::attribute(std::span<LaunchRecord> records) const {
  std::map<const Launches*, size_t> seen;
  std::array<int64_t, kQueueCount> reached{};  // place on each queue
  for (LaunchRecord& record : records) {
    const auto known = by_name_.find(record.name);
    if (known == by_name_.end()) continue;
    const Launches* best = nullptr;
    std::tuple<int64_t, int32_t> least;
    for (const Launches& launches : known->second) {
      const size_t next = seen[&launches];
      if (next == launches.ops.size()) continue;
      if (record.op >= 0 && launches.ops[next] != record.op) continue;
      const int64_t away = std::abs(launches.places[next] - reached[launches.queue]);
      const std::tuple distance(away, launches.ops[next]);
      if (best != nullptr && least <= distance) continue;
      best = &launches;
      least = distance;
    }
    if (best == nullptr) continue;
    const size_t next = seen[best]++;
    reached[best->queue] = best->places[next] + 1;
    record.op = best->ops[next];
  }
}

}  // namespace troupe
