#include "ops/attention/attention_sizes.cuh"
#include "ops/attention/attention_tiles.cuh"
#include "ops/context_attention/context_attention.h"
#include "ops/cuda/peer_exchange.h"

namespace troupe {
namespace {

// Rows of a rank in a sequence are chunks of consecutive positions; tiles of queries and keys lie
// within a chunk.
struct ContextSizes {
  AttentionSizes whole;  // its sequence is all positions
  int64_t here;          // rows of a rank in each sequence
  int64_t chunk;         // rows of a chunk
  int chunks;            // of a rank
  int ranks;
  int rank;
  int64_t rows;  // of a rank, of all sequences

  ContextSizes(const ContextAttentionAttributes& a, const int64_t* step)
      : whole(of_whole(a), step),
        here(a.attention.sequence),
        chunk(a.chunks.ranks == 1 ? here : here / 2),
        chunks(a.chunks.ranks == 1 ? 1 : 2),
        ranks(a.chunks.ranks),
        rank(a.chunks.rank),
        rows(a.attention.batch * here) {}

  static AttentionAttributes of_whole(const ContextAttentionAttributes& a) {
    AttentionAttributes whole = a.attention;
    whole.sequence *= a.chunks.ranks;
    return whole;
  }

  __device__ int64_t query_stride() const { return int64_t{whole.heads} * whole.head_dim; }
  __device__ int64_t key_stride() const { return int64_t{2} * whole.groups * whole.head_dim; }
  // Where chunk number `number` of a rank begins.
  __device__ int64_t position(int of_rank, int number) const {
    return (number == 0 ? of_rank : 2 * ranks - 1 - of_rank) * chunk;
  }
};

// A tile of rows of one chunk.
struct ContextTile {
  int64_t row = 0;       // of the rank's rows in a sequence
  int64_t end = 0;       // of the chunk
  int64_t position = 0;  // of the first row
  int64_t count = 0;

