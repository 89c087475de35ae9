#include "ops/attention/attention_sizes.cuh"
#include "ops/attention/attention_tiles.cuh"
#include "ops/attention/cuda/attention_cudnn.h"

namespace troupe {
namespace {

// A block for a tile of queries of one head; the softmax is kept up to date tile by tile of keys.
template <class T, int kSide, int kColumns>
__global__ void __launch_bounds__(kThreads)
    attention_kernel(const T* qkv, T* out, accumulation_t<T>* lse, AttentionSizes sizes) {
  using A = accumulation_t<T>;
  constexpr int kTile = Tiles<A, kSide>::kTile;
  extern __shared__ __align__(16) std::byte shared_memory[];
  const int d = sizes.head_dim;
  A* const q_tile = reinterpret_cast<A*>(shared_memory);
  A* const kv_tile = q_tile + kTile * (d + 1);
  A* const p_tile = kv_tile + kTile * (d + 1);
  const int x = static_cast<int>(threadIdx.x) % kSideThreads;
  const int y = static_cast<int>(threadIdx.x) / kSideThreads;
  // The last tiles see the most keys: they start first.
  const int64_t first_query = int64_t{gridDim.x - 1 - blockIdx.x} * kTile;
  const auto head = static_cast<int>(blockIdx.y);
  const int64_t b = blockIdx.z;
  const int group = head / (sizes.heads / sizes.groups);
  const int64_t stride = sizes.qkv_stride();
  const T* rows = qkv + b * sizes.sequence * stride;
  const T* keys = rows + (sizes.heads + group) * d;
  const T* values = rows + (sizes.heads + sizes.groups + group) * d;
  const A scale = static_cast<A>(sizes.scale);
  const uint64_t seed = sizes.drops ? sizes.dropout.step_seed(*sizes.step) : 0;

  load_tile<T, kTile>(rows + head * d, stride, first_query, sizes.sequence, d, q_tile);
  A sums[kSide][kColumns] = {};
  A largest[kSide];
  A total[kSide];
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
    largest[i] = -infinity<A>();
    total[i] = A(0);
  }
  for (int64_t first_key = sizes.first_key(first_query) / kTile * kTile;
       first_key < first_query + kTile && first_key < sizes.sequence; first_key += kTile) {
    __syncthreads();
    load_tile<T, kTile>(keys, stride, first_key, sizes.sequence, d, kv_tile);
    __syncthreads();
    A scores[kSide][kSide];
    multiply_tiles(q_tile, kv_tile, d, x, y, scores);
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
      const int64_t query = first_query + y + kSideThreads * i;
      A row_largest = largest[i];
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
        const bool seen = sizes.sees(query, first_key + x + kSideThreads * j);
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
        if (sizes.drops && !sizes.keeps(seed, b, head, query, first_key + x + kSideThreads * j)) {
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
    load_tile<T, kTile>(values, stride, first_key, sizes.sequence, d, kv_tile);
    __syncthreads();
    add_product(p_tile, kv_tile, d, x, y, sums);
  }
  const A kept_scale = sizes.drops ? static_cast<A>(sizes.dropout.scale) : A(1);
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
    const int64_t query = first_query + y + kSideThreads * i;
    if (query >= sizes.sequence) continue;
    const int64_t token = b * sizes.sequence + query;
    if (x == 0) lse[token * sizes.heads + head] = largest[i] + log(total[i]);
    T* to = out + token * sizes.out_stride() + head * d;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int column = x + kSideThreads * c;
      if (column < d) to[column] = round_to<T>(sums[i][c] * kept_scale / total[i]);
    }
  }
}

template <class T>
__device__ __forceinline__ ProbabilityGradient<accumulation_t<T>> differentiate(
    const AttentionSizes& sizes, const GradientOperands<T>& operands, uint64_t seed, int64_t b,
    int head, int64_t query, int64_t key, accumulation_t<T> score, accumulation_t<T> dp) {
  using A = accumulation_t<T>;
  if (!sizes.sees(query, key)) return {A(0), A(0)};
  const int64_t at = (b * sizes.sequence + query) * sizes.heads + head;
  const A p = exp(score * static_cast<A>(sizes.scale) - operands.lse[at]);
  A kept = p;
  if (sizes.drops) {
    const bool keeps = sizes.keeps(seed, b, head, query, key);
    const A factor = keeps ? static_cast<A>(sizes.dropout.scale) : A(0);
    kept *= factor;
    dp *= factor;
  }
  return {kept, p * (dp - operands.out_dot[at])};
}

