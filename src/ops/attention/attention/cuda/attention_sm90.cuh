// What the kernels of attention on Hopper share (attention_sm90.h). They are built alike.
//
// A block has 128 rows, queries or keys, in two warpgroups of 64 each; their operands stay in
// shared memory. A thread of a third warpgroup loads the tiles of the other side into a ring of
// stages, each with two tiles of the same rows: keys and values, or queries and the gradients of
// their results. Scores never leave the registers: as wgmma leaves sums, it takes left operands.
//
//   forward      queries stay:     S = q k^T, softmax online, out += P v
//   gradients    keys stay:        S^T = k q^T, dP^T = v d_out^T, d_v += P^T d_out, d_k += dS^T q,
//                                  d_q += dS k (attention_sm90_gradient.cu)
#pragma once

#include "ops/attention/attention/attention_cuda.h"
#include "ops/attention/attention/cuda/attention_sizes.cuh"
#include "ops/attention/attention/cuda/attention_sm90.h"
#include "ops/cuda/sm90.cuh"
#include "ops/cuda/tensor_map.h"

namespace troupe {
namespace {

constexpr int kMathGroups = 2;
constexpr int kGroupRows = 64;
constexpr int kBlockRows = kMathGroups * kGroupRows;
static_assert(kBlockRows == kSm90BlockRows);
constexpr int kAttentionThreads = (kMathGroups + 1) * 128;
// What setmaxnreg makes of the 168 registers that each thread begins with: together no more.
constexpr int kLoaderRegisters = 24;
constexpr int kMathRegisters = 240;
static_assert(kLoaderRegisters + kMathGroups * kMathRegisters <= 3 * 168);
constexpr float kLog2E = 1.4426950408889634F;

// Rows of one head in shared memory, in boxes of 64 elements.
template <int kRows, int kSize>
struct HeadTile {
  static constexpr int kBoxBytes = kRows * 128;
  static constexpr int kBytes = kSize / 64 * kBoxBytes;

  // By one thread; kBytes arrive at `barrier`.
  __device__ static void load(const CUtensorMap& map, uint32_t barrier, uint32_t tile, int head,
                              int64_t row, int64_t b) {
#pragma unroll
    for (int box = 0; box < kSize / 64; ++box) {
      sm90::load_tile(map, barrier, tile + box * kBoxBytes, box * 64, head,
                      static_cast<int32_t>(row), static_cast<int32_t>(b));
    }
  }

  // As an operand: rows from `row` on, a multiple of 8, and elements from 16 `step` on of depth.
  __device__ static uint64_t across_head(uint32_t tile, int row, int step) {
    return sm90::matrix_descriptor(tile + step / 4 * kBoxBytes + row * 128 + step % 4 * 32, 16);
  }
  // All elements as columns, and rows from 16 `step` on of depth.
  __device__ static uint64_t across_rows(uint32_t tile, int step) {
    return sm90::matrix_descriptor(tile + step * 2048, kBoxBytes);
  }
};

// How a kernel is cut. Elements of a head in shared memory, kKey of queries and keys and kValue of
// values and results; those beyond the head are zero. kBlockRows rows stay: of the first kind, and
// with kBothStay of the second, too. The ring has kStages with kRows rows of both kinds, and as
// many pairs of numbers. kOwnBytes are the kernel's own.
template <int kKey_, int kValue_, bool kBothStay, int kRows_, int kStages_, int kOwnBytes = 0>
struct AttentionCut {
  static constexpr int kKey = kKey_;
  static constexpr int kValue = kValue_;
  static constexpr int kRows = kRows_;
  static constexpr int kStages = kStages_;
  using FixedKeys = HeadTile<kBlockRows, kKey>;
  using FixedValues = HeadTile<kBlockRows, kValue>;
  using Keys = HeadTile<kRows, kKey>;
  using Values = HeadTile<kRows, kValue>;
  static constexpr int kFixedBytes = FixedKeys::kBytes + (kBothStay ? FixedValues::kBytes : 0);
  static constexpr int kStageBytes = Keys::kBytes + Values::kBytes;
  static constexpr int kNumberBytes = kRows * 4;
  static constexpr int kOwnAt = kFixedBytes + kStages * kStageBytes;
  static constexpr int kNumbersAt = kOwnAt + kOwnBytes;
  static constexpr int kPlacesAt = kNumbersAt + kStages * 2 * kNumberBytes;
  static constexpr int kBarriersAt = kPlacesAt + kStages * 32 + kMathGroups * 8;
  static constexpr int kBarriers = 1 + 2 * kStages + 4 * kMathGroups;
  static constexpr int kSharedBytes = kBarriersAt + 8 * kBarriers + 1024;  // to align it
  static_assert(kSharedBytes <= 232448);
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Where things lie in shared memory.
template <class Cut>
struct AttentionShared {
  uint32_t base;