  __device__ ContextTile() = default;
  template <int kTile>
  __device__ static ContextTile of(const ContextSizes& sizes, int rank, int number) {
    const auto tiles = static_cast<int>((sizes.chunk + kTile - 1) / kTile);
    const int half = number / tiles;
    const int64_t first = int64_t{number % tiles} * kTile;
    ContextTile tile;
    tile.row = half * sizes.chunk + first;
    tile.end = (half + 1) * sizes.chunk;
    tile.position = sizes.position(rank, half) + first;
    tile.count = sizes.chunk - first < kTile ? sizes.chunk - first : kTile;
    return tile;
  }
  // Does any query of this tile see any of the keys?
  __device__ bool sees(const ContextTile& keys, int64_t window) const {
    const int64_t last_key = keys.position + keys.count - 1;
    return keys.position < position + count && (window == 0 || last_key > position - window);
  }
};

template <int kTile>
__host__ __device__ int tiles_of_rank(const ContextSizes& sizes) {
  return sizes.chunks * static_cast<int>((sizes.chunk + kTile - 1) / kTile);
}

template <class T>
struct ContextOperands {
  const T* q;
  const T* kv;  // of all ranks
  const T* d_out;
  const accumulation_t<T>* lse;
  const accumulation_t<T>* out_dot;
};

// A block for a tile of queries of one head; the softmax is kept up to date tile by tile of keys,
// in the order of ranks.
template <class T, int kSide, int kColumns>
__global__ void __launch_bounds__(kThreads)
    context_attention_kernel(ContextOperands<T> operands, T* out, accumulation_t<T>* lse,
                             ContextSizes sizes) {
  using A = accumulation_t<T>;
  constexpr int kTile = Tiles<A, kSide>::kTile;
  extern __shared__ __align__(16) std::byte shared_memory[];
  const AttentionSizes& whole = sizes.whole;
  const int d = whole.head_dim;
  A* const q_tile = reinterpret_cast<A*>(shared_memory);
  A* const kv_tile = q_tile + kTile * (d + 1);
  A* const p_tile = kv_tile + kTile * (d + 1);
  const int x = static_cast<int>(threadIdx.x) % kSideThreads;
  const int y = static_cast<int>(threadIdx.x) / kSideThreads;
  const auto head = static_cast<int>(blockIdx.y);
  const int64_t b = blockIdx.z;
  const int group = head / (whole.heads / whole.groups);
  const ContextTile queries =
      ContextTile::of<kTile>(sizes, sizes.rank, static_cast<int>(gridDim.x - 1 - blockIdx.x));
  const A scale = static_cast<A>(whole.scale);
  const uint64_t seed = whole.drops ? whole.dropout.step_seed(*whole.step) : 0;

  load_tile<T, kTile>(operands.q + b * sizes.here * sizes.query_stride() + head * d,
                      sizes.query_stride(), queries.row, queries.end, d, q_tile);
  A sums[kSide][kColumns] = {};
  A largest[kSide];
  A total[kSide];
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
    largest[i] = -infinity<A>();
    total[i] = A(0);
  }
  const int tiles = tiles_of_rank<kTile>(sizes);
  for (int number = 0; number < sizes.ranks * tiles; ++number) {
    const int source = number / tiles;
    const ContextTile keys = ContextTile::of<kTile>(sizes, source, number % tiles);
    if (!queries.sees(keys, whole.window)) continue;
    const T* rows =
        operands.kv + (source * sizes.rows + b * sizes.here) * sizes.key_stride() + group * d;
    __syncthreads();
    load_tile<T, kTile>(rows, sizes.key_stride(), keys.row, keys.end, d, kv_tile);
    __syncthreads();
    A scores[kSide][kSide];
    multiply_tiles(q_tile, kv_tile, d, x, y, scores);
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
      const int64_t query = queries.position + y + kSideThreads * i;
      A row_largest = largest[i];
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
        const int64_t key = x + kSideThreads * j;
        const bool seen = key < keys.count && whole.sees(query, keys.position + key);
        scores[i][j] = seen ? scores[i][j] * scale : -infinity<A>();
        row_largest = scores[i][j] > row_largest ? scores[i][j] : row_largest;
      }
      row_largest = over_row(row_largest, [](A a, A c) { return a > c ? a : c; });
      // A row that has seen nothing yet has nothing to rescale.
      const bool nothing = row_largest == -infinity<A>();
      const A factor = nothing ? A(1) : exp(largest[i] - row_largest);
      largest[i] = row_largest;
      A row_total = 0;
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
        A p = nothing ? A(0) : exp(scores[i][j] - row_largest);
        row_total += p;
        if (whole.drops &&
            !whole.keeps(seed, b, head, query, keys.position + x + kSideThreads * j)) {
          p = A(0);
        }
        scores[i][j] = p;
      }
      total[i] = total[i] * factor + over_row(row_total, [](A a, A c) { return a + c; });
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sums[i][c] *= factor;
    }
    store_square(scores, x, y, p_tile);
    __syncthreads();
    load_tile<T, kTile>(rows + whole.groups * d, sizes.key_stride(), keys.row, keys.end, d,
                        kv_tile);
    __syncthreads();
    add_product(p_tile, kv_tile, d, x, y, sums);
  }
  const A kept_scale = whole.drops ? static_cast<A>(whole.dropout.scale) : A(1);
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
    const int64_t row = y + kSideThreads * i;
    if (row >= queries.count) continue;
    const int64_t token = b * sizes.here + queries.row + row;
    if (x == 0) lse[token * whole.heads + head] = largest[i] + log(total[i]);
    T* to = out + token * sizes.query_stride() + head * d;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int column = x + kSideThreads * c;
      if (column < d) to[column] = round_to<T>(sums[i][c] * kept_scale / total[i]);
    }
  }
}

// Of query `query` of `queries` and key `key` of `keys`.
template <class T>
__device__ __forceinline__ ProbabilityGradient<accumulation_t<T>> differentiate_pair(
    const ContextSizes& sizes, const ContextOperands<T>& operands, uint64_t seed, int64_t b,
    int head, const ContextTile& queries, int64_t query, const ContextTile& keys, int64_t key,
    accumulation_t<T> score, accumulation_t<T> dp) {
  using A = accumulation_t<T>;
  const AttentionSizes& whole = sizes.whole;
  const int64_t at_query = queries.position + query;
  const int64_t at_key = keys.position + key;
  if (query >= queries.count || key >= keys.count || !whole.sees(at_query, at_key)) {
    return {A(0), A(0)};
  }
  const int64_t at = (b * sizes.here + queries.row + query) * whole.heads + head;
  const A p = exp(score * static_cast<A>(whole.scale) - operands.lse[at]);
  A kept = p;
  if (whole.drops) {
    const bool keeps = whole.keeps(seed, b, head, at_query, at_key);
    const A factor = keeps ? static_cast<A>(whole.dropout.scale) : A(0);
    kept *= factor;
    dp *= factor;
  }
  return {kept, p * (dp - operands.out_dot[at])};
}