// dk and dv. A block for a tile of keys of one group: goes through the group's heads and their
// tiles of queries in order. Rows of the scores are keys here.
template <class T, int kSide, int kColumns>
__global__ void __launch_bounds__(kThreads)
    key_gradients_kernel(GradientOperands<T> operands, T* d_qkv, AttentionSizes sizes) {
  using A = accumulation_t<T>;
  constexpr int kTile = Tiles<A, kSide>::kTile;
  extern __shared__ __align__(16) std::byte shared_memory[];
  const int d = sizes.head_dim;
  const int tile_elements = kTile * (d + 1);
  A* const k_tile = reinterpret_cast<A*>(shared_memory);
  A* const v_tile = k_tile + tile_elements;
  A* const q_tile = v_tile + tile_elements;
  A* const go_tile = q_tile + tile_elements;
  A* const p_tile = go_tile + tile_elements;
  A* const ds_tile = p_tile + kTile * (kTile + 1);
  const int x = static_cast<int>(threadIdx.x) % kSideThreads;
  const int y = static_cast<int>(threadIdx.x) / kSideThreads;
  const int64_t first_key = int64_t{blockIdx.x} * kTile;
  const auto group = static_cast<int>(blockIdx.y);
  const int64_t b = blockIdx.z;
  const int heads_per_group = sizes.heads / sizes.groups;
  const int64_t stride = sizes.qkv_stride();
  const T* rows = operands.qkv + b * sizes.sequence * stride;
  const int64_t key_column = int64_t{sizes.heads + group} * d;
  const int64_t value_column = int64_t{sizes.heads + sizes.groups + group} * d;
  const uint64_t seed = sizes.drops ? sizes.dropout.step_seed(*sizes.step) : 0;

  load_tile<T, kTile>(rows + key_column, stride, first_key, sizes.sequence, d, k_tile);
  load_tile<T, kTile>(rows + value_column, stride, first_key, sizes.sequence, d, v_tile);
  A dk[kSide][kColumns] = {};
  A dv[kSide][kColumns] = {};
  // Queries from this one on see none of the keys.
  int64_t end_query = sizes.sequence;
  if (sizes.window > 0 && first_key + kTile - 1 + sizes.window < end_query) {
    end_query = first_key + kTile - 1 + sizes.window;
  }
  for (int head = group * heads_per_group; head < (group + 1) * heads_per_group; ++head) {
    const T* d_out = operands.d_out + b * sizes.sequence * sizes.out_stride() + head * d;
    for (int64_t first_query = first_key; first_query < end_query; first_query += kTile) {
      __syncthreads();
      load_tile<T, kTile>(rows + head * d, stride, first_query, sizes.sequence, d, q_tile);
      load_tile<T, kTile>(d_out, sizes.out_stride(), first_query, sizes.sequence, d, go_tile);
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
              differentiate<T>(sizes, operands, seed, b, head, first_query + x + kSideThreads * j,
                               first_key + y + kSideThreads * i, scores[i][j], dp[i][j]);
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
  const A scale = static_cast<A>(sizes.scale);
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
    const int64_t key = first_key + y + kSideThreads * i;
    if (key >= sizes.sequence) continue;
    T* to = d_qkv + (b * sizes.sequence + key) * stride;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int column = x + kSideThreads * c;
      if (column >= d) continue;
      to[key_column + column] = round_to<T>(scale * dk[i][c]);
      to[value_column + column] = round_to<T>(dv[i][c]);
    }
  }
}

// dq. A block for a tile of queries of one head.
template <class T, int kSide, int kColumns>
__global__ void __launch_bounds__(kThreads)
    query_gradients_kernel(GradientOperands<T> operands, T* d_qkv, AttentionSizes sizes) {
  using A = accumulation_t<T>;
  constexpr int kTile = Tiles<A, kSide>::kTile;
  extern __shared__ __align__(16) std::byte shared_memory[];
  const int d = sizes.head_dim;
  const int tile_elements = kTile * (d + 1);
  A* const q_tile = reinterpret_cast<A*>(shared_memory);
  A* const go_tile = q_tile + tile_elements;
  A* const k_tile = go_tile + tile_elements;
  A* const v_tile = k_tile + tile_elements;
  A* const ds_tile = v_tile + tile_elements;
  const int x = static_cast<int>(threadIdx.x) % kSideThreads;
  const int y = static_cast<int>(threadIdx.x) / kSideThreads;
  const int64_t first_query = int64_t{gridDim.x - 1 - blockIdx.x} * kTile;
  const auto head = static_cast<int>(blockIdx.y);
  const int64_t b = blockIdx.z;
  const int group = head / (sizes.heads / sizes.groups);
  const int64_t stride = sizes.qkv_stride();
  const T* rows = operands.qkv + b * sizes.sequence * stride;
  const T* d_out = operands.d_out + b * sizes.sequence * sizes.out_stride() + head * d;
  const uint64_t seed = sizes.drops ? sizes.dropout.step_seed(*sizes.step) : 0;

  load_tile<T, kTile>(rows + head * d, stride, first_query, sizes.sequence, d, q_tile);
  load_tile<T, kTile>(d_out, sizes.out_stride(), first_query, sizes.sequence, d, go_tile);
  A dq[kSide][kColumns] = {};
  for (int64_t first_key = sizes.first_key(first_query) / kTile * kTile;
       first_key < first_query + kTile && first_key < sizes.sequence; first_key += kTile) {
    __syncthreads();
    load_tile<T, kTile>(rows + (sizes.heads + group) * d, stride, first_key, sizes.sequence, d,
                        k_tile);
    load_tile<T, kTile>(rows + (sizes.heads + sizes.groups + group) * d, stride, first_key,
                        sizes.sequence, d, v_tile);
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
            differentiate<T>(sizes, operands, seed, b, head, first_query + y + kSideThreads * i,
                             first_key + x + kSideThreads * j, scores[i][j], dp[i][j])
                .ds;
      }
    }
    store_square(dp, x, y, ds_tile);
    __syncthreads();
    add_product(ds_tile, k_tile, d, x, y, dq);
  }
  const A scale = static_cast<A>(sizes.scale);
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
    const int64_t query = first_query + y + kSideThreads * i;
    if (query >= sizes.sequence) continue;
    T* to = d_qkv + (b * sizes.sequence + query) * stride + head * d;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int column = x + kSideThreads * c;
      if (column < d) to[column] = round_to<T>(scale * dq[i][c]);
    }
  }
}

