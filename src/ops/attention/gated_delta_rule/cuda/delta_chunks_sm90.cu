// The gradients of queries, keys and gates, for all chunks of rows at once. With S what the state
// was before the chunk, dS what reaches it from after the chunk, G_t the sum of g over the chunk's
// rows up to t, and e(t, i) = e^{G_t - G_i} within one document, else 0 (header's u, dv and do):
//
//   D_t^T dv_t   = e(t, start) S dv_t + sum_{i < t} e(t, i) beta_i (u_i . dv_t) k'_i
//   dq'_t        = e(t, start) S do_t + sum_{i <= t} e(t, i) beta_i (u_i . do_t) k'_i
//   dS_t u_t     = e(end, t) dS u_t + sum_{i >= t} e(i, t) (do_i . u_t) q'_i
//                                   - sum_{i > t} e(i, t) (dv_i . u_t) k'_i
//   dk'_t        = beta_t dS_t u_t - D_t dv_t
//
// dg follows from how the result scales with e^{G_t}: with r_t = q'_t . dq'_t - k'_t . (D_t dv_t) -
// beta_t k'_t . (dS_t u_t), dg_t is the sum of r_i over i >= t of the chunk's rows of the document,
// and, where that goes on after the chunk, of all elements of dS times those of the state after it.
#include "ops/attention/gated_delta_rule/cuda/delta_tiles.cuh"

namespace troupe {
namespace {

constexpr int kThreads = 512;
constexpr int kRowWarps = 4;     // of 16 rows each
constexpr int kColumnWarps = 4;  // of 32 columns of a head, or 16 rows of the chunk
constexpr int kPack = kDeltaPack;
constexpr int kRowPacks = kDeltaHead / kPack;
constexpr int kRowsAtOnce = kThreads / kRowPacks;
constexpr int kTiles = kDeltaHead / kColumnWarps / 8;         // of 8 columns, that a warp has
constexpr int kSquareTiles = kDeltaChunk / kColumnWarps / 8;  // the same of the chunk's rows

static_assert(kRowWarps * 16 == kDeltaChunk && kRowWarps * kColumnWarps * 32 == kThreads);

struct ChunkTiles {
  Bf16 query[kDeltaChunk][kDeltaPitch];  // normed
  Bf16 key[kDeltaChunk][kDeltaPitch];
  Bf16 d_out[kDeltaChunk][kDeltaPitch];
  Bf16 dv[kDeltaChunk][kDeltaPitch];
  Bf16 u[kDeltaChunk][kDeltaPitch];
  Bf16 state[kDeltaHead][kDeltaPitch];  // S^T
  Bf16 d_state[kDeltaHead][kDeltaPitch];
  Bf16 of_out[kDeltaChunk][kDeltaSquarePitch];  // e(t, i) beta_i (u_i . do_t), i <= t
  Bf16 of_dv[kDeltaChunk][kDeltaSquarePitch];   // e(t, i) beta_i (u_i . dv_t), i < t
  float query_factor[kDeltaChunk];
  float key_factor[kDeltaChunk];
  ChunkGates gates;
  float sums[2][kColumnWarps][kDeltaChunk];
  float scales[kDeltaChunk];   // r
  float written[kDeltaChunk];  // beta_t k'_t . dS u_t, of the state after the chunk
  float shared[32];
};

// One chunk of one key head of one sequence, with the parts of its state. Of two parts there are no
// outputs (gated_delta_state), so queries have no gradient.
template <int kParts>
class ChunkGradient {
 public:
  __device__ ChunkGradient(const DeltaOperands& in, ChunkTiles& tiles)
      : in_(in),
        tiles_(tiles),
        key_head_(static_cast<int>(blockIdx.y)),
        chunk_(static_cast<int>(blockIdx.x % in.chunks())),
        sequence_(blockIdx.x / in.chunks()),
        first_(sequence_ * in.a.sequence + int64_t{chunk_} * kDeltaChunk),
        count_(min(kDeltaChunk, in.a.sequence - chunk_ * kDeltaChunk)),
        row_(warp() % kRowWarps * 16),
        column_warp_(warp() / kRowWarps) {}

  __device__ void run() {
    const int of_key = in_.a.value_heads / in_.a.key_heads;
    load_queries_and_keys();
    for (int i = 0; i < of_key * kParts; ++i) {
      run_head(key_head_ * of_key + i / kParts, i % kParts);
      __syncthreads();
    }
    finish(in_.a.query_of(key_head_ * of_key), d_query_, tiles_.query_factor,
           rsqrtf(static_cast<float>(kDeltaHead)));
    __syncthreads();
    finish(in_.a.key_of(key_head_ * of_key), d_key_, tiles_.key_factor, 1.0F);
  }