// This rank's part of dk and dv of all ranks' keys. A block for a tile of keys of one group: goes
// through the group's heads and their tiles of queries in order. Rows of the scores are keys here.
template <class T, class Out, int kSide, int kColumns>
__global__ void __launch_bounds__(kThreads)
    context_key_gradients_kernel(ContextOperands<T> operands, Out* d_kv, ContextSizes sizes) {
  using A = accumulation_t<T>;
  constexpr int kTile = Tiles<A, kSide>::kTile;
  extern __shared__ __align__(16) std::byte shared_memory[];
  const AttentionSizes& whole = sizes.whole;
  const int d = whole.head_dim;
  const int tile_elements = kTile * (d + 1);
  A* const k_tile = reinterpret_cast<A*>(shared_memory);
  A* const v_tile = k_tile + tile_elements;
  A* const q_tile = v_tile + tile_elements;
  A* const go_tile = q_tile + tile_elements;
  A* const p_tile = go_tile + tile_elements;
  A* const ds_tile = p_tile + kTile * (kTile + 1);
  const int x = static_cast<int>(threadIdx.x) % kSideThreads;
  const int y = static_cast<int>(threadIdx.x) / kSideThreads;
  const auto group = static_cast<int>(blockIdx.y);
  const int64_t b = blockIdx.z;
  const int heads_per_group = whole.heads / whole.groups;
  const int tiles = tiles_of_rank<kTile>(sizes);
  const int source = static_cast<int>(blockIdx.x) / tiles;
  const ContextTile keys =
      ContextTile::of<kTile>(sizes, source, static_cast<int>(blockIdx.x) % tiles);
  const int64_t first_row = source * sizes.rows + b * sizes.here;
  const int64_t stride = sizes.query_stride();
  const uint64_t seed = whole.drops ? whole.dropout.step_seed(*whole.step) : 0;
  const T* rows = operands.kv + first_row * sizes.key_stride() + group * d;
  load_tile<T, kTile>(rows, sizes.key_stride(), keys.row, keys.end, d, k_tile);
  load_tile<T, kTile>(rows + whole.groups * d, sizes.key_stride(), keys.row, keys.end, d, v_tile);

  A dk[kSide][kColumns] = {};
  A dv[kSide][kColumns] = {};
  for (int head = group * heads_per_group; head < (group + 1) * heads_per_group; ++head) {
    const int64_t first = b * sizes.here * stride + head * d;
    for (int number = 0; number < tiles; ++number) {
      const ContextTile queries = ContextTile::of<kTile>(sizes, sizes.rank, number);
      if (!queries.sees(keys, whole.window)) continue;
      __syncthreads();
      load_tile<T, kTile>(operands.q + first, stride, queries.row, queries.end, d, q_tile);
      load_tile<T, kTile>(operands.d_out + first, stride, queries.row, queries.end, d, go_tile);
      __syncthreads();
      A scores[kSide][kSide];
      A dp[kSide][kSide];
      multiply_tiles(k_tile, q_tile, d, x, y, scores);
      multiply_tiles(v_tile, go_tile, d, x, y, dp);
#pragma unroll
      for (int i = 0; i < kSide; ++i) {
#pragma unroll
        for (int j = 0; j < kSide; ++j) {
          const auto gradient =
              differentiate_pair<T>(sizes, operands, seed, b, head, queries, x + kSideThreads * j,
                                    keys, y + kSideThreads * i, scores[i][j], dp[i][j]);
          scores[i][j] = gradient.kept;
          dp[i][j] = gradient.ds;
        }
      }
      store_square(scores, x, y, p_tile);
      store_square(dp, x, y, ds_tile);
      __syncthreads();
      add_product(p_tile, go_tile, d, x, y, dv);
      add_product(ds_tile, q_tile, d, x, y, dk);
    }
  }
  const A scale = static_cast<A>(whole.scale);
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
    const int64_t row = y + kSideThreads * i;
    if (row >= keys.count) continue;
    Out* to = d_kv + (first_row + keys.row + row) * sizes.key_stride() + group * d;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int column = x + kSideThreads * c;
      if (column >= d) continue;
      to[column] = round_to<Out>(scale * dk[i][c]);
      to[whole.groups * d + column] = round_to<Out>(dv[i][c]);
    }
  }
}

