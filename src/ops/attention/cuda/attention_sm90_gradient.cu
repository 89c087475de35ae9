// The gradients of attention on Hopper. See attention_sm90.cuh.
#include "ops/attention/attention_cuda.h"
#include "ops/attention/cuda/attention_sm90.cuh"

namespace troupe {
namespace {

template <int kSize>
using GradientCut = AttentionCut<kSize, 2, 64, 3>;

// What the gradient kernels read of each query of each head, as [B, H, chunks, padded]: lse in
// powers of two, and D (attention.h). Rows that are not there have probability 0.
struct PreparedQueries {
  float* lse;
  float* dots;
  int64_t chunks;
  int64_t padded;  // rows of a chunk, in whole blocks

  // `scratch`: aligned to 16 bytes.
  PreparedQueries(const AttentionShape& shape, std::byte* scratch)
      : lse(reinterpret_cast<float*>(scratch)),
        dots(lse + sm90_prepared_rows(shape)),
        chunks(shape.rows() / shape.chunk()),
        padded(sm90_padded_rows(shape)) {}

  __device__ int64_t index(const AttentionSizes& sizes, int64_t b, int head, int64_t chunk,
                           int64_t row) const {
    return ((b * sizes.heads + head) * chunks + chunk) * padded + row;
  }
};

// A warp for each row and head.
__global__ void prepare_kernel(const Bf16* d_out, const Bf16* out, const float* lse,
                               PreparedQueries prepared, int64_t count, AttentionSizes sizes) {
  const int64_t i = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32;
  if (i >= count) return;
  const auto head = static_cast<int>(i % sizes.heads);
  const int64_t row = i / sizes.heads % prepared.padded;
  const int64_t chunk = i / sizes.heads / prepared.padded % prepared.chunks;
  const int64_t b = i / sizes.heads / prepared.padded / prepared.chunks;
  const bool exists = row < sizes.chunk;
  const int64_t from = (b * sizes.rows + chunk * sizes.chunk + row) * sizes.heads + head;
  constexpr int kElements = Pack<Bf16>::kElements;
  const int column = static_cast<int>(threadIdx.x) % 32 * kElements;
  float sum = 0;
  if (exists && column < sizes.head_dim) {
    const Pack<Bf16> a = load_pack(d_out + from * sizes.head_dim + column);
    const Pack<Bf16> c = load_pack(out + from * sizes.head_dim + column);
#pragma unroll
    for (int j = 0; j < kElements; ++j) sum += widen(a.values[j]) * widen(c.values[j]);
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 != 0) return;
  const int64_t to = prepared.index(sizes, b, head, chunk, row);
  prepared.lse[to] = exists ? lse[from] * kLog2E : infinity<float>();
  prepared.dots[to] = sum;
}

// A block for 128 queries of one head.
template <int kSize>
__global__ void __launch_bounds__(kAttentionThreads, 1)
    query_gradients_kernel(const __grid_constant__ CUtensorMap q_map,
                           const __grid_constant__ CUtensorMap d_out_map,
                           const __grid_constant__ CUtensorMap k_map,
                           const __grid_constant__ CUtensorMap v_map,
                           const PreparedQueries prepared, Bf16* d_q,
                           const __grid_constant__ AttentionSizes sizes) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Cut = GradientCut<kSize>;
  using Fixed = typename Cut::Fixed;
  using Moving = typename Cut::Moving;
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
    sm90::barrier_arrive_expecting(shared.loaded(), 2 * Fixed::kBytes);
    Fixed::load(q_map, shared.loaded(), shared.fixed(0), head, block.tile.row, b);
    Fixed::load(d_out_map, shared.loaded(), shared.fixed(1), head, block.tile.row, b);
    for (int64_t tile = block.begin; tile < block.end; ++tile) {
      ring.fill(2 * Moving::kBytes, [&](uint32_t barrier, int stage) {
        Moving::load(k_map, barrier, shared.moving(stage, 0), group, tile * Cut::kRows, b);
        Moving::load(v_map, barrier, shared.moving(stage, 1), group, tile * Cut::kRows, b);
      });
    }
    return;
  }
  sm90::take_registers<kMathRegisters>();
  const SeenKeys seen(block.tile, block.mask, place);
  const float scale = static_cast<float>(sizes.scale) * kLog2E;
  const int64_t chunk = block.tile.row / sizes.chunk;
  const int64_t prepared_row =
      prepared.index(sizes, b, head, chunk, block.tile.row - chunk * sizes.chunk + place.row);
  const float lse[2] = {prepared.lse[prepared_row], prepared.lse[prepared_row + 8]};
  const float dots[2] = {prepared.dots[prepared_row], prepared.dots[prepared_row + 8]};
  float sums[kSize / 2] = {};
  sm90::barrier_wait(shared.loaded(), 0);
  for (int64_t tile = block.begin; tile < block.end; ++tile) {
    ring.use([&](int stage) {
      const auto first = static_cast<int>(tile) * Cut::kRows;
      if (!seen.any(first, first + Cut::kRows)) return;
      const int own = place.group * kGroupRows;
      float p[Cut::kRows / 2];
      float ds[Cut::kRows / 2];
      sm90::fence_products();
      multiply_heads<Fixed, Moving, kSize>(shared.fixed(0), own, shared.moving(stage, 0), p);
      sm90::commit_products();
      multiply_heads<Fixed, Moving, kSize>(shared.fixed(1), own, shared.moving(stage, 1), ds);
      sm90::commit_products();
      sm90::wait_products<1>();
      sm90::order_sums(p);
      const bool all = seen.all(first, first + Cut::kRows);
#pragma unroll
      for (int i = 0; i < Cut::kRows / 2; ++i) {
        const int key = first + 8 * (i / 4) + place.column + i % 2;
        p[i] = exp2f(fmaf(p[i], scale, -lse[i / 2 % 2]));
        if (!all && !seen.sees(i / 2 % 2, key)) p[i] = 0;
      }
      sm90::wait_products<0>();
      sm90::order_sums(ds);
#pragma unroll
      for (int i = 0; i < Cut::kRows / 2; ++i) ds[i] = p[i] * (ds[i] - dots[i / 2 % 2]);
      uint32_t weights[Cut::kRows / 16][4];
      pack_weights(ds, weights);
      sm90::fence_products();
      add_weighted_rows<Moving>(weights, shared.moving(stage, 0), sums);
      sm90::commit_products();
      sm90::wait_products<0>();
      sm90::order_sums(sums);
    });
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = place.row + 8 * half;
    if (row >= block.tile.count) continue;
    const int64_t token = b * sizes.rows + block.tile.row + row;
    store_head(sums, half, static_cast<float>(sizes.scale), place, sizes.head_dim,
               d_q + token * sizes.query_stride + head * sizes.head_dim);
  }
#else
  __trap();
#endif
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Calls visit(head, chunk, queries) for the tiles of kRows queries of a group of heads that see any
// of the keys, in order.
template <int kRows, class Visit>
__device__ __forceinline__ void for_query_tiles(const AttentionSizes& sizes, int64_t b, int group,
                                                const AttentionBlock& keys, const Visit& visit) {
  const int heads = sizes.heads / sizes.groups;
  const auto chunks = static_cast<int>(sizes.rows / sizes.chunk);
  const auto tiles = static_cast<int>((sizes.chunk + kRows - 1) / kRows);
  for (int head = group * heads; head < (group + 1) * heads; ++head) {
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const int64_t before = keys.first - sizes.position(chunk);
      for (int tile = before > 0 ? static_cast<int>(before / kRows) : 0; tile < tiles; ++tile) {
        const QueryTile queries = QueryTile::make<kRows>(sizes, chunk, tile);
        if (!queries.mask(sizes, b).any(queries.block(), keys)) break;  // nor do later ones
        visit(head, chunk, queries);
      }
    }
  }
}

