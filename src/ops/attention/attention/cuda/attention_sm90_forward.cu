// The forward pass of attention on Hopper. See attention_sm90.cuh.
#include "ops/attention/attention/cuda/attention_sm90.cuh"

namespace troupe {
namespace {

template <class Sizes>
using ForwardCut = AttentionCut<Sizes::kKey, Sizes::kValue, false, 128, 2>;

// A block for 128 queries of one head.
template <class Sizes>
__global__ void __launch_bounds__(kAttentionThreads, 1)
    forward_kernel(const __grid_constant__ CUtensorMap q_map,
                   const __grid_constant__ CUtensorMap k_map,
                   const __grid_constant__ CUtensorMap v_map, Bf16* out, float* lse,
                   const __grid_constant__ AttentionSizes sizes) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Cut = ForwardCut<Sizes>;
  const AttentionShared<Cut> shared = open_shared<Cut>();
  const auto head = static_cast<int>(blockIdx.y);
  const int group = head / (sizes.heads / sizes.groups);
  const int64_t b = blockIdx.z;
  const QueryBlock<Cut::kRows> block(sizes, b);
  const ThreadPlace place;
  Ring<Cut> ring(shared);
  if (place.group == kMathGroups) {
    sm90::release_registers<kLoaderRegisters>();
    if (threadIdx.x != kMathGroups * 128) return;
    sm90::barrier_arrive_expecting(shared.loaded(), Cut::FixedKeys::kBytes);
    Cut::FixedKeys::load(q_map, shared.loaded(), shared.fixed_keys(), head, block.tile.row, b);
    for (int64_t tile = block.begin; tile < block.end; ++tile) {
      ring.fill(Cut::kStageBytes, [&](uint32_t barrier, int stage) {
        Cut::Keys::load(k_map, barrier, shared.keys(stage), group, tile * Cut::kRows, b);
        Cut::Values::load(v_map, barrier, shared.values(stage), group, tile * Cut::kRows, b);
      });
    }
    return;
  }
  sm90::take_registers<kMathRegisters>();
  const SeenKeys seen(block.tile, block.mask, place);
  const float scale = static_cast<float>(sizes.scale) * kLog2E;
  float sums[Cut::kValue / 2] = {};
  float largest[2] = {-infinity<float>(), -infinity<float>()};
  float total[2] = {};
  sm90::barrier_wait(shared.loaded(), 0);
  for (int64_t tile = block.begin; tile < block.end; ++tile) {
    const int stage = ring.take();
    const auto first = static_cast<int>(tile) * Cut::kRows;
    if (seen.any(first, first + Cut::kRows)) {
      float scores[Cut::kRows / 2];
      sm90::fence_products();
      multiply_heads<typename Cut::FixedKeys, typename Cut::Keys, Cut::kKey>(
          shared.fixed_keys(), place.group * kGroupRows, shared.keys(stage), scores);
      sm90::commit_products();
      sm90::wait_products<0>();
      sm90::order_sums(scores);
      if (!seen.all(first, first + Cut::kRows)) {
#pragma unroll
        for (int i = 0; i < Cut::kRows / 2; ++i) {
          const int key = first + 8 * (i / 4) + place.column + i % 2;
          if (!seen.sees(i / 2 % 2, key)) scores[i] = -infinity<float>();
        }
      }
      float factor[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float row_largest = largest[half];
#pragma unroll
        for (int j = 0; j < Cut::kRows / 8; ++j) {
          row_largest =
              fmaxf(row_largest, fmaxf(scores[4 * j + 2 * half], scores[4 * j + 2 * half + 1]));
        }
        row_largest = over_row(row_largest, [](float a, float c) { return fmaxf(a, c); });
        // A row that has seen nothing yet has nothing to rescale.
        const float base = row_largest == -infinity<float>() ? 0.0F : row_largest * scale;
        factor[half] = power_of_two(largest[half] * scale - base);
        largest[half] = row_largest;
        total[half] *= factor[half];
#pragma unroll
        for (int j = 0; j < Cut::kRows / 8; ++j) {
#pragma unroll
          for (int i = 4 * j + 2 * half; i < 4 * j + 2 * half + 2; ++i) {
            scores[i] = power_of_two(fmaf(scores[i], scale, -base));
            total[half] += scores[i];
          }
        }
      }
      uint32_t weights[Cut::kRows / 16][4];
      pack_weights(scores, weights);
#pragma unroll
      for (int i = 0; i < Cut::kValue / 2; ++i) sums[i] *= factor[i / 2 % 2];
      sm90::fence_products();
      add_weighted_rows<typename Cut::Values>(weights, shared.values(stage), sums);
      sm90::commit_products();
      sm90::wait_products<0>();
      sm90::order_sums(sums);
    }
    ring.give_back(stage);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float all = over_row(total[half], [](float a, float c) { return a + c; });
    const int row = place.row + 8 * half;
    if (row >= block.tile.count) continue;
    const int64_t token = b * sizes.rows + block.tile.row + row;
    if (place.column == 0) {
      lse[token * sizes.heads + head] = largest[half] * static_cast<float>(sizes.scale) + logf(all);
    }
    store_head(sums, half, 1 / all, place, sizes.value_dim,
               out + token * sizes.out_stride() + head * sizes.value_dim);
  }
#else
  __trap();  // chosen for GPUs of compute capability 9.0 alone
#endif
}

template <class Sizes>
void run_forward(const CudaKernelArguments& args, const AttentionCall& call) {
  using Cut = ForwardCut<Sizes>;
  const AttentionMaps maps(call);
  allow_shared_bytes(forward_kernel<Sizes>, Cut::kSharedBytes);
  launch(args, {maps.query_grid(), kAttentionThreads, Cut::kSharedBytes}, forward_kernel<Sizes>,
         maps.queries(kBlockRows), maps.keys(Cut::kRows), maps.values(Cut::kRows),
         static_cast<Bf16*>(call.out), static_cast<float*>(call.lse), AttentionSizes(call));
}

}  // namespace

void sm90_attention(const CudaKernelArguments& args, const AttentionCall& call) {
  with_head_sizes(call.shape.attributes,
                  [&](auto sizes) { run_forward<decltype(sizes)>(args, call); });
}

}  // namespace troupe