template <class T, int kSide, int kColumns>
struct AttentionKernels {
  using A = accumulation_t<T>;
  using Tile = Tiles<A, kSide>;

  static unsigned tiles(const AttentionAttributes& a) {
    return static_cast<unsigned>(ceil_divide(a.sequence, Tile::kTile));
  }

  static void forward(const CudaKernelArguments& args) {
    const auto& a = args.attributes->as<AttentionAttributes>();
    const size_t bytes = Tile::bytes(2, 1, a.head_dim);
    const auto kernel = attention_kernel<T, kSide, kColumns>;
    allow_shared_bytes(kernel, bytes);
    launch(args,
           {dim3(tiles(a), static_cast<unsigned>(a.heads), static_cast<unsigned>(a.batch)),
            kThreads, bytes},
           kernel, args.in<T>(0), args.out<T>(0), args.out<A>(1),
           AttentionSizes(a, args.in<int64_t>(1)));
  }

  static void backward(const CudaKernelArguments& args) {
    const auto& a = args.attributes->as<AttentionAttributes>();
    const AttentionSizes sizes(a, args.in<int64_t>(4));
    const GradientOperands<T> operands = gradient_operands<T>(args);
    const auto keys = key_gradients_kernel<T, kSide, kColumns>;
    const size_t key_bytes = Tile::bytes(4, 2, a.head_dim);
    allow_shared_bytes(keys, key_bytes);
    launch(args,
           {dim3(tiles(a), static_cast<unsigned>(a.groups), static_cast<unsigned>(a.batch)),
            kThreads, key_bytes},
           keys, operands, args.out<T>(0), sizes);
    const auto queries = query_gradients_kernel<T, kSide, kColumns>;
    const size_t query_bytes = Tile::bytes(4, 1, a.head_dim);
    allow_shared_bytes(queries, query_bytes);
    launch(args,
           {dim3(tiles(a), static_cast<unsigned>(a.heads), static_cast<unsigned>(a.batch)),
            kThreads, query_bytes},
           queries, operands, args.out<T>(0), sizes);
  }
};

// The larger a head, the smaller the tiles that fit into shared memory.
template <class T, int kSide, class Visit>
CudaKernel by_head_size(int head_dim, const Visit& visit) {
  if (head_dim <= 64) return visit(AttentionKernels<T, kSide, 4>());
  if (head_dim <= 128) return visit(AttentionKernels<T, kSide, 8>());
  if (head_dim <= 256) return visit(AttentionKernels<T, kSide / 2, 16>());
  throw_bad_request(
      "--device cuda: attention heads of more than 256 elements are not supported "
      "yet. Use --device cpu.");
}

bool cudnn_takes(const OpView& op) {
  return cudnn_takes_attention(op.attributes<AttentionAttributes>(), op.output(0).dtype);
}

template <class Visit>
CudaKernel select_attention(const OpView& op, const Visit& visit) {
  const int head_dim = op.attributes<AttentionAttributes>().head_dim;
  switch (op.output(0).dtype) {
    case DType::f64:
      return by_head_size<double, 2>(head_dim, visit);
    case DType::f32:
      return by_head_size<float, 4>(head_dim, visit);
    default:
      return by_head_size<Bf16, 4>(head_dim, visit);
  }
}

}  // namespace

CudaKernel attention_cuda_kernel(const OpView& op) {
  if (cudnn_takes(op)) return cudnn_attention;
  return select_attention(op,
                          [](auto kernels) -> CudaKernel { return &decltype(kernels)::forward; });
}

CudaKernel attention_gradient_cuda_kernel(const OpView& op) {
  if (cudnn_takes(op)) return cudnn_attention_gradient;
  return select_attention(op,
                          [](auto kernels) -> CudaKernel { return &decltype(kernels)::backward; });
}

uint64_t attention_cuda_scratch_bytes(const OpView& op) {
  return cudnn_takes(op) ? cudnn_attention_scratch_bytes() : 0;
}

uint64_t attention_gradient_cuda_scratch_bytes(const OpView& op) {
  if (cudnn_takes(op)) {
    return cudnn_attention_gradient_scratch_bytes(op.attributes<AttentionAttributes>());
  }
  return op.input(3).bytes();  // D has the shape and dtype of lse
}

}  // namespace troupe
