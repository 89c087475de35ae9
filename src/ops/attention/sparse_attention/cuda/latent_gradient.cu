#include "ops/attention/sparse_attention/cuda/latent_tiles.cuh"

namespace troupe {
namespace {

// In shared memory, in bytes.
struct LatentGradientMemory {
  static constexpr int kRows = 64 * kLatentKeyDim * 2;
  static constexpr int kQueries = 0;
  static constexpr int kKeys = kQueries + kRows;
  static constexpr int kOutGradients = kKeys + kRows;
  static constexpr int kProbabilities = kOutGradients + 64 * kLatentValueDim * 2;
  static constexpr int kScoreGradients = kProbabilities + 64 * kLatentKeys * 2;
  static constexpr int kOutDots = kScoreGradients + 64 * kLatentKeys * 2;
  static constexpr int kBytes = kOutDots + 64 * 4;
};

struct LatentGradients {
  const Bf16* d_out;
  const Bf16* out;
  const float* lse;
  Bf16* d_q;
  float* sums;     // [batch][blocks of a sequence][positions][576]
  int64_t blocks;  // of a sequence
};

// D of the block's heads, by warp.
__device__ __forceinline__ void find_out_dots(const LatentCall& call, const LatentGradients& g,
                                              int64_t query, int first_head, float* out_dots) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int row = static_cast<int>(threadIdx.x) / 32; row < kLatentHeads;
       row += kLatentThreads / 32) {
    float dot = 0;
    if (first_head + row < call.heads) {
      const int64_t at = (query * call.heads + first_head + row) * kLatentValueDim;
      for (int i = lane * 8; i < kLatentValueDim; i += 32 * 8) {
        const Pack<Bf16> a = load_pack(g.d_out + at + i);
        const Pack<Bf16> b = load_pack(g.out + at + i);
#pragma unroll
        for (int j = 0; j < 8; ++j) dot += widen(a.values[j]) * widen(b.values[j]);
      }
    }
    dot = warp_sum(dot);
    if (lane == 0) out_dots[row] = dot;
  }
}

