#include "ops/route/route_cpu.h"

#include "ops/route/route.h"

namespace troupe {

// Three steps: each chunk of tokens counts its slots per expert; one thread turns the counts into
// the first row of every (expert, chunk) pair; each chunk places its slots from there on.
void route_cpu(const KernelArguments& args) {
  const Shape& shape = args.input(0).shape;
  const int64_t tokens = shape[0];
  const int64_t top_k = shape[1];
  const auto experts = args.attributes->as<RouteAttributes>().experts;
  const auto* indices = args.in<int32_t>(0);
  auto* counts = args.out<int32_t>(0);
  auto* offsets = args.out<int32_t>(1);
  auto* row_slot = args.out<int32_t>(2);
  auto* slot_row = args.out<int32_t>(3);
  auto* histograms = reinterpret_cast<int32_t*>(args.workspace);
  const int64_t chunk_slots = route_chunk_tokens(top_k) * top_k;
  const int64_t slots = tokens * top_k;
  const int64_t chunks = route_chunks(tokens, top_k);
  // As unsigned, -1 is beyond every expert.
  const auto limit = static_cast<uint32_t>(experts);

  args.pool->parallel_for(chunks, [&](int64_t chunk, int) {
    int32_t* histogram = histograms + chunk * experts;
    std::fill_n(histogram, experts, 0);
    const int64_t end = std::min(slots, (chunk + 1) * chunk_slots);
    for (int64_t slot = chunk * chunk_slots; slot < end; ++slot) {
      const auto expert = static_cast<uint32_t>(indices[slot]);
      if (expert < limit) ++histogram[expert];
    }
  });

  int32_t row = 0;
  for (int32_t expert = 0; expert < experts; ++expert) {
    offsets[expert] = row;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      int32_t& cell = histograms[chunk * experts + expert];
      const int32_t count = cell;
      cell = row;
      row += count;
    }
    counts[expert] = row - offsets[expert];
  }
  offsets[experts] = row;

  args.pool->parallel_for(chunks, [&](int64_t chunk, int) {
    int32_t* next_row = histograms + chunk * experts;
    const int64_t end = std::min(slots, (chunk + 1) * chunk_slots);
    for (int64_t slot = chunk * chunk_slots; slot < end; ++slot) {
      const auto expert = static_cast<uint32_t>(indices[slot]);
      if (expert < limit) {
        const int32_t target = next_row[expert]++;
        row_slot[target] = static_cast<int32_t>(slot);
        slot_row[slot] = target;
      } else {
        slot_row[slot] = -1;
      }
    }
  });
}

}  // namespace troupe