 private:
  static constexpr bool kHasOut = kParts == 1;

  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int warp() { return thread() / 32; }
  // Of a tile's values: rows row() and row() + 8.
  __device__ int row() const { return row_ + lane_of() / 4; }
  __device__ int column(int tile, int i) const {
    return column_warp_ * (kTiles * 8) + tile * 8 + lane_of() % 4 * 2 + i;
  }

  // Over the threads that share a row when packs are loaded.
  __device__ static float row_sum(float x) {
#pragma unroll
    for (int width = kRowPacks / 2; width > 0; width /= 2) {
      x += __shfl_xor_sync(0xffffffffU, x, width);
    }
    return x;
  }
  // Zeros beyond the sequence, for which its last row is read.
  __device__ DeltaPack load(const Bf16* from, int64_t stride, int t, int64_t at) const {
    const DeltaPack pack = load_delta_pack(from + (first_ + min(t, count_ - 1)) * stride + at);
    return t < count_ ? pack : DeltaPack{};
  }

  __device__ static float product_of(const DeltaPack& a, const DeltaPack& b) {
    float x[kPack];
    float y[kPack];
    unpack(a, x);
    unpack(b, y);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kPack; ++i) sum += x[i] * y[i];
    return sum;
  }

  __device__ void load_queries_and_keys() {
    const int head = key_head_ * (in_.a.value_heads / in_.a.key_heads);
    const auto normalize = [&](int64_t column, float scale, Bf16(*to)[kDeltaPitch],
                               float* factors) {
      const int at = thread() % kRowPacks * kPack;
#pragma unroll
      for (int t = thread() / kRowPacks; t < kDeltaChunk; t += kRowsAtOnce) {
        float x[kPack];
        unpack(load(in_.qkv, in_.a.row_size(), t, column + at), x);
        float squares = 0;
        for (const float value : x) squares += value * value;
        const float factor = rsqrtf(row_sum(squares) + static_cast<float>(kDeltaNormEpsilon));
        for (int i = 0; i < kPack; ++i) to[t][at + i] = round_to<Bf16>(x[i] * factor * scale);
        if (at == 0) factors[t] = factor;
      }
    };
    normalize(in_.a.query_of(head), rsqrtf(static_cast<float>(kDeltaHead)), tiles_.query,
              tiles_.query_factor);
    normalize(in_.a.key_of(head), 1.0F, tiles_.key, tiles_.key_factor);
  }

