#include "support/interleaving.h"

#include <array>
#include <deque>
#include <random>

#include "base/error.h"
#include "program/op_spec.h"

namespace troupe::testing {

std::vector<int32_t> draw_interleaving(const Program& program, std::span<const QueueEvent> events,
                                       uint32_t seed) {
  std::mt19937 random(seed);
  std::array<std::deque<int32_t>, kQueueCount> queues;
  for (int32_t i = 0; i < program.op_count(); ++i) {
    queues[static_cast<size_t>(program.op(i).place.queue)].push_back(i);
  }
  std::vector<std::vector<int32_t>> waits(static_cast<size_t>(program.op_count()));
  for (const QueueEvent& event : events) {
    waits[static_cast<size_t>(event.after)].push_back(event.before);
  }
  // A rank that runs one operation at a time waits in each that reaches other ranks: these keep
  // their order, so that it is the same on all ranks.
  int32_t last = -1;
  for (int32_t i = 0; i < program.op_count(); ++i) {
    if (program.op(i).spec->group == nullptr) continue;
    if (last >= 0) waits[static_cast<size_t>(i)].push_back(last);
    last = i;
  }
  std::vector<bool> done(waits.size(), false);
  std::vector<int32_t> order;
  size_t current = 0;
  while (order.size() < waits.size()) {
    std::vector<size_t> ready;
    bool current_is_ready = false;
    for (size_t queue = 0; queue < queues.size(); ++queue) {
      if (queues[queue].empty()) continue;
      bool may_run = true;
      for (const int32_t before : waits[static_cast<size_t>(queues[queue].front())]) {
        may_run &= done[static_cast<size_t>(before)];
      }
      if (!may_run) continue;
      ready.push_back(queue);
      current_is_ready |= queue == current;
    }
    TROUPE_CHECK(!ready.empty(), "queues wait for each other");
    switch (seed % 4) {
      case 0:
        current = ready[random() % ready.size()];
        break;
      case 1:
        current = ready.back();
        break;
      case kAsLateAsPossible:
        current = ready.front();
        break;
      default:
        if (!current_is_ready || random() % 16 == 0) current = ready[random() % ready.size()];
    }
    const int32_t op = queues[current].front();
    queues[current].pop_front();
    done[static_cast<size_t>(op)] = true;
    order.push_back(op);
  }
  return order;
}

}  // namespace troupe::testing