  __device__ uint32_t fixed_keys() const { return base; }
  __device__ uint32_t fixed_values() const { return base + Cut::FixedKeys::kBytes; }
  __device__ uint32_t keys(int stage) const {
    return base + Cut::kFixedBytes + stage * Cut::kStageBytes;
  }
  __device__ uint32_t values(int stage) const { return keys(stage) + Cut::Keys::kBytes; }
  __device__ uint32_t own() const { return base + Cut::kOwnAt; }
  __device__ uint32_t numbers(int stage, int i) const {
    return base + Cut::kNumbersAt + (2 * stage + i) * Cut::kNumberBytes;
  }
  // Eight numbers that say what a stage's rows are, and two about what a warpgroup hands on.
  __device__ uint32_t place(int stage) const { return base + Cut::kPlacesAt + stage * 32; }
  __device__ uint32_t handed(int group) const { return place(Cut::kStages) + group * 8; }
  __device__ uint32_t loaded() const { return base + Cut::kBarriersAt; }
  __device__ uint32_t full(int stage) const { return loaded() + 8 * (1 + stage); }
  __device__ uint32_t empty(int stage) const { return full(Cut::kStages + stage); }
  // Of what a warpgroup hands on.
  __device__ uint32_t written(int group) const { return full(2 * Cut::kStages + group); }
  __device__ uint32_t taken(int group) const { return written(kMathGroups + group); }
  // Of what a warpgroup leaves to both, in two places in turns.
  __device__ uint32_t left(int group, int turn) const {
    return written((2 + turn) * kMathGroups + group);
  }
};

// By all threads of the block.
template <class Cut>
__device__ AttentionShared<Cut> open_shared() {
  extern __shared__ std::byte shared_memory[];
  const AttentionShared<Cut> shared{(sm90::shared_address(shared_memory) + 1023) & ~1023U};
  if (threadIdx.x == 0) {
    sm90::barrier_init(shared.loaded(), 1);
    for (int i = 0; i < Cut::kStages; ++i) {
      sm90::barrier_init(shared.full(i), 1);
      sm90::barrier_init(shared.empty(i), kMathGroups * 4);
    }
    for (int i = 0; i < kMathGroups; ++i) {
      sm90::barrier_init(shared.written(i), 4);
      sm90::barrier_init(shared.taken(i), 1);
      for (int turn = 0; turn < 2; ++turn) sm90::barrier_init(shared.left(i, turn), 4);
    }
    sm90::fence_barriers();
  }
  __syncthreads();
  return shared;
}

// The loading thread's and the multiplying warps' ways through the ring.
template <class Cut>
class Ring {
 public:
  __device__ explicit Ring(const AttentionShared<Cut>& shared) : shared_(shared) {}

  // Loads the next stage: load(barrier, stage) lets `bytes` arrive. What it writes itself is there
  // for those who take the stage, too.
  template <class Load>
  __device__ void fill(uint32_t bytes, const Load& load) {
    const int stage = place_.stage;
    sm90::barrier_wait(shared_.empty(stage), place_.parity ^ 1);
    place_.advance();
    load(shared_.full(stage), stage);
    sm90::barrier_arrive_expecting(shared_.full(stage), bytes);
  }