// dq. A block for a tile of queries of one head.
template <class T, int kSide, int kColumns>
__global__ void __launch_bounds__(kThreads)
    context_query_gradients_kernel(ContextOperands<T> operands, T* d_q, ContextSizes sizes) {
  using A = accumulation_t<T>;
  constexpr int kTile = Tiles<A, kSide>::kTile;
  extern __shared__ __align__(16) std::byte shared_memory[];
  const AttentionSizes& whole = sizes.whole;
  const int d = whole.head_dim;
  const int tile_elements = kTile * (d + 1);
  A* const q_tile = reinterpret_cast<A*>(shared_memory);
  A* const go_tile = q_tile + tile_elements;
  A* const k_tile = go_tile + tile_elements;
  A* const v_tile = k_tile + tile_elements;
  A* const ds_tile = v_tile + tile_elements;
  const int x = static_cast<int>(threadIdx.x) % kSideThreads;
  const int y = static_cast<int>(threadIdx.x) / kSideThreads;
  const auto head = static_cast<int>(blockIdx.y);
  const int64_t b = blockIdx.z;
  const int group = head / (whole.heads / whole.groups);
  const ContextTile queries =
      ContextTile::of<kTile>(sizes, sizes.rank, static_cast<int>(gridDim.x - 1 - blockIdx.x));
  const int64_t stride = sizes.query_stride();
  const int64_t first = b * sizes.here * stride + head * d;
  const uint64_t seed = whole.drops ? whole.dropout.step_seed(*whole.step) : 0;

  load_tile<T, kTile>(operands.q + first, stride, queries.row, queries.end, d, q_tile);
  load_tile<T, kTile>(operands.d_out + first, stride, queries.row, queries.end, d, go_tile);
  A dq[kSide][kColumns] = {};
  const int tiles = tiles_of_rank<kTile>(sizes);
  for (int number = 0; number < sizes.ranks * tiles; ++number) {
    const int source = number / tiles;
    const ContextTile keys = ContextTile::of<kTile>(sizes, source, number % tiles);
    if (!queries.sees(keys, whole.window)) continue;
    const T* rows =
        operands.kv + (source * sizes.rows + b * sizes.here) * sizes.key_stride() + group * d;
    __syncthreads();
    load_tile<T, kTile>(rows, sizes.key_stride(), keys.row, keys.end, d, k_tile);
    load_tile<T, kTile>(rows + whole.groups * d, sizes.key_stride(), keys.row, keys.end, d, v_tile);
    __syncthreads();
    A scores[kSide][kSide];
    A dp[kSide][kSide];
    multiply_tiles(q_tile, k_tile, d, x, y, scores);
    multiply_tiles(go_tile, v_tile, d, x, y, dp);
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
        dp[i][j] =
            differentiate_pair<T>(sizes, operands, seed, b, head, queries, y + kSideThreads * i,
                                  keys, x + kSideThreads * j, scores[i][j], dp[i][j])
                .ds;
      }
    }
    store_square(dp, x, y, ds_tile);
    __syncthreads();
    add_product(ds_tile, k_tile, d, x, y, dq);
  }
  const A scale = static_cast<A>(whole.scale);
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
    const int64_t row = y + kSideThreads * i;
    if (row >= queries.count) continue;
    T* to = d_q + first + (queries.row + row) * stride;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int column = x + kSideThreads * c;
      if (column < d) to[column] = round_to<T>(scale * dq[i][c]);
    }
  }
}

// Where the sums of a rank's key gradients lie on all ranks, in the order in which they are added.
template <class A>
struct KeyGradientParts {
  std::array<const A*, kMostPeers> of{};
};

template <class T>
__global__ void sum_key_gradients_kernel(KeyGradientParts<accumulation_t<T>> parts, int ranks,
                                         T* d_kv, int64_t elements) {
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
#pragma unroll 2
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += threads) {
    accumulation_t<T> sum = parts.of[0][i];
    for (int r = 1; r < ranks; ++r) sum += parts.of[static_cast<size_t>(r)][i];
    d_kv[i] = round_to<T>(sum);
  }
}

uint64_t aligned(uint64_t bytes) {
  return (bytes + 255) / 256 * 256;
}