  // The tiles of a part of a head; returns what this thread has of the sum of S dS.
  __device__ float load_head(int head, int part) {
    if (warp() == 0) load_chunk_gates(in_, first_, chunk_, count_, head, tiles_.gates);
    const int64_t values = int64_t{head} * kDeltaHead;
    // All loads are under way before the first one is waited for.
    constexpr int kRounds = kDeltaChunk / kRowsAtOnce;
    constexpr int kStateRounds = kDeltaHead / kRowsAtOnce;
    DeltaPack rows[4][kRounds];
    DeltaPack states[2][kStateRounds];
    const int first = thread() / kRowPacks;
    const int at = thread() % kRowPacks * kPack;
    const int64_t size = in_.a.value_size();
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int t = first + i * kRowsAtOnce;
      rows[0][i] = kHasOut ? load(in_.d_out, size, t, values + at) : DeltaPack{};
      rows[1][i] = part == 0 ? load(in_.d_qkv, in_.a.row_size(), t, in_.a.value_of(head) + at)
                             : load(in_.dv, size, t, values + at);
      rows[2][i] = load(in_.u + in_.part_of(part), size, t, values + at);
      rows[3][i] = load(in_.du + in_.part_of(part), size, t, values + at);
    }
    const int64_t state = in_.state_of(part, sequence_, head, chunk_) + at;
#pragma unroll
    for (int i = 0; i < kStateRounds; ++i) {
      const int64_t from = state + (first + i * kRowsAtOnce) * kDeltaHead;
      states[0][i] = load_delta_pack(in_.states + from);
      states[1][i] = load_delta_pack(in_.d_states + from);
    }
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int t = first + i * kRowsAtOnce;
      store_delta_pack(&tiles_.d_out[t][at], rows[0][i]);
      store_delta_pack(&tiles_.dv[t][at], rows[1][i]);
      store_delta_pack(&tiles_.u[t][at], rows[2][i]);
      const float d_beta = row_sum(product_of(rows[2][i], rows[3][i]));
      if (at == 0 && t < count_) add_gate(t, head, part, d_beta);
    }
    float product = 0;
#pragma unroll
    for (int i = 0; i < kStateRounds; ++i) {
      const int j = first + i * kRowsAtOnce;
      store_delta_pack(&tiles_.state[j][at], states[0][i]);
      store_delta_pack(&tiles_.d_state[j][at], states[1][i]);
      product += product_of(states[0][i], states[1][i]);
    }
    return product;
  }

  // The gradient of a gate, which is the sum of that of the parts; by one thread.
  __device__ void add_gate(int t, int gate, int part, float value) const {
    float* const to = in_.d_gates + (first_ + t) * 2 * in_.a.value_heads + gate;
    *to = part == 0 ? value : *to + value;
  }

  // of_out and of_dv.
  __device__ void multiply_rows() {
    Tile outs[kSquareTiles];
    Tile dvs[kSquareTiles];
    const int first = column_warp_ * (kSquareTiles * 8);
    if (kHasOut) multiply<kDeltaHead, false, true>(outs, tiles_.d_out, tiles_.u, row_, first);
    multiply<kDeltaHead, false, true>(dvs, tiles_.dv, tiles_.u, row_, first);
#pragma unroll
    for (int tile = 0; tile < kSquareTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int t = row() + half * 8;
        const int i = first + tile * 8 + lane_of() % 4 * 2;
        float out[2];
        float dv[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float factor =
              i + j <= t ? tiles_.gates.beta[i + j] * tiles_.gates.decay(t, i + j) : 0.0F;
          out[j] = factor * outs[tile].values[2 * half + j];
          dv[j] = i + j < t ? factor * dvs[tile].values[2 * half + j] : 0.0F;
        }
        *reinterpret_cast<__nv_bfloat162*>(&tiles_.of_out[t][i]) =
            __floats2bfloat162_rn(out[0], out[1]);
        *reinterpret_cast<__nv_bfloat162*>(&tiles_.of_dv[t][i]) =
            __floats2bfloat162_rn(dv[0], dv[1]);
      }
    }
  }

  template <class Factor>
  __device__ void scale_rows(Tile (&tiles)[kTiles], const Factor& factor) const {
    const float factors[2] = {factor(row()), factor(row() + 8)};
#pragma unroll
    for (Tile& tile : tiles) {
#pragma unroll
      for (int i = 0; i < 4; ++i) tile.values[i] *= factors[i / 2];
    }
  }
  // This thread's part of the products of rows of the tiles and of a matrix, of its two rows.
  __device__ void add_row_products(const Tile (&tiles)[kTiles], const Bf16 (*matrix)[kDeltaPitch],
                                   float sign, float (&sums)[2]) const {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[i / 2] +=
            sign * tiles[tile].values[i] * widen(matrix[row() + i / 2 * 8][column(tile, i % 2)]);
      }
    }
  }
  __device__ static void add(Tile (&to)[kTiles], const Tile (&tiles)[kTiles], float sign) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) to[tile].values[i] += sign * tiles[tile].values[i];
    }
  }
  // The four lanes that share rows give their sum to this warp's place in shared memory.
  __device__ void share_row_sums(int which, const float (&sums)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = sums[half];
      sum += __shfl_xor_sync(0xffffffffU, sum, 1);
      sum += __shfl_xor_sync(0xffffffffU, sum, 2);
      if (lane_of() % 4 == 0) tiles_.sums[which][column_warp_][row() + half * 8] = sum;
    }
  }
  __device__ float shared_row_sum(int which, int t) const {
    float sum = 0;
    for (int i = 0; i < kColumnWarps; ++i) sum += tiles_.sums[which][i][t];
    return sum;
  }

  __device__ void run_head(int head, int part) {
    const float product = load_head(head, part);
    __syncthreads();
    multiply_rows();
    const float of_states = block_sum(product, tiles_.shared);  // synchronises, too
    const int first_column = column_warp_ * (kTiles * 8);
    float scales[2] = {0, 0};  // r_t
    float written[2] = {0, 0};
    if constexpr (kHasOut) {
      Tile tiles[kTiles];
      multiply<kDeltaHead, false, false>(tiles, tiles_.d_out, tiles_.state, row_, first_column);
      scale_rows(tiles, [&](int t) { return tiles_.gates.from_start[t]; });
      multiply<kDeltaChunk, false, false>(tiles, tiles_.of_out, tiles_.key, row_, first_column);
      add_row_products(tiles, tiles_.query, 1, scales);
      add(d_query_, tiles, 1);
    }
    {
      Tile tiles[kTiles];
      multiply<kDeltaHead, false, false>(tiles, tiles_.dv, tiles_.state, row_, first_column);
      scale_rows(tiles, [&](int t) { return tiles_.gates.from_start[t]; });
      multiply<kDeltaChunk, false, false>(tiles, tiles_.of_dv, tiles_.key, row_, first_column);
      add_row_products(tiles, tiles_.key, -1, scales);
      add(d_key_, tiles, -1);
    }
    {
      Tile tiles[kTiles];
      multiply<kDeltaHead, false, false>(tiles, tiles_.u, tiles_.d_state, row_, first_column);
      scale_rows(tiles, [&](int t) { return tiles_.gates.beta[t] * tiles_.gates.to_end[t]; });
      add_row_products(tiles, tiles_.key, 1, written);
      if (kHasOut) {
        multiply<kDeltaChunk, true, false>(tiles, tiles_.of_out, tiles_.query, row_, first_column);
      }
      multiply<kDeltaChunk, true, false, Sign::minus>(tiles, tiles_.of_dv, tiles_.key, row_,
                                                      first_column);
      add_row_products(tiles, tiles_.key, -1, scales);
      add(d_key_, tiles, 1);
    }
    share_row_sums(0, scales);
    share_row_sums(1, written);
    __syncthreads();
    if (thread() < kDeltaChunk) {
      tiles_.scales[thread()] = shared_row_sum(0, thread());
      tiles_.written[thread()] = shared_row_sum(1, thread());
    }
    __syncthreads();
    if (thread() < count_) write_decays(head, part, of_states);
  }

  __device__ void write_decays(int head, int part, float of_states) const {
    const int t = thread();
    constexpr int kLast = kDeltaChunk - 1;
    const int document = tiles_.gates.document[t];
    const bool is_last = document == tiles_.gates.document[kLast];
    float sum = is_last ? tiles_.gates.from_start[kLast] * of_states : 0.0F;
#pragma unroll 16
    for (int i = 0; i < kDeltaChunk; ++i) {
      const bool counts = i >= t && tiles_.gates.document[i] == document;
      sum += (counts ? tiles_.scales[i] : 0.0F) + (is_last ? tiles_.written[i] : 0.0F);
    }
    const bool begins = document != (t == 0 ? 0 : tiles_.gates.document[t - 1]);
    add_gate(t, in_.a.value_heads + head, part, begins ? 0.0F : sum);
  }

  // Back through the norm: of x' = scale x f, dx = f scale (d - x f (x f . d)).
  __device__ void finish(int64_t first_column, const Tile (&d)[kTiles], const float* factors,
                         float scale) const {
    float along[2] = {0, 0};
    const auto normed = [&](int half, int tile, int i) {
      const int t = row() + half * 8;
      if (t >= count_) return 0.0F;
      return widen(in_.qkv[(first_ + t) * in_.a.row_size() + first_column + column(tile, i)]) *
             factors[t];
    };
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) along[i / 2] += d[tile].values[i] * normed(i / 2, tile, i % 2);
    }
    share_row_sums(0, along);
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int t = row() + half * 8;
      if (t >= count_) continue;
      const float sum = shared_row_sum(0, t);
      const float factor = factors[t] * scale;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const auto value = [&](int i) {
          return factor * (d[tile].values[2 * half + i] - normed(half, tile, i) * sum);
        };
        *reinterpret_cast<__nv_bfloat162*>(in_.d_qkv + (first_ + t) * in_.a.row_size() +
                                           first_column + column(tile, 0)) =
            __floats2bfloat162_rn(value(0), value(1));
      }
    }
  }

  const DeltaOperands& in_;
  ChunkTiles& tiles_;
  const int key_head_;
  const int chunk_;
  const int64_t sequence_;
  const int64_t first_;  // row of the chunk
  const int count_;      // of its rows
  const int row_;        // the warp's first
  const int column_warp_;
  Tile d_query_[kTiles];
  Tile d_key_[kTiles];
};

template <int kParts>
__global__ __launch_bounds__(kThreads, 1) void delta_chunks_kernel(DeltaOperands operands) {
  extern __shared__ __align__(16) unsigned char memory[];
  ChunkGradient<kParts>(operands, *reinterpret_cast<ChunkTiles*>(memory)).run();
}

}  // namespace

void launch_delta_chunks(const CudaKernelArguments& args, const DeltaOperands& operands) {
  const auto kernel = operands.parts == 1 ? delta_chunks_kernel<1> : delta_chunks_kernel<2>;
  allow_shared_bytes(kernel, sizeof(ChunkTiles));
  const auto chunks =
      static_cast<unsigned>(operands.rows / operands.a.sequence * operands.chunks());
  launch(args,
         {dim3(chunks, static_cast<unsigned>(operands.a.key_heads)), kThreads, sizeof(ChunkTiles)},
         kernel, operands);
}

}  // namespace troupe
