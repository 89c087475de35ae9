#include "ops/count_experts/count_experts.h"
#include "ops/cpu/expert_slots.h"
#include "program/kernel.h"

namespace troupe {

void count_experts_cpu(const KernelArguments& args) {
  const auto& attributes = args.attributes->as<CountExpertsAttributes>();
  const int32_t experts = attributes.experts;
  const int64_t slots = args.input(0).shape.elements() / attributes.sequences;
  const int64_t chunks = slot_chunks(slots);
  const auto* indices = args.in<int32_t>(0);
  const auto* previous = args.in<int32_t>(1);
  auto* counts = args.out<int32_t>(0);
  auto* histograms = reinterpret_cast<int32_t*>(args.workspace);

  args.pool->parallel_for(attributes.sequences * chunks, [=](int64_t piece, int) {
    const int64_t begin = piece % chunks * kSlotChunk;
    count_slots(indices + piece / chunks * slots + begin, std::min(kSlotChunk, slots - begin),
                experts, histograms + piece * experts);
  });
  for (int64_t sequence = 0; sequence < attributes.sequences; ++sequence) {
    for (int64_t expert = 0; expert < experts; ++expert) {
      const int64_t place = sequence * experts + expert;
      int32_t count = previous != nullptr ? previous[place] : 0;
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        count += histograms[(sequence * chunks + chunk) * experts + expert];
      }
      counts[place] = count;
    }
  }
}

}  // namespace troupe
