// How the rows of each chunk act on one another: C and A of delta_sm90.h, for all chunks at once,
// and the numbers of the rows that the scans take.
#include "ops/attention/gated_delta_rule/cuda/delta_tiles.cuh"

namespace troupe {
namespace {

constexpr int kThreads = 128;
constexpr int kRowPacks = kDeltaHead / kDeltaPack;
constexpr int kRowsAtOnce = kThreads / kRowPacks;
constexpr int kTiles = kDeltaChunk / 8;

static_assert(kThreads == 2 * kDeltaChunk && kThreads / 32 * 16 == kDeltaChunk);

struct CouplingTiles {
  Bf16 key[kDeltaChunk][kDeltaPitch];  // as they are in memory
  Bf16 query[kDeltaChunk][kDeltaPitch];
  float coupling[kDeltaChunk][kDeltaChunk + 4];  // L
  float key_factor[kDeltaChunk];                 // 1 / |k|
  float query_factor[kDeltaChunk];               // 1 / (|q| sqrt(d_k))
  ChunkGates gates;
};

// Of a row of which kRowPacks lanes have a pack each.
__device__ float length_factor(const DeltaPack& pack) {
  float x[kDeltaPack];
  unpack(pack, x);
  float squares = 0;
  for (const float value : x) squares += value * value;
#pragma unroll
  for (int width = kRowPacks / 2; width > 0; width /= 2) {
    squares += __shfl_xor_sync(0xffffffffU, squares, width);
  }
  return rsqrtf(squares + static_cast<float>(kDeltaNormEpsilon));
}

// Column `column` of C: C[t] = L[t] - sum over i < t of L[t, i] beta_i C[i].
__device__ void solve_column(const CouplingTiles& tiles, int column, Bf16* to) {
  float weighted[kDeltaChunk] = {};  // beta_i C[i]
#pragma unroll
  for (int t = 0; t < kDeltaChunk; ++t) {
    float sums[4] = {tiles.coupling[t][column], 0, 0, 0};
#pragma unroll
    for (int i = 0; i < t; i += 4) {
      const float4 row = *reinterpret_cast<const float4*>(&tiles.coupling[t][i]);
      sums[0] = fmaf(-row.x, weighted[i], sums[0]);
      sums[1] = fmaf(-row.y, weighted[i + 1], sums[1]);
      sums[2] = fmaf(-row.z, weighted[i + 2], sums[2]);
      sums[3] = fmaf(-row.w, weighted[i + 3], sums[3]);
    }
    const float value = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    weighted[t] = tiles.gates.beta[t] * value;
    to[t * kDeltaChunk + column] = round_to<Bf16>(value);
  }
}

// A block for each chunk of each value head of each sequence.
__global__ __launch_bounds__(kThreads) void delta_couplings_kernel(DeltaOperands in) {
  extern __shared__ __align__(16) unsigned char memory[];
  CouplingTiles& tiles = *reinterpret_cast<CouplingTiles*>(memory);
  const GatedDeltaRuleAttributes& a = in.a;
  const int thread = static_cast<int>(threadIdx.x);
  const int head = static_cast<int>(blockIdx.y);
  const int chunk = static_cast<int>(blockIdx.x % in.chunks());
  const int64_t sequence = blockIdx.x / in.chunks();
  const int64_t first = sequence * a.sequence + int64_t{chunk} * kDeltaChunk;
  const int count = min(kDeltaChunk, a.sequence - chunk * kDeltaChunk);
  const int64_t place = in.chunk_of(sequence, head, chunk);

  const int at = thread % kRowPacks * kDeltaPack;
#pragma unroll 4
  for (int t = thread / kRowPacks; t < kDeltaChunk; t += kRowsAtOnce) {
    const Bf16* row = in.qkv + (first + min(t, count - 1)) * a.row_size() + at;
    const DeltaPack query = t < count ? load_delta_pack(row + a.query_of(head)) : DeltaPack{};
    const DeltaPack key = t < count ? load_delta_pack(row + a.key_of(head)) : DeltaPack{};
    store_delta_pack(&tiles.query[t][at], query);
    store_delta_pack(&tiles.key[t][at], key);
    const float query_factor = length_factor(query) * rsqrtf(static_cast<float>(kDeltaHead));
    const float key_factor = length_factor(key);
    if (at == 0) {
      tiles.query_factor[t] = query_factor;
      tiles.key_factor[t] = key_factor;
    }
  }
  if (thread < 32) load_chunk_gates(in, first, chunk, count, head, tiles.gates);
  __syncthreads();

  Tile of_keys[kTiles];
  Tile of_queries[kTiles];
  const int first_row = thread / 32 * 16;
  multiply<kDeltaHead, false, true>(of_keys, tiles.key, tiles.key, first_row, 0);
  multiply<kDeltaHead, false, true>(of_queries, tiles.query, tiles.key, first_row, 0);
  Bf16* const attention = in.attention + place * kDeltaChunk * kDeltaChunk;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int t = first_row + lane_of() / 4 + 8 * half;
      const int i = tile * 8 + lane_of() % 4 * 2;
      float pair[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float decay =
            i + j <= t ? tiles.gates.decay(t, i + j) * tiles.key_factor[i + j] : 0.0F;
        pair[j] = decay * tiles.query_factor[t] * of_queries[tile].values[2 * half + j];
        tiles.coupling[t][i + j] =
            i + j < t ? decay * tiles.key_factor[t] * of_keys[tile].values[2 * half + j] : 0.0F;
      }
      *reinterpret_cast<__nv_bfloat162*>(attention + t * kDeltaChunk + i) =
          __floats2bfloat162_rn(pair[0], pair[1]);
    }
  }
  __syncthreads();
  if (thread < kDeltaChunk) {
    solve_column(tiles, thread, in.coupling + place * kDeltaChunk * kDeltaChunk);
    return;
  }
  const int t = thread - kDeltaChunk;
  in.numbers[place * kDeltaChunk + t] = {
      .beta = tiles.gates.beta[t],
      .from_start = tiles.gates.from_start[t] * tiles.key_factor[t],
      .to_end = tiles.gates.to_end[t] * tiles.key_factor[t],
      .query = tiles.gates.from_start[t] * tiles.query_factor[t]};
  if (t == 0) in.decays[place * 4] = tiles.gates.from_start[kDeltaChunk - 1];
}

}  // namespace

void launch_delta_couplings(const CudaKernelArguments& args, const DeltaOperands& operands) {
  allow_shared_bytes(delta_couplings_kernel, sizeof(CouplingTiles));
  const auto chunks =
      static_cast<unsigned>(operands.rows / operands.a.sequence * operands.chunks());
  launch(args,
         {dim3(chunks, static_cast<unsigned>(operands.a.value_heads)), kThreads,
          sizeof(CouplingTiles)},
         delta_couplings_kernel, operands);
}

}  // namespace troupe
