#include "ops/routing/dispatch_plan/dispatch_plan_cpu.h"

#include <algorithm>

#include "ops/routing/dispatch_plan/dispatch_plan.h"

namespace troupe {

// Each chunk numbers its tokens from 0; then the chunks' first numbers are known and added.
void dispatch_plan_cpu(const KernelArguments& args) {
  const auto attributes = args.attributes->as<DispatchPlanAttributes>();
  const int64_t tokens = args.input(0).shape[0];
  const int64_t top_k = args.input(0).shape[1];
  const int32_t ranks = attributes.ranks();
  const int32_t experts_of_part = attributes.experts / attributes.parts;
  const auto* indices = args.in<int32_t>(0);
  auto* counts = args.out<int32_t>(0);
  auto* slots = args.out<int32_t>(1);
  auto* first = reinterpret_cast<int32_t*>(args.workspace);  // [chunk, rank]

  args.pool->parallel_ranges(tokens, kPlanChunkTokens, [=](int64_t begin, int64_t end, int) {
    int32_t* next = first + begin / kPlanChunkTokens * ranks;
    std::fill_n(next, ranks, 0);
    for (int64_t token = begin; token < end; ++token) {
      int32_t* slot = slots + token * ranks;
      std::fill_n(slot, ranks, -1);
      for (int64_t choice = token * top_k; choice < (token + 1) * top_k; ++choice) {
        const int32_t expert = indices[choice];
        if (expert < 0 || expert >= attributes.experts) continue;
        const int32_t part = expert / experts_of_part * attributes.part_stride;
        for (int32_t slice = 0; slice < attributes.slices; ++slice) {
          const int32_t rank = part + slice * attributes.slice_stride;
          if (slot[rank] < 0) slot[rank] = next[rank]++;
        }
      }
    }
  });

  const int64_t chunks = plan_chunks(tokens);
  for (int32_t rank = 0; rank < ranks; ++rank) {
    int32_t total = 0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      int32_t& cell = first[chunk * ranks + rank];
      const int32_t count = cell;
      cell = total;
      total += count;
    }
    counts[rank] = total;
  }

  args.pool->parallel_ranges(tokens, kPlanChunkTokens, [=](int64_t begin, int64_t end, int) {
    const int32_t* base = first + begin / kPlanChunkTokens * ranks;
    for (int64_t token = begin; token < end; ++token) {
      int32_t* slot = slots + token * ranks;
      for (int32_t rank = 0; rank < ranks; ++rank) {
        if (slot[rank] >= 0) slot[rank] += base[rank];
      }
    }
  });
}

}  // namespace troupe