  // Waits for the next stage.
  __device__ int take() {
    const int stage = place_.stage;
    sm90::barrier_wait(shared_.full(stage), place_.parity);
    place_.advance();
    return stage;
  }
  // This warp is done with it.
  __device__ void give_back(int stage) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) sm90::barrier_arrive(shared_.empty(stage));
  }

 private:
  const AttentionShared<Cut>& shared_;
  sm90::RingPlace<Cut::kStages> place_;
};

// What a multiplying thread has of a warpgroup's sums: of rows `row` and `row` + 8 of the block the
// columns 8 j + `column` and the next.
struct ThreadPlace {
  int group;  // warpgroup
  int row;
  int column;

  __device__ ThreadPlace()
      : group(__shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / 128, 0)),
        row(group * kGroupRows + static_cast<int>(threadIdx.x) % 128 / 32 * 16 +
            static_cast<int>(threadIdx.x) % 32 / 4),
        column(static_cast<int>(threadIdx.x) % 4 * 2) {}
};

// scores [64, rows of right] = rows of left, from `row` on, times those of right.
template <class Left, class Right, int kSize, int kScores>
__device__ __forceinline__ void multiply_heads(uint32_t left, int row, uint32_t right,
                                               float (&scores)[kScores]) {
#pragma unroll
  for (int step = 0; step < kSize / 16; ++step) {
    sm90::multiply_add<2 * kScores, false, false>(scores, Left::across_head(left, row, step),
                                                  Right::across_head(right, 0, step), step > 0);
  }
}

// sums [64, kSize] += weights [64, rows of right] times the rows of right.
template <class Right, int kSums, int kSteps>
__device__ __forceinline__ void add_weighted_rows(const uint32_t (&weights)[kSteps][4],
                                                  uint32_t right, float (&sums)[kSums]) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    sm90::multiply_add<2 * kSums, true>(sums, weights[step], Right::across_rows(right, step));
  }
}

template <int kScores, int kSteps>
__device__ __forceinline__ void pack_weights(const float (&scores)[kScores],
                                             uint32_t (&weights)[kSteps][4]) {
  static_assert(kScores == 8 * kSteps);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) sm90::pack_left(scores + 8 * step, weights[step]);
}

// Over the four threads that share a row.
template <class Combine>
__device__ __forceinline__ float over_row(float value, const Combine& combine) {
  value = combine(value, __shfl_xor_sync(0xffffffffU, value, 1));
  return combine(value, __shfl_xor_sync(0xffffffffU, value, 2));
}

// What is too small for a normal number is zero.
__device__ __forceinline__ float power_of_two(float exponent) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
  return power;
}

__device__ __forceinline__ void store_pair(Bf16* to, float a, float b) {
  *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(a, b);
}
__device__ __forceinline__ void store_pair(float* to, float a, float b) {
  *reinterpret_cast<float2*>(to) = {a, b};
}

// Row `half` of the thread's two of sums [64, kSize], each times `factor`.
template <class Out, int kSums>
__device__ __forceinline__ void store_head(const float (&sums)[kSums], int half, float factor,
                                           const ThreadPlace& place, int head_dim, Out* to) {
#pragma unroll
  for (int j = 0; j < kSums / 4; ++j) {
    const int column = 8 * j + place.column;
    if (column >= head_dim) continue;
    store_pair(to + column, factor * sums[4 * j + 2 * half], factor * sums[4 * j + 2 * half + 1]);
  }
}

// Queries of a block, which stay, and the tiles of kRows keys that they see.
template <int kRows>
struct QueryBlock {
  QueryTile tile;
  AttentionMask mask;
  int64_t begin;  // of the tiles of keys
  int64_t end;

  // Those with the most keys first.
  __device__ QueryBlock(const AttentionSizes& sizes, int64_t b)
      : tile(QueryTile::make<kBlockRows>(sizes, static_cast<int>(gridDim.x - 1 - blockIdx.x))),
        mask(tile.mask(sizes, b)),
        begin(mask.first_key(tile.position) / kRows),
        end((tile.position + tile.count - 1) / kRows + 1) {}
};