#endif

// A block for 128 keys of one group.
template <int kSize, class Out>
__global__ void __launch_bounds__(kAttentionThreads, 1)
    key_gradients_kernel(const __grid_constant__ CUtensorMap q_map,
                         const __grid_constant__ CUtensorMap d_out_map,
                         const __grid_constant__ CUtensorMap k_map,
                         const __grid_constant__ CUtensorMap v_map, const PreparedQueries prepared,
                         Out* d_k, Out* d_v, const __grid_constant__ AttentionSizes sizes) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Cut = GradientCut<kSize>;
  using Fixed = typename Cut::Fixed;
  using Moving = typename Cut::Moving;
  const AttentionShared<Cut> shared = open_shared<Cut>();
  const auto group = static_cast<int>(blockIdx.y);
  const int64_t b = blockIdx.z;
  const AttentionBlock keys{int64_t{blockIdx.x} * kBlockRows, kBlockRows};
  const ThreadPlace place;
  Ring<Cut> ring(shared);
  if (place.group == kMathGroups) {
    sm90::release_registers<kLoaderRegisters>();
    if (threadIdx.x != kMathGroups * 128) return;
    sm90::barrier_arrive_expecting(shared.loaded(), 2 * Fixed::kBytes);
    Fixed::load(k_map, shared.loaded(), shared.fixed(0), group, keys.first, b);
    Fixed::load(v_map, shared.loaded(), shared.fixed(1), group, keys.first, b);
    for_query_tiles<Cut::kRows>(
        sizes, b, group, keys, [&](int head, int chunk, const QueryTile& queries) {
          const int64_t row =
              prepared.index(sizes, b, head, chunk, queries.row - chunk * sizes.chunk);
          ring.fill(2 * (Moving::kBytes + Cut::kNumberBytes), [&](uint32_t barrier, int stage) {
            Moving::load(q_map, barrier, shared.moving(stage, 0), head, queries.row, b);
            Moving::load(d_out_map, barrier, shared.moving(stage, 1), head, queries.row, b);
            sm90::load_bytes(barrier, shared.numbers(stage, 0), prepared.lse + row,
                             Cut::kNumberBytes);
            sm90::load_bytes(barrier, shared.numbers(stage, 1), prepared.dots + row,
                             Cut::kNumberBytes);
          });
        });
    return;
  }
  sm90::take_registers<kMathRegisters>();
  const AttentionBlock own{keys.first + place.group * kGroupRows, kGroupRows};
  const auto key = static_cast<int>(keys.first) + place.row;
  const float scale = static_cast<float>(sizes.scale) * kLog2E;
  float dk[kSize / 2] = {};
  float dv[kSize / 2] = {};
  sm90::barrier_wait(shared.loaded(), 0);
  for_query_tiles<Cut::kRows>(sizes, b, group, keys, [&](int, int, const QueryTile& queries) {
    ring.use([&](int stage) {
      const AttentionMask mask = queries.mask(sizes, b);
      if (!mask.any(queries.block(), own)) return;
      float p[Cut::kRows / 2];
      float ds[Cut::kRows / 2];
      const int first_row = place.group * kGroupRows;
      sm90::fence_products();
      multiply_heads<Fixed, Moving, kSize>(shared.fixed(0), first_row, shared.moving(stage, 0), p);
      sm90::commit_products();
      multiply_heads<Fixed, Moving, kSize>(shared.fixed(1), first_row, shared.moving(stage, 1), ds);
      sm90::commit_products();
      const int64_t last_query = queries.position + queries.count - 1;
      const bool all =
          own.first + own.count - 1 <= queries.position && mask.first_key(last_query) <= own.first;
      sm90::wait_products<1>();
      sm90::order_sums(p);
#pragma unroll
      for (int j = 0; j < Cut::kRows / 8; ++j) {
        const int column = 8 * j + place.column;
        const float2 lse = sm90::load_shared_pair(shared.numbers(stage, 0) + 4 * column);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          p[4 * j + i] = exp2f(fmaf(p[4 * j + i], scale, i % 2 == 0 ? -lse.x : -lse.y));
        }
        if (all) continue;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int64_t query = queries.position + column + i;
          const bool exists = column + i < queries.count;
          const auto first_seen = static_cast<int>(exists ? mask.first_key(query) : query + 1);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int row_key = key + 8 * half;
            if (row_key > query || row_key < first_seen) p[4 * j + 2 * half + i] = 0;
          }
        }
      }
      uint32_t weights[Cut::kRows / 16][4];
      pack_weights(p, weights);
      sm90::wait_products<0>();
      sm90::order_sums(ds);
      sm90::fence_products();
      add_weighted_rows<Moving>(weights, shared.moving(stage, 1), dv);
      sm90::commit_products();
#pragma unroll
      for (int j = 0; j < Cut::kRows / 8; ++j) {
        const float2 dots =
            sm90::load_shared_pair(shared.numbers(stage, 1) + 4 * (8 * j + place.column));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          ds[4 * j + i] = p[4 * j + i] * (ds[4 * j + i] - (i % 2 == 0 ? dots.x : dots.y));
        }
      }
      uint32_t gradient_weights[Cut::kRows / 16][4];
      pack_weights(ds, gradient_weights);
      sm90::fence_products();
      add_weighted_rows<Moving>(gradient_weights, shared.moving(stage, 0), dk);
      sm90::commit_products();
      sm90::wait_products<0>();
      sm90::order_sums(dv);
      sm90::order_sums(dk);
    });
  });
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row = keys.first + place.row + 8 * half;
    if (row >= sizes.positions) continue;
    const int64_t to = (b * sizes.positions + row) * sizes.key_stride + group * sizes.head_dim;
    store_head(dk, half, static_cast<float>(sizes.scale), place, sizes.head_dim, d_k + to);
    store_head(dv, half, 1.0F, place, sizes.head_dim, d_v + to);
  }