// The scratch memory of a ring's kernels: keys and values of all ranks, this rank's part of their
// gradients, and D of the queries.
struct RingScratch {
  RingScratch(const ContextAttentionAttributes& a, DType dtype) {
    const auto rows =
        static_cast<uint64_t>(a.attention.batch) * static_cast<uint64_t>(a.attention.sequence);
    const uint64_t elements = rows * static_cast<uint64_t>(a.chunks.ranks) * 2 *
                              static_cast<uint64_t>(a.attention.groups) *
                              static_cast<uint64_t>(a.attention.head_dim);
    const DType wide = accumulation_dtype(dtype);
    keys = aligned(elements * size_of(dtype));
    gradients = aligned(elements * size_of(wide));
    dots = aligned(rows * static_cast<uint64_t>(a.attention.heads) * size_of(wide));
  }
  uint64_t keys;
  uint64_t gradients;
  uint64_t dots;
};

// Brings all ranks' keys and values to this one, by rank.
void gather_keys(const CudaKernelArguments& args, const CudaTensor& own, int input,
                 std::byte* keys) {
  const int64_t bytes = own.shape.elements() * static_cast<int64_t>(size_of(own.dtype));
  const std::array<PeerGather, 1> blocks = {
      {{.operand = input,
        .block =
            [bytes](int) {
              return IndexRange{0, bytes};
            },
        .to = [=](int place) { return keys + place * bytes; }}}};
  gather_from_peers(args, blocks);
}

template <class T, int kSide, int kColumns>
struct ContextKernels {
  using A = accumulation_t<T>;
  using Tile = Tiles<A, kSide>;

  static void forward_over(const CudaKernelArguments& args, const T* kv) {
    const auto& a = args.attributes->as<ContextAttentionAttributes>();
    const ContextSizes sizes(a, args.in<int64_t>(2));
    const ContextOperands<T> operands{
        .q = args.in<T>(0), .kv = kv, .d_out = nullptr, .lse = nullptr, .out_dot = nullptr};
    const size_t bytes = Tile::bytes(2, 1, a.attention.head_dim);
    const auto kernel = context_attention_kernel<T, kSide, kColumns>;
    allow_shared_bytes(kernel, bytes);
    launch(args, {query_grid(a, sizes), kThreads, bytes}, kernel, operands, args.out<T>(0),
           args.out<A>(1), sizes);
  }

  template <class Out>
  static void backward_over(const CudaKernelArguments& args, const T* kv, A* dots, Out* d_kv) {
    const auto& a = args.attributes->as<ContextAttentionAttributes>();
    const ContextSizes sizes(a, args.in<int64_t>(5));
    const int64_t count = sizes.rows * a.attention.heads;
    launch(args, {static_cast<unsigned>(ceil_divide(count, 8)), 256}, out_dot_kernel<T>,
           args.in<T>(0), args.in<T>(3), dots, count, a.attention.head_dim);
    const ContextOperands<T> operands{.q = args.in<T>(1),
                                      .kv = kv,
                                      .d_out = args.in<T>(0),
                                      .lse = args.in<A>(4),
                                      .out_dot = dots};
    const auto keys = context_key_gradients_kernel<T, Out, kSide, kColumns>;
    const size_t key_bytes = Tile::bytes(4, 2, a.attention.head_dim);
    allow_shared_bytes(keys, key_bytes);
    launch(
        args,
        {dim3(static_cast<unsigned>(sizes.ranks * tiles_of_rank<Tile::kTile>(sizes)),
              static_cast<unsigned>(a.attention.groups), static_cast<unsigned>(a.attention.batch)),
         kThreads, key_bytes},
        keys, operands, d_kv, sizes);
    const auto queries = context_query_gradients_kernel<T, kSide, kColumns>;
    const size_t query_bytes = Tile::bytes(4, 1, a.attention.head_dim);
    allow_shared_bytes(queries, query_bytes);
    launch(args, {query_grid(a, sizes), kThreads, query_bytes}, queries, operands, args.out<T>(0),
           sizes);
  }

  static dim3 query_grid(const ContextAttentionAttributes& a, const ContextSizes& sizes) {
    return {static_cast<unsigned>(tiles_of_rank<Tile::kTile>(sizes)),
            static_cast<unsigned>(a.attention.heads), static_cast<unsigned>(a.attention.batch)};
  }

  static void forward(const CudaKernelArguments& args) { forward_over(args, args.in<T>(1)); }

