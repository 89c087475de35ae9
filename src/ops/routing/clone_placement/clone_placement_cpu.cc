#include <algorithm>
#include <numeric>
#include <span>
#include <vector>

#include "ops/cpu/expert_slots.h"
#include "ops/routing/clone_placement/clone_placement.h"
#include "program/kernel.h"

namespace troupe {

namespace {

// What is written: of each place for a copy, slot, and rank, and how many places of a rank are
// used.
struct PlacedClones {
  int32_t* experts;
  int32_t* slot_loads;
  int32_t* rows;
  int32_t* used;
};

void place(const int32_t* loads, int64_t count, const ClonePlacementAttributes& attributes,
           const PlacedClones& placed) {
  const auto [parts, clones] = attributes;
  const auto [experts, slot_loads, rows, used] = placed;
  const int64_t own = count / parts;
  const int64_t slots = own + clones;

  std::fill_n(experts, parts * clones, -1);
  std::fill_n(used, parts, 0);
  for (int32_t rank = 0; rank < parts; ++rank) {
    const int32_t* of_rank = loads + rank * own;
    std::fill_n(std::copy_n(of_rank, own, slot_loads + rank * slots), clones, 0);
    rows[rank] = std::accumulate(of_rank, of_rank + own, int32_t{0});
  }
  const int64_t sum = std::accumulate(rows, rows + parts, int64_t{0});
  const auto mean = static_cast<int32_t>((sum + parts - 1) / parts);
  const int32_t least = std::max(1, mean / kLeastShareOfMean);

  while (true) {
    const int64_t fullest = std::max_element(rows, rows + parts) - rows;
    int64_t emptiest = -1;
    for (int32_t rank = 0; rank < parts; ++rank) {
      if (used[rank] < clones && (emptiest < 0 || rows[rank] < rows[emptiest])) emptiest = rank;
    }
    if (emptiest < 0) return;
    int32_t* const here = slot_loads + fullest * slots;
    int32_t* const hottest = std::max_element(here, here + own);
    const int32_t moved = std::min({rows[fullest] - mean, mean - rows[emptiest], *hottest});
    if (moved < least) return;
    const int32_t place = used[emptiest]++;
    experts[emptiest * clones + place] = static_cast<int32_t>(fullest * own + (hottest - here));
    slot_loads[emptiest * slots + own + place] = moved;
    *hottest -= moved;
    rows[fullest] -= moved;
    rows[emptiest] += moved;
  }
}

}  // namespace

void place_clones_cpu(const KernelArguments& args) {
  const auto& attributes = args.attributes->as<ClonePlacementAttributes>();
  auto* rows = reinterpret_cast<int32_t*>(args.workspace);
  place(args.in<int32_t>(0), args.input(0).shape[0], attributes,
        {.experts = args.out<int32_t>(0),
         .slot_loads = args.out<int32_t>(1),
         .rows = rows,
         .used = rows + attributes.parts});
}

std::vector<int32_t> rows_with_clones(std::span<const int32_t> loads,
                                      const ClonePlacementAttributes& attributes) {
  const auto parts = static_cast<size_t>(attributes.parts);
  std::vector<int32_t> experts(parts * static_cast<size_t>(attributes.clones));
  std::vector<int32_t> slot_loads(loads.size() + experts.size());
  std::vector<int32_t> rows(parts);
  std::vector<int32_t> used(parts);
  place(loads.data(), static_cast<int64_t>(loads.size()), attributes,
        {.experts = experts.data(),
         .slot_loads = slot_loads.data(),
         .rows = rows.data(),
         .used = used.data()});
  return rows;
}

void spread_over_clones_cpu(const KernelArguments& args) {
  const auto& attributes = args.attributes->as<ClonePlacementAttributes>();
  const int32_t clones = attributes.clones;
  const int32_t all_clones = attributes.parts * clones;
  const auto experts = static_cast<int32_t>(args.input(1).shape[0]);
  const int32_t own = experts / attributes.parts;
  const int64_t choices = args.input(0).shape.elements();
  const auto* indices = args.in<int32_t>(0);
  const auto* running = args.in<int32_t>(1);
  const auto* expert_of_clone = args.in<int32_t>(2);
  const auto* slot_loads = args.in<int32_t>(3);
  auto* slots = args.out<int32_t>(0);
  auto* ranks = reinterpret_cast<int32_t*>(args.workspace);
  int32_t* const counts = ranks + slot_chunks(choices) * experts;

  rank_slots(*args.pool, indices, choices, experts, ranks, counts);
  place_slots(*args.pool, indices, choices, experts, ranks,
              [=](int64_t choice, int32_t expert, int32_t rank) {
                if (expert < 0) {
                  slots[choice] = -1;
                  return;
                }
                // The row's number among those of its expert that the slots so far do not take.
                int32_t row = running[expert] - counts[expert] + rank;
                int32_t slot = expert / own * (own + clones) + expert % own;
                for (int32_t clone = 0; row >= slot_loads[slot] && clone < all_clones; ++clone) {
                  if (expert_of_clone[clone] != expert) continue;
                  row -= slot_loads[slot];
                  slot = clone / clones * (own + clones) + own + clone % clones;
                }
                slots[choice] = slot;
              });
}

}  // namespace troupe