#else
  __trap();
#endif
}

template <int kSize, class Out>
void run_key_gradients(const CudaKernelArguments& args, const AttentionCall& call,
                       const PreparedQueries& prepared) {
  using Cut = GradientCut<kSize>;
  const AttentionAttributes& a = call.shape.attributes;
  const AttentionMaps maps(call);
  const dim3 grid(static_cast<unsigned>(ceil_divide(call.shape.positions(), kBlockRows)),
                  static_cast<unsigned>(a.groups), static_cast<unsigned>(a.batch));
  allow_shared_bytes(key_gradients_kernel<kSize, Out>, Cut::kSharedBytes);
  launch(args, {grid, kAttentionThreads, Cut::kSharedBytes}, key_gradients_kernel<kSize, Out>,
         maps.queries(Cut::kRows), maps.d_out(Cut::kRows), maps.keys(kBlockRows),
         maps.values(kBlockRows), prepared, static_cast<Out*>(call.d_k),
         static_cast<Out*>(call.d_v), AttentionSizes(call));
}

template <int kSize>
void run_gradients(const CudaKernelArguments& args, const AttentionCall& call, std::byte* scratch) {
  using Cut = GradientCut<kSize>;
  const AttentionMaps maps(call);
  const PreparedQueries prepared(call.shape, scratch);
  const int64_t count = sm90_prepared_rows(call.shape);
  launch(args, {static_cast<unsigned>(ceil_divide(count, 8)), 256}, prepare_kernel,
         static_cast<const Bf16*>(call.d_out), static_cast<const Bf16*>(call.out),
         static_cast<const float*>(call.lse), prepared, count, AttentionSizes(call));
  if (call.shape.wide_key_gradients) {
    run_key_gradients<kSize, float>(args, call, prepared);
  } else {
    run_key_gradients<kSize, Bf16>(args, call, prepared);
  }
  allow_shared_bytes(query_gradients_kernel<kSize>, Cut::kSharedBytes);
  launch(args, {maps.query_grid(), kAttentionThreads, Cut::kSharedBytes},
         query_gradients_kernel<kSize>, maps.queries(kBlockRows), maps.d_out(kBlockRows),
         maps.keys(Cut::kRows), maps.values(Cut::kRows), prepared, static_cast<Bf16*>(call.d_q),
         AttentionSizes(call));
}

}  // namespace

void sm90_attention_gradient(const CudaKernelArguments& args, const AttentionCall& call,
                             std::byte* scratch) {
  if (call.shape.attributes.head_dim <= 64) return run_gradients<64>(args, call, scratch);
  run_gradients<128>(args, call, scratch);
}

}  // namespace troupe