// A block takes every `blocks`-th query of a sequence, and 64 heads after the other. Of its warps
// four share rows, 16 each, and two share columns.
__global__ void __launch_bounds__(kLatentThreads, 1)
    latent_gradient_kernel(LatentCall call, LatentGradients g) {
  extern __shared__ __align__(128) unsigned char memory[];
  using Memory = LatentGradientMemory;
  const uint32_t base = sm90::shared_address(memory);
  const LatentRows<kLatentKeyDim> queries{base + Memory::kQueries};
  const LatentRows<kLatentKeyDim> keys{base + Memory::kKeys};
  const LatentRows<kLatentValueDim> d_outs{base + Memory::kOutGradients};
  const LatentRows<kLatentKeys> probabilities{base + Memory::kProbabilities};
  const LatentRows<kLatentKeys> d_scores{base + Memory::kScoreGradients};
  float* out_dots = reinterpret_cast<float*>(memory + Memory::kOutDots);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = warp % 4 * 16;
  const int half = warp / 4;
  const int own_row = row + lane / 4;  // and that + 8
  const int64_t sequence = blockIdx.y;
  float* own_sums =
      g.sums + (sequence * g.blocks + blockIdx.x) * call.rows.sequence() * kLatentKeyDim;
  for (int64_t i = int64_t{threadIdx.x} * 4; i < call.rows.sequence() * kLatentKeyDim;
       i += kLatentThreads * 4) {
    *reinterpret_cast<float4*>(own_sums + i) = make_float4(0, 0, 0, 0);
  }

  const int head_blocks = (call.heads + kLatentHeads - 1) / kLatentHeads;
  for (int64_t unit = blockIdx.x; unit < int64_t{call.rows.rows} * head_blocks; unit += g.blocks) {
    const int64_t query = sequence * call.rows.rows + unit / head_blocks;
    const int first_head = static_cast<int>(unit % head_blocks) * kLatentHeads;
    const KeyPositions positions = chosen_positions(call.chosen, query, call.most);
    __syncthreads();
    call.fill_heads(queries, call.q, query, first_head);
    call.fill_heads(d_outs, g.d_out, query, first_head);
    commit_copies();
    find_out_dots(call, g, query, first_head, out_dots);
    float lse[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int head = first_head + own_row + i * 8;
      // Of heads that there are not: no probability.
      lse[i] = head < call.heads ? g.lse[query * call.heads + head] : infinity<float>();
    }
    LatentTile d_query[36];  // of 288 columns
    for (int64_t begin = 0; begin < positions.count; begin += kLatentKeys) {
      if (begin > 0) __syncthreads();
      call.fill_keys(keys, query, positions, begin);
      commit_copies();
      wait_copies();
      __syncthreads();
      {
        LatentTile scores[4];
        LatentTile d_values[4];
        multiply_latent_rows<false, true, kLatentKeyDim>(queries, row, keys, half * 32, scores);
        multiply_latent_rows<false, true, kLatentValueDim>(d_outs, row, keys, half * 32, d_values);
        const int64_t left = positions.count - begin - half * 32;
#pragma unroll
        for (int tile = 0; tile < 4; ++tile) {
          float p[4];
          float ds[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const bool is_key = tile * 8 + lane % 4 * 2 + i % 2 < left;
            p[i] = is_key ? __expf(scores[tile].values[i] * call.scale - lse[i / 2]) : 0.0F;
            ds[i] = call.scale * p[i] * (d_values[tile].values[i] - out_dots[own_row + i / 2 * 8]);
          }
          const int column = half * 32 + tile * 8 + lane % 4 * 2;
          store_pair(probabilities.at(own_row, column), p[0], p[1]);
          store_pair(probabilities.at(own_row + 8, column), p[2], p[3]);
          store_pair(d_scores.at(own_row, column), ds[0], ds[1]);
          store_pair(d_scores.at(own_row + 8, column), ds[2], ds[3]);
        }
      }
      __syncthreads();
      multiply_latent_rows<false, false, kLatentKeys>(d_scores, row, keys, half * 288, d_query);
      // Of 16 keys, 48 columns at a time.
      float* to[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int64_t number = begin + own_row + i * 8;
        to[i] = number < positions.count ? own_sums + positions[number] * kLatentKeyDim : nullptr;
      }
      for (int column = half * 288; column < half * 288 + 288; column += 48) {
        LatentTile d_keys[6];
        multiply_latent_rows<true, false, kLatentHeads>(d_scores, row, queries, column, d_keys);
        if (column + 48 <= kLatentValueDim) {
          multiply_latent_rows<true, false, kLatentHeads>(probabilities, row, d_outs, column,
                                                          d_keys);
        } else if (column < kLatentValueDim) {
          // The columns of the values end within these.
          LatentTile of_values[2];
          static_assert(kLatentValueDim - (288 + 4 * 48) == 32);
#pragma unroll
          for (int tile = 0; tile < 4; tile += 2) {
            of_values[0] = d_keys[tile];
            of_values[1] = d_keys[tile + 1];
            multiply_latent_rows<true, false, kLatentHeads>(probabilities, row, d_outs,
                                                            column + tile * 8, of_values);
            d_keys[tile] = of_values[0];
            d_keys[tile + 1] = of_values[1];
          }
        }
#pragma unroll
        for (int tile = 0; tile < 6; ++tile) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if (to[i] == nullptr) continue;
            auto* pair = reinterpret_cast<float2*>(to[i] + column + tile * 8 + lane % 4 * 2);
            float2 sum = *pair;
            sum.x += d_keys[tile].values[2 * i];
            sum.y += d_keys[tile].values[2 * i + 1];
            *pair = sum;
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int head = first_head + own_row + i * 8;
      if (head >= call.heads) continue;
      Bf16* to = g.d_q + (query * call.heads + head) * kLatentKeyDim + half * 288 + lane % 4 * 2;
#pragma unroll
      for (int tile = 0; tile < 36; ++tile) {
        *reinterpret_cast<uint32_t*>(to + tile * 8) =
            pack_pair(d_query[tile].values[2 * i], d_query[tile].values[2 * i + 1]);
      }
    }
  }
}

// The sums of a sequence's blocks in order. A block for each key.
__global__ void latent_key_gradient_kernel(KeyRows rows, const float* sums, int64_t blocks,
                                           Bf16* d_k) {
  const int64_t key = blockIdx.x;
  const float* of_block =
      sums +
      (rows.key_sequence(key) * blocks * rows.sequence() + rows.key_position(key)) * kLatentKeyDim;
  for_row(kLatentKeyDim, [&](int64_t c) {
    float sum = 0;
    for (int64_t block = 0; block < blocks; ++block) {
      sum += of_block[block * rows.sequence() * kLatentKeyDim + c];
    }
    d_k[key * kLatentKeyDim + c] = round_to<Bf16>(sum);
  });
}

void run_latent_gradient(const CudaKernelArguments& args) {
  const auto& a = args.attributes->as<SparseAttentionAttributes>();
  const LatentCall call(args, a, 1);
  const int64_t blocks = latent_sum_blocks(call.rows);
  const LatentGradients gradients{.d_out = args.in<Bf16>(0),
                                  .out = args.in<Bf16>(4),
                                  .lse = args.in<float>(5),
                                  .d_q = args.out<Bf16>(0),
                                  .sums = reinterpret_cast<float*>(args.scratch),
                                  .blocks = blocks};
  allow_shared_bytes(latent_gradient_kernel, LatentGradientMemory::kBytes);
  launch(args,
         {dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(call.rows.batch)),
          kLatentThreads, LatentGradientMemory::kBytes},
         latent_gradient_kernel, call, gradients);
  launch(args, {static_cast<unsigned>(call.rows.keys()), 192}, latent_key_gradient_kernel,
         call.rows, gradients.sums, blocks, args.out<Bf16>(1));
}

}  // namespace

CudaKernel sparse_attention_latent_gradient_kernel(const OpView& /*op*/) {
  return &run_latent_gradient;
}

}  // namespace troupe
