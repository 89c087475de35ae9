#include <algorithm>
#include <numeric>

#include "ops/experts/expert_rows/expert_rows.h"
#include "program/kernel.h"

namespace troupe {
namespace {

constexpr int64_t kIndexGrain = 16384;  // slots

// Copies the slots from `first` to `last`, and puts -1 elsewhere.
void keep_slots(const KernelArguments& args, int64_t first, int64_t last) {
  const auto* indices = args.in<int32_t>(0);
  auto* kept = args.out<int32_t>(0);
  args.pool->parallel_ranges(args.input(0).shape.elements(), kIndexGrain,
                             [=](int64_t begin, int64_t end, int) {
                               for (int64_t slot = begin; slot < end; ++slot) {
                                 kept[slot] = slot >= first && slot < last ? indices[slot] : -1;
                               }
                             });
}

}  // namespace

void limit_expert_rows_cpu(const KernelArguments& args) {
  const auto& attributes = args.attributes->as<LimitExpertRowsAttributes>();
  const auto* loads = args.in<int32_t>(1);
  const int64_t experts = args.input(1).shape[0] / attributes.parts;
  int32_t fullest = 0;
  for (int32_t part = 0; part < attributes.parts; ++part) {
    const int32_t* first = loads + part * experts;
    fullest = std::max(fullest, std::accumulate(first, first + experts, int32_t{0}));
  }
  const bool is_over = fullest > attributes.rows;
  *args.out<int32_t>(1) = is_over ? 1 : 0;
  *args.out<int32_t>(2) = fullest;
  keep_slots(args, 0, is_over ? 0 : args.input(0).shape.elements());
}

void keep_tokens_cpu(const KernelArguments& args) {
  const auto& attributes = args.attributes->as<KeepTokensAttributes>();
  const int64_t top_k = args.input(0).shape[1];
  keep_slots(args, attributes.first * top_k, (attributes.first + attributes.count) * top_k);
}

}  // namespace troupe
