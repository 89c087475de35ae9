#include "ops/cpu/expert_slots.h"
#include "ops/routing/route/route.h"
#include "program/kernel.h"

namespace troupe {

// Three steps: each chunk of slots counts its slots per expert; one thread lays out the experts'
// rows; each chunk places its slots.
void route_cpu(const KernelArguments& args) {
  const auto& attributes = args.attributes->as<RouteAttributes>();
  const int32_t experts = attributes.experts;
  const int64_t slots = args.input(0).shape.elements();
  const int64_t bound = args.output(2).shape[0];
  const auto* indices = args.in<int32_t>(0);
  auto* counts = args.out<int32_t>(0);
  auto* offsets = args.out<int32_t>(1);
  auto* row_slot = args.out<int32_t>(2);
  auto* slot_row = args.out<int32_t>(3);
  auto* ranks = reinterpret_cast<int32_t*>(args.workspace);

  rank_slots(*args.pool, indices, slots, experts, ranks, counts);

  int64_t row = 0;
  for (int32_t expert = 0; expert < experts; ++expert) {
    int64_t rows = attributes.padded_capacity;
    if (rows == 0) {
      const int64_t multiple = attributes.row_multiple;
      rows = (counts[expert] + multiple - 1) / multiple * multiple;
    }
    rows = std::min(rows, bound - row);
    if (counts[expert] > rows) counts[expert] = static_cast<int32_t>(rows);
    std::fill_n(row_slot + row + counts[expert], rows - counts[expert], -1);
    offsets[expert] = static_cast<int32_t>(row);
    row += rows;
  }
  offsets[experts] = static_cast<int32_t>(row);

  place_slots(*args.pool, indices, slots, experts, ranks,
              [=](int64_t slot, int32_t expert, int32_t rank) {
                if (expert < 0 || rank >= counts[expert]) {
                  slot_row[slot] = -1;
                  return;
                }
                const int32_t target = offsets[expert] + rank;
                row_slot[target] = static_cast<int32_t>(slot);
                slot_row[slot] = target;
              });
}

}  // namespace troupe
