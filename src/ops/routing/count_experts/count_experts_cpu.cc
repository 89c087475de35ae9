#include "ops/cpu/expert_slots.h"
#include "ops/routing/count_experts/count_experts.h"
#include "program/kernel.h"

namespace troupe {
namespace {

// count_slots of those of the slots [begin, end) whose tokens count.
void count_valid_slots(const int32_t* indices, const int32_t* mask, int64_t top_k, int64_t begin,
                       int64_t end, int32_t experts, int32_t* histogram) {
  std::fill_n(histogram, experts, 0);
  for (int64_t slot = begin; slot < end; ++slot) {
    const int32_t expert = indices[slot];
    if (expert >= 0 && expert < experts && mask[slot / top_k] != 0) ++histogram[expert];
  }
}

}  // namespace

void count_experts_cpu(const KernelArguments& args) {
  const auto& attributes = args.attributes->as<CountExpertsAttributes>();
  const int32_t experts = attributes.experts;
  const int64_t top_k = args.input(0).shape[1];
  const int64_t tokens = args.input(0).shape[0];
  const int64_t sequence_tokens =
      attributes.sequence_tokens > 0 ? attributes.sequence_tokens : tokens / attributes.sequences;
  const int64_t first = attributes.first_token;
  const int64_t chunks = slot_chunks(sequence_tokens * top_k);
  const auto* indices = args.in<int32_t>(0);
  const auto* previous = args.in<int32_t>(1);
  const auto* mask = args.inputs.size() > 2 ? args.in<int32_t>(2) : nullptr;
  auto* counts = args.out<int32_t>(0);
  auto* histograms = reinterpret_cast<int32_t*>(args.workspace);

  args.pool->parallel_for(attributes.sequences * chunks, [=](int64_t piece, int) {
    const int64_t sequence = piece / chunks;
    // Slots of the sequence that are here.
    const int64_t begin = std::max<int64_t>(0, sequence * sequence_tokens - first) * top_k;
    const int64_t end = std::min(tokens, (sequence + 1) * sequence_tokens - first) * top_k;
    const int64_t at = begin + piece % chunks * kSlotChunk;
    const int64_t count = std::max<int64_t>(0, std::min(kSlotChunk, end - at));
    int32_t* const own = histograms + piece * experts;
    if (mask == nullptr) {
      count_slots(indices + at, count, experts, own);
    } else {
      count_valid_slots(indices, mask, top_k, at, at + count, experts, own);
    }
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
