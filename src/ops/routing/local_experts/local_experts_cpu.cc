#include "ops/routing/local_experts/local_experts.h"

namespace troupe {
namespace {

constexpr int64_t kLocalExpertsGrain = 8192;  // slots

}  // namespace

void local_experts_cpu(const KernelArguments& args) {
  const auto attributes = args.attributes->as<LocalExpertsAttributes>();
  const TensorView& indices = args.input(0);
  const int64_t top_k = indices.shape[1];
  const auto* chosen = args.in<int32_t>(0);
  const auto* received = args.in<int32_t>(1);
  auto* local = args.out<int32_t>(0);
  const int64_t rows = indices.shape[0];
  const int64_t live = indices.rows();
  const int64_t block = received != nullptr ? rows / args.input(1).shape[0] : rows;
  const int64_t grain = std::max<int64_t>(1, kLocalExpertsGrain / top_k);
  args.pool->parallel_ranges(rows, grain, [=](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      const bool is_live =
          row < live && (received == nullptr || row % block < received[row / block]);
      for (int64_t slot = row * top_k; slot < (row + 1) * top_k; ++slot) {
        local[slot] = -1;
        if (!is_live) continue;
        const int32_t expert = chosen[slot] - attributes.first;
        if (chosen[slot] >= 0 && expert >= 0 && expert < attributes.count) local[slot] = expert;
      }
    }
  });
}

}  // namespace troupe
