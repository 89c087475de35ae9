#include "ops/attention/sparse_attention/cuda/latent_tiles.cuh"

namespace troupe {
namespace {

// In shared memory, in bytes.
struct LatentForwardMemory {
  static constexpr int kRows = 64 * kLatentKeyDim * 2;
  static constexpr int kQueries = 0;
  static constexpr int kKeys = kQueries + kRows;  // two of them
  static constexpr int kProbabilities = kKeys + 2 * kRows;
  static constexpr int kLargest = kProbabilities + 64 * kLatentKeys * 2;  // of each half
  static constexpr int kTotals = kLargest + 2 * 64 * 4;
  static constexpr int kBytes = kTotals + 2 * 64 * 4;
};

// A block for 64 heads of a query. Of its warps four share the heads, 16 each, and two the keys, or
// the columns of the result.
__global__ void __launch_bounds__(kLatentThreads, 1)
    latent_forward_kernel(LatentCall call, Bf16* out, float* lse) {
  extern __shared__ __align__(128) unsigned char memory[];
  using Memory = LatentForwardMemory;
  const uint32_t base = sm90::shared_address(memory);
  const LatentRows<kLatentKeyDim> queries{base + Memory::kQueries};
  const LatentRows<kLatentKeys> probabilities{base + Memory::kProbabilities};
  float* largest_of = reinterpret_cast<float*>(memory + Memory::kLargest);
  float* total_of = reinterpret_cast<float*>(memory + Memory::kTotals);
  const auto keys_of = [&](int64_t step) {
    return LatentRows<kLatentKeyDim>{base + Memory::kKeys +
                                     static_cast<uint32_t>(step % 2) * Memory::kRows};
  };
  const int64_t query = blockIdx.y;
  const int first_head = static_cast<int>(blockIdx.x) * kLatentHeads;
  const KeyPositions positions = chosen_positions(call.chosen, query, call.most);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = warp % 4 * 16;
  const int half = warp / 4;
  const int own_row = row + lane / 4;  // and that + 8

  call.fill_heads(queries, call.q, query, first_head);
  call.fill_keys(keys_of(0), query, positions, 0);
  commit_copies();

  LatentTile sums[32];  // of 256 columns
  float largest[2] = {-infinity<float>(), -infinity<float>()};
  float total[2] = {0, 0};  // of this half of the keys, and of this thread's columns
  const int64_t steps = (positions.count + kLatentKeys - 1) / kLatentKeys;
  for (int64_t step = 0; step < steps; ++step) {
    wait_copies();
    __syncthreads();
    if (step + 1 < steps) {
      call.fill_keys(keys_of(step + 1), query, positions, (step + 1) * kLatentKeys);
      commit_copies();
    }
    const LatentRows<kLatentKeyDim> keys = keys_of(step);
    LatentTile scores[4];
    multiply_latent_rows<false, true, kLatentKeyDim>(queries, row, keys, half * 32, scores);
    const int64_t left = positions.count - step * kLatentKeys - half * 32;
    float now[2] = {largest[0], largest[1]};
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = tile * 8 + lane % 4 * 2 + i % 2;
        float& score = scores[tile].values[i];
        score = key < left ? score * call.scale : -infinity<float>();
        now[i / 2] = fmaxf(now[i / 2], score);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      now[i] = fmaxf(now[i], __shfl_xor_sync(0xffffffffU, now[i], 1));
      now[i] = fmaxf(now[i], __shfl_xor_sync(0xffffffffU, now[i], 2));
      if (lane % 4 == 0) largest_of[half * 64 + own_row + i * 8] = now[i];
    }
    __syncthreads();
    float grown[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      now[i] = fmaxf(now[i], largest_of[(1 - half) * 64 + own_row + i * 8]);
      grown[i] = __expf(largest[i] - now[i]);
      largest[i] = now[i];
      total[i] *= grown[i];
    }
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
      float p[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        p[i] = __expf(scores[tile].values[i] - now[i / 2]);
        total[i / 2] += p[i];
      }
      const int column = half * 32 + tile * 8 + lane % 4 * 2;
      store_pair(probabilities.at(own_row, column), p[0], p[1]);
      store_pair(probabilities.at(own_row + 8, column), p[2], p[3]);
    }
    __syncthreads();
#pragma unroll
    for (LatentTile& sum : sums) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum.values[i] *= grown[i / 2];
    }
    multiply_latent_rows<false, false, kLatentKeys>(probabilities, row, keys, half * 256, sums);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    total[i] += __shfl_xor_sync(0xffffffffU, total[i], 1);
    total[i] += __shfl_xor_sync(0xffffffffU, total[i], 2);
    if (lane % 4 == 0) total_of[half * 64 + own_row + i * 8] = total[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int head = first_head + own_row + i * 8;
    if (head >= call.heads) continue;
    const float whole = total_of[own_row + i * 8] + total_of[64 + own_row + i * 8];
    const int64_t at = query * call.heads + head;
    if (half == 0 && lane % 4 == 0) lse[at] = largest[i] + logf(whole);
    const float factor = 1 / whole;
    Bf16* to = out + at * kLatentValueDim + half * 256 + lane % 4 * 2;
#pragma unroll
    for (int tile = 0; tile < 32; ++tile) {
      *reinterpret_cast<uint32_t*>(to + tile * 8) =
          pack_pair(sums[tile].values[2 * i] * factor, sums[tile].values[2 * i + 1] * factor);
    }
  }
}

void run_latent_forward(const CudaKernelArguments& args) {
  const auto& a = args.attributes->as<SparseAttentionAttributes>();
  const LatentCall call(args, a, 0);
  allow_shared_bytes(latent_forward_kernel, LatentForwardMemory::kBytes);
  launch(
      args,
      {dim3(static_cast<unsigned>(call.head_blocks()), static_cast<unsigned>(call.rows.queries())),
       kLatentThreads, LatentForwardMemory::kBytes},
      latent_forward_kernel, call, args.out<Bf16>(0), args.out<float>(1));
}

}  // namespace

CudaKernel sparse_attention_latent_kernel(const OpView& /*op*/) {
  return &run_latent_forward;
}

}  // namespace troupe