  static void backward(const CudaKernelArguments& args) {
    backward_over<T>(args, args.in<T>(2), reinterpret_cast<A*>(args.scratch), args.out<T>(1));
  }

  static void ring_forward(const CudaKernelArguments& args) {
    gather_keys(args, args.input(1), 1, args.scratch);
    forward_over(args, reinterpret_cast<const T*>(args.scratch));
  }

  static void ring_backward(const CudaKernelArguments& args) {
    const CudaPeers& peers = *args.peers;
    const auto& a = args.attributes->as<ContextAttentionAttributes>();
    const RingScratch scratch(a, dtype_of<T>);
    gather_keys(args, args.input(2), 2, args.scratch);
    std::byte* const gradients = args.scratch + scratch.keys;
    backward_over<A>(args, reinterpret_cast<const T*>(args.scratch),
                     reinterpret_cast<A*>(gradients + scratch.gradients),
                     reinterpret_cast<A*>(gradients));
    peers.meet(args);
    // From the keys' own rank on up the ring.
    const int64_t elements = args.output(1).shape.elements();
    const int64_t bytes = elements * static_cast<int64_t>(sizeof(A));
    if (peers.is_staged()) exchange_sections(args, gradients, args.staging, bytes);
    KeyGradientParts<A> parts;
    for (int k = 0; k < peers.size(); ++k) {
      const int place = (peers.rank() + k) % peers.size();
      const std::byte* const part =
          peers.is_staged() && place != peers.rank()
              ? args.staging + place * bytes
              : peers.scratch(place) + scratch.keys + peers.rank() * bytes;
      parts.of[static_cast<size_t>(k)] = reinterpret_cast<const A*>(part);
    }
    launch(args, {blocks_for(elements, 256), 256}, sum_key_gradients_kernel<T>, parts, peers.size(),
           args.out<T>(1), elements);
    peers.meet(args);
  }
};

// The larger a head, the smaller the tiles that fit into shared memory.
template <class T, int kSide, class Visit>
CudaKernel visit_head_size(int head_dim, const Visit& visit) {
  if (head_dim <= 64) return visit(ContextKernels<T, kSide, 4>());
  if (head_dim <= 128) return visit(ContextKernels<T, kSide, 8>());
  if (head_dim <= 256) return visit(ContextKernels<T, kSide / 2, 16>());
  throw_bad_request(
      "--device cuda: attention heads of more than 256 elements are not supported "
      "yet. Use --device cpu.");
}

template <class Visit>
CudaKernel visit_kernels(const OpView& op, const Visit& visit) {
  const int head_dim = op.attributes<ContextAttentionAttributes>().attention.head_dim;
  switch (op.output(0).dtype) {
    case DType::f64:
      return visit_head_size<double, 2>(head_dim, visit);
    case DType::f32:
      return visit_head_size<float, 4>(head_dim, visit);
    default:
      return visit_head_size<Bf16, 4>(head_dim, visit);
  }
}

}  // namespace

CudaKernel context_attention_cuda_kernel(const OpView& op) {
  return visit_kernels(op, [](auto kernels) -> CudaKernel { return &decltype(kernels)::forward; });
}
CudaKernel context_attention_gradient_cuda_kernel(const OpView& op) {
  return visit_kernels(op, [](auto kernels) -> CudaKernel { return &decltype(kernels)::backward; });
}
CudaKernel ring_attention_cuda_kernel(const OpView& op) {
  return visit_kernels(op,
                       [](auto kernels) -> CudaKernel { return &decltype(kernels)::ring_forward; });
}
CudaKernel ring_attention_gradient_cuda_kernel(const OpView& op) {
  return visit_kernels(
      op, [](auto kernels) -> CudaKernel { return &decltype(kernels)::ring_backward; });
}

uint64_t context_attention_gradient_cuda_scratch_bytes(const OpView& op) {
  return op.input(4).bytes();  // D has the shape and dtype of lse
}
uint64_t ring_attention_cuda_scratch_bytes(const OpView& op) {
  return RingScratch(op.attributes<ContextAttentionAttributes>(), op.input(0).dtype).keys;
}
uint64_t ring_attention_gradient_cuda_scratch_bytes(const OpView& op) {
  const RingScratch scratch(op.attributes<ContextAttentionAttributes>(), op.input(1).dtype);
  return scratch.keys + scratch.gradients + scratch.dots;
}

}  // namespace troupe