// What the queries of one warpgroup see, and of those the two of this thread.
class SeenKeys {
 public:
  __device__ SeenKeys(const QueryTile& queries, const AttentionMask& mask,
                      const ThreadPlace& place) {
    const int first = place.group * kGroupRows;
    const auto count = static_cast<int>(queries.count) - first;
    if (count <= 0) return;
    const auto position = static_cast<int>(queries.position);
    first_ = position + first;
    end_ = first_ + min(count, kGroupRows);
    first_key_ = static_cast<int>(mask.first_key(first_));
    last_first_key_ = static_cast<int>(mask.first_key(end_ - 1));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = place.row + 8 * half;
      query_[half] = position + row;
      if (row < queries.count) seen_[half] = static_cast<int>(mask.first_key(position + row));
    }
  }

  // Does any query of the warpgroup see any of the keys [first, end)? Do all see all?
  __device__ bool any(int first, int end) const {
    return first < end_ && end > first_key_;
  }
  __device__ bool all(int first, int end) const {
    return end <= first_ + 1 && first >= last_first_key_ && end_ - first_ == kGroupRows;
  }
  // Does query `half` of the thread see the key?
  __device__ bool sees(int half, int key) const {
    return key <= query_[half] && key >= seen_[half];
  }

 private:
  int first_ = 0;
  int end_ = 0;
  int first_key_ = 0;
  int last_first_key_ = 0;
  int query_[2] = {};
  int seen_[2] = {0x7fffffff, 0x7fffffff};
};

#endif

// The tensors of a call as the loading thread sees them.
class AttentionMaps {
 public:
  explicit AttentionMaps(const AttentionCall& call) : call_(call), a_(call.shape.attributes) {}

  CUtensorMap queries(int tile_rows) const {
    return of_queries(call_.q, a_.head_dim, call_.query_stride, tile_rows);
  }
  CUtensorMap d_out(int tile_rows) const {
    return of_queries(call_.d_out, a_.value_size(), a_.out_row(), tile_rows);
  }
  CUtensorMap keys(int tile_rows) const { return of_keys(call_.k, a_.head_dim, tile_rows); }
  CUtensorMap values(int tile_rows) const { return of_keys(call_.v, a_.value_size(), tile_rows); }

  // One block for each head's tiles of queries.
  dim3 query_grid() const {
    const AttentionShape& shape = call_.shape;
    const int64_t tiles = shape.rows() / shape.chunk() * ceil_divide(shape.chunk(), kBlockRows);
    return {static_cast<unsigned>(tiles), static_cast<unsigned>(a_.heads),
            static_cast<unsigned>(a_.batch)};
  }

 private:
  CUtensorMap of_queries(const void* data, int head_dim, int64_t stride, int tile_rows) const {
    return make_tensor_map(TiledHeads{.data = data,
                                      .head_dim = head_dim,
                                      .heads = a_.heads,
                                      .rows = call_.shape.rows(),
                                      .sequences = a_.batch,
                                      .row_stride = stride,
                                      .tile_rows = tile_rows});
  }
  CUtensorMap of_keys(const void* data, int head_dim, int tile_rows) const {
    return make_tensor_map(TiledHeads{.data = data,
                                      .head_dim = head_dim,
                                      .heads = a_.groups,
                                      .rows = call_.shape.positions(),
                                      .sequences = a_.batch,
                                      .row_stride = call_.key_stride,
                                      .tile_rows = tile_rows});
  }

  const AttentionCall& call_;
  const AttentionAttributes& a_;
};

// Calls run(cut) with the smallest sizes in shared memory that the heads of a call fit into: a type
// with the constants kKey and kValue.
template <int kKey_, int kValue_>
struct HeadSizes {
  static constexpr int kKey = kKey_;
  static constexpr int kValue = kValue_;
};
template <class Run>
void with_head_sizes(const AttentionAttributes& attributes, const Run& run) {
  switch (sm90_key_columns(attributes)) {
    case 64:
      return run(HeadSizes<64, 64>());
    case 128:
      return run(HeadSizes<128, 128>());
    default:
      run(HeadSizes<192, 128>());
  }
}

}  // namespace
}  // namespace troupe
