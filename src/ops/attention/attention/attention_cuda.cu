#include "ops/attention/attention/attention_cuda.h"
#include "ops/attention/attention/attention_tiles.cuh"
#include "ops/attention/attention/cuda/attention_cudnn.h"
#include "ops/attention/attention/cuda/attention_sizes.cuh"
#include "ops/attention/attention/cuda/attention_sm90.h"
#include "ops/attention/attention/cuda/with_variant.h"
#include "ops/attention/attention_sinks/attention_sinks.h"

namespace troupe {
namespace {

// D of each token and head: a warp each.
template <class T>
__global__ void out_dot_kernel(const T* d_out, const T* out, accumulation_t<T>* out_dot,
                               int64_t count, int d) {
  const int64_t i = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32;
  if (i >= count) return;
  accumulation_t<T> sum = 0;
  for (int c = static_cast<int>(threadIdx.x) % 32; c < d; c += 32) {
    sum += widen(d_out[i * d + c]) * widen(out[i * d + c]);
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) out_dot[i] = sum;
}

template <class T>
struct AttentionOperands {
  const T* q;
  const T* k;
  const T* v;
  // Of the gradient.
  const T* d_out;
  const accumulation_t<T>* lse;
  const accumulation_t<T>* out_dot;

  explicit AttentionOperands(const AttentionCall& call, const std::byte* dots = nullptr)
      : q(static_cast<const T*>(call.q)),
        k(static_cast<const T*>(call.k)),
        v(static_cast<const T*>(call.v)),
        d_out(static_cast<const T*>(call.d_out)),
        lse(static_cast<const accumulation_t<T>*>(call.lse)),
        out_dot(reinterpret_cast<const accumulation_t<T>*>(dots)) {}
};

// A probability with its gradient's factors.
template <class A>
struct ProbabilityGradient {
  A kept;  // the probability as it multiplies the values
  A ds;
};

// A block for a tile of queries of one head; the softmax is kept up to date tile by tile of keys.
template <class T, int kSide, int kColumns>
__global__ void __launch_bounds__(kThreads)
    attention_kernel(AttentionOperands<T> operands, T* out, accumulation_t<T>* lse,
                     AttentionSizes sizes) {
  using A = accumulation_t<T>;
  constexpr int kTile = Tiles<A, kSide>::kTile;
  extern __shared__ __align__(16) std::byte shared_memory[];
  const int d = sizes.head_dim;
  const int e = sizes.value_dim;
  A* const q_tile = reinterpret_cast<A*>(shared_memory);
  A* const kv_tile = q_tile + kTile * (d + 1);
  A* const p_tile = kv_tile + kTile * ((d > e ? d : e) + 1);
  const int x = static_cast<int>(threadIdx.x) % kSideThreads;
  const int y = static_cast<int>(threadIdx.x) / kSideThreads;
  // The last tiles see the most keys: they start first.
  const QueryTile queries =
      QueryTile::make<kTile>(sizes, static_cast<int>(gridDim.x - 1 - blockIdx.x));
  const auto head = static_cast<int>(blockIdx.y);
  const int64_t b = blockIdx.z;
  const int group = head / (sizes.heads / sizes.groups);
  const int64_t first = b * sizes.positions * sizes.key_stride;
  const T* keys = operands.k + first + group * d;
  const T* values = operands.v + first + group * e;
  const AttentionMask mask = queries.mask(sizes, b);
  const A scale = static_cast<A>(sizes.scale);
  const uint64_t seed = sizes.drops ? sizes.dropout.step_seed(*sizes.step) : 0;

  load_tile<T, kTile>(operands.q + b * sizes.rows * sizes.query_stride + head * d,
                      sizes.query_stride, queries.row, queries.end, d, q_tile);
  A sums[kSide][kColumns] = {};
  A largest[kSide];
  A total[kSide];
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
    largest[i] = -infinity<A>();
    total[i] = A(0);
  }
  for (int64_t first_key = mask.first_key(queries.position) / kTile * kTile;
       first_key < queries.position + queries.count; first_key += kTile) {
    __syncthreads();
    load_tile<T, kTile>(keys, sizes.key_stride, first_key, sizes.positions, d, kv_tile);
    __syncthreads();
    A scores[kSide][kSide];
    multiply_tiles(q_tile, kv_tile, d, x, y, scores);
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
      const int64_t query = queries.position + y + kSideThreads * i;
      // Rows that the tile does not have see nothing.
      const bool is_query = y + kSideThreads * i < queries.count;
      const int64_t first_seen = is_query ? mask.first_key(query) : query + 1;
      A row_largest = largest[i];
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
        const int64_t key = first_key + x + kSideThreads * j;
        const bool seen = key >= first_seen && key <= query;
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
    load_tile<T, kTile>(values, sizes.key_stride, first_key, sizes.positions, e, kv_tile);
    __syncthreads();
    add_product(p_tile, kv_tile, e, x, y, sums);
  }
  const A kept_scale = sizes.drops ? static_cast<A>(sizes.dropout.scale) : A(1);
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
    const int64_t row = y + kSideThreads * i;
    if (row >= queries.count) continue;
    const int64_t token = b * sizes.rows + queries.row + row;
    if (x == 0) lse[token * sizes.heads + head] = largest[i] + log(total[i]);
    T* to = out + token * sizes.out_stride() + head * e;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int column = x + kSideThreads * c;
      if (column < e) to[column] = round_to<T>(sums[i][c] * kept_scale / total[i]);
    }
  }
}

// Of query `row` of a tile.
template <class T>
__device__ __forceinline__ ProbabilityGradient<accumulation_t<T>> differentiate(
    const AttentionSizes& sizes, const AttentionOperands<T>& operands, uint64_t seed, int64_t b,
    int head, const QueryTile& queries, const AttentionMask& mask, int row, int64_t key,
    accumulation_t<T> score, accumulation_t<T> dp) {
  using A = accumulation_t<T>;
  const int64_t query = queries.position + row;
  if (row >= queries.count || key > query || key < mask.first_key(query)) return {A(0), A(0)};
  const int64_t at = (b * sizes.rows + queries.row + row) * sizes.heads + head;
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
template <class T, class Out, int kSide, int kColumns>
__global__ void __launch_bounds__(kThreads)
    key_gradients_kernel(AttentionOperands<T> operands, Out* d_k, Out* d_v, AttentionSizes sizes) {
  using A = accumulation_t<T>;
  constexpr int kTile = Tiles<A, kSide>::kTile;
  extern __shared__ __align__(16) std::byte shared_memory[];
  const int d = sizes.head_dim;
  const int e = sizes.value_dim;
  A* const k_tile = reinterpret_cast<A*>(shared_memory);
  A* const v_tile = k_tile + kTile * (d + 1);
  A* const q_tile = v_tile + kTile * (e + 1);
  A* const go_tile = q_tile + kTile * (d + 1);
  A* const p_tile = go_tile + kTile * (e + 1);
  A* const ds_tile = p_tile + kTile * (kTile + 1);
  const int x = static_cast<int>(threadIdx.x) % kSideThreads;
  const int y = static_cast<int>(threadIdx.x) / kSideThreads;
  const int64_t first_key = int64_t{blockIdx.x} * kTile;
  const auto group = static_cast<int>(blockIdx.y);
  const int64_t b = blockIdx.z;
  const int heads_per_group = sizes.heads / sizes.groups;
  const int64_t first = b * sizes.positions * sizes.key_stride;
  const uint64_t seed = sizes.drops ? sizes.dropout.step_seed(*sizes.step) : 0;

  load_tile<T, kTile>(operands.k + first + group * d, sizes.key_stride, first_key, sizes.positions,
                      d, k_tile);
  load_tile<T, kTile>(operands.v + first + group * e, sizes.key_stride, first_key, sizes.positions,
                      e, v_tile);
  A dk[kSide][kColumns] = {};
  A dv[kSide][kColumns] = {};
  const auto chunks = static_cast<int>(sizes.rows / sizes.chunk);
  const auto tiles = static_cast<int>((sizes.chunk + kTile - 1) / kTile);
  for (int head = group * heads_per_group; head < (group + 1) * heads_per_group; ++head) {
    const T* q = operands.q + b * sizes.rows * sizes.query_stride + head * d;
    const T* d_out = operands.d_out + b * sizes.rows * sizes.out_stride() + head * e;
    for (int number = 0; number < chunks * tiles; ++number) {
      const QueryTile queries = QueryTile::make<kTile>(sizes, number);
      const AttentionMask mask = queries.mask(sizes, b);
      if (!mask.any(queries.block(), {first_key, kTile})) continue;
      __syncthreads();
      load_tile<T, kTile>(q, sizes.query_stride, queries.row, queries.end, d, q_tile);
      load_tile<T, kTile>(d_out, sizes.out_stride(), queries.row, queries.end, e, go_tile);
      __syncthreads();
      A scores[kSide][kSide];
      A dp[kSide][kSide];
      multiply_tiles(k_tile, q_tile, d, x, y, scores);
      multiply_tiles(v_tile, go_tile, e, x, y, dp);
#pragma unroll
      for (int i = 0; i < kSide; ++i) {
#pragma unroll
        for (int j = 0; j < kSide; ++j) {
          const auto gradient =
              differentiate<T>(sizes, operands, seed, b, head, queries, mask, x + kSideThreads * j,
                               first_key + y + kSideThreads * i, scores[i][j], dp[i][j]);
          scores[i][j] = gradient.kept;
          dp[i][j] = gradient.ds;
        }
      }
      store_square(scores, x, y, p_tile);
      store_square(dp, x, y, ds_tile);
      __syncthreads();
      add_product(p_tile, go_tile, e, x, y, dv);
      add_product(ds_tile, q_tile, d, x, y, dk);
    }
  }
  const A scale = static_cast<A>(sizes.scale);
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
    const int64_t key = first_key + y + kSideThreads * i;
    if (key >= sizes.positions) continue;
    const int64_t to = first + key * sizes.key_stride;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int column = x + kSideThreads * c;
      if (column < d) d_k[to + group * d + column] = round_to<Out>(scale * dk[i][c]);
      if (column < e) d_v[to + group * e + column] = round_to<Out>(dv[i][c]);
    }
  }
}

// dq. A block for a tile of queries of one head.
template <class T, int kSide, int kColumns>
__global__ void __launch_bounds__(kThreads)
    query_gradients_kernel(AttentionOperands<T> operands, T* d_q, AttentionSizes sizes) {
  using A = accumulation_t<T>;
  constexpr int kTile = Tiles<A, kSide>::kTile;
  extern __shared__ __align__(16) std::byte shared_memory[];
  const int d = sizes.head_dim;
  const int e = sizes.value_dim;
  A* const q_tile = reinterpret_cast<A*>(shared_memory);
  A* const go_tile = q_tile + kTile * (d + 1);
  A* const k_tile = go_tile + kTile * (e + 1);
  A* const v_tile = k_tile + kTile * (d + 1);
  A* const ds_tile = v_tile + kTile * (e + 1);
  const int x = static_cast<int>(threadIdx.x) % kSideThreads;
  const int y = static_cast<int>(threadIdx.x) / kSideThreads;
  const QueryTile queries =
      QueryTile::make<kTile>(sizes, static_cast<int>(gridDim.x - 1 - blockIdx.x));
  const auto head = static_cast<int>(blockIdx.y);
  const int64_t b = blockIdx.z;
  const int group = head / (sizes.heads / sizes.groups);
  const int64_t first = b * sizes.positions * sizes.key_stride;
  const int64_t stride = sizes.query_stride;
  const int64_t first_row = b * sizes.rows * stride + head * d;
  const T* d_out = operands.d_out + b * sizes.rows * sizes.out_stride() + head * e;
  const AttentionMask mask = queries.mask(sizes, b);
  const uint64_t seed = sizes.drops ? sizes.dropout.step_seed(*sizes.step) : 0;

  load_tile<T, kTile>(operands.q + first_row, stride, queries.row, queries.end, d, q_tile);
  load_tile<T, kTile>(d_out, sizes.out_stride(), queries.row, queries.end, e, go_tile);
  A dq[kSide][kColumns] = {};
  for (int64_t first_key = mask.first_key(queries.position) / kTile * kTile;
       first_key < queries.position + queries.count; first_key += kTile) {
    __syncthreads();
    load_tile<T, kTile>(operands.k + first + group * d, sizes.key_stride, first_key,
                        sizes.positions, d, k_tile);
    load_tile<T, kTile>(operands.v + first + group * e, sizes.key_stride, first_key,
                        sizes.positions, e, v_tile);
    __syncthreads();
    A scores[kSide][kSide];
    A dp[kSide][kSide];
    multiply_tiles(q_tile, k_tile, d, x, y, scores);
    multiply_tiles(go_tile, v_tile, e, x, y, dp);
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
        dp[i][j] =
            differentiate<T>(sizes, operands, seed, b, head, queries, mask, y + kSideThreads * i,
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
    const int64_t row = y + kSideThreads * i;
    if (row >= queries.count) continue;
    T* to = d_q + first_row + (queries.row + row) * stride;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int column = x + kSideThreads * c;
      if (column < d) to[column] = round_to<T>(scale * dq[i][c]);
    }
  }
}

// Elements of a head, of queries and keys or of values.
int largest_head(const AttentionAttributes& a) {
  return std::max(a.head_dim, a.value_size());
}

template <class T, int kSide, int kColumns>
struct AttentionKernels {
  using A = accumulation_t<T>;
  using Tile = Tiles<A, kSide>;

  static dim3 query_grid(const AttentionShape& shape) {
    const int64_t tiles = shape.rows() / shape.chunk() * ceil_divide(shape.chunk(), Tile::kTile);
    return {static_cast<unsigned>(tiles), static_cast<unsigned>(shape.attributes.heads),
            static_cast<unsigned>(shape.attributes.batch)};
  }

  static void forward(const CudaKernelArguments& args, const AttentionCall& call) {
    const AttentionAttributes& a = call.shape.attributes;
    const size_t bytes = Tile::bytes({a.head_dim, largest_head(a)}, 1);
    const auto kernel = attention_kernel<T, kSide, kColumns>;
    allow_shared_bytes(kernel, bytes);
    launch(args, {query_grid(call.shape), kThreads, bytes}, kernel, AttentionOperands<T>(call),
           static_cast<T*>(call.out), static_cast<A*>(call.lse), AttentionSizes(call));
  }

  template <class Out>
  static void key_gradients(const CudaKernelArguments& args, const AttentionCall& call,
                            const AttentionOperands<T>& operands) {
    const AttentionAttributes& a = call.shape.attributes;
    const auto kernel = key_gradients_kernel<T, Out, kSide, kColumns>;
    const size_t bytes = Tile::bytes({a.head_dim, a.value_size(), a.head_dim, a.value_size()}, 2);
    allow_shared_bytes(kernel, bytes);
    launch(args,
           {dim3(static_cast<unsigned>(ceil_divide(call.shape.positions(), Tile::kTile)),
                 static_cast<unsigned>(a.groups), static_cast<unsigned>(a.batch)),
            kThreads, bytes},
           kernel, operands, static_cast<Out*>(call.d_k), static_cast<Out*>(call.d_v),
           AttentionSizes(call));
  }

  // D of the queries is in the scratch memory.
  static void backward(const CudaKernelArguments& args, const AttentionCall& call,
                       std::byte* scratch) {
    const AttentionAttributes& a = call.shape.attributes;
    const int64_t count = a.batch * call.shape.rows() * a.heads;
    launch(args, {static_cast<unsigned>(ceil_divide(count, 8)), 256}, out_dot_kernel<T>,
           static_cast<const T*>(call.d_out), static_cast<const T*>(call.out),
           reinterpret_cast<A*>(scratch), count, a.value_size());
    const AttentionOperands<T> operands(call, scratch);
    if (call.shape.wide_key_gradients) {
      key_gradients<A>(args, call, operands);
    } else {
      key_gradients<T>(args, call, operands);
    }
    const auto kernel = query_gradients_kernel<T, kSide, kColumns>;
    const size_t bytes = Tile::bytes({a.head_dim, a.value_size(), a.head_dim, a.value_size()}, 1);
    allow_shared_bytes(kernel, bytes);
    launch(args, {query_grid(call.shape), kThreads, bytes}, kernel, operands,
           static_cast<T*>(call.d_q), AttentionSizes(call));
  }
};

// The larger a head, the smaller the tiles that fit into shared memory.
template <class T, int kSide, class Visit>
void by_head_size(int head_dim, const Visit& visit) {
  if (head_dim <= 64) return visit(AttentionKernels<T, kSide, 4>());
  if (head_dim <= 128) return visit(AttentionKernels<T, kSide, 8>());
  visit(AttentionKernels<T, kSide / 2, 16>());
}

template <class Visit>
void visit_kernels(const AttentionShape& shape, const Visit& visit) {
  const int head_dim = largest_head(shape.attributes);
  switch (shape.dtype) {
    case DType::f64:
      return by_head_size<double, 2>(head_dim, visit);
    case DType::f32:
      return by_head_size<float, 4>(head_dim, visit);
    case DType::f16:
      return by_head_size<F16, 4>(head_dim, visit);
    default:
      return by_head_size<Bf16, 4>(head_dim, visit);
  }
}

// Elements of rows, from some element on.
void* column_of(const CudaTensor& rows, int64_t element) {
  return static_cast<std::byte*>(rows.data) + element * static_cast<int64_t>(size_of(rows.dtype));
}

// Where the first value head stands in a row of kv.
int64_t value_column(const AttentionAttributes& a) {
  return a.key_column + int64_t{a.groups} * a.head_dim;
}

// Input `q` has the queries and the next one keys and values; input `step` is that of dropout, the
// next one has the documents' starts.
AttentionCall call_of(const CudaKernelArguments& args, int q, const CudaTensor& out,
                      const CudaTensor& lse, int step) {
  const auto& a = args.attributes->as<AttentionAttributes>();
  const CudaTensor& queries = args.input(q);
  const CudaTensor& keys = args.input(q + 1);
  const auto* starts = args.in<int32_t>(step + 1);
  AttentionCall call{
      .shape = {.attributes = a, .dtype = queries.dtype, .documents = starts != nullptr}};
  call.query_stride = queries.shape[1];
  call.key_stride = keys.shape[1];
  call.q = queries.data;
  call.k = column_of(keys, a.key_column);
  call.v = column_of(keys, value_column(a));
  call.out = out.data;
  call.lse = lse.data;
  call.step = args.in<int64_t>(step);
  call.starts = starts;
  return call;
}

template <AttentionVariant kVariant>
void attention_on_gpu(const CudaKernelArguments& args) {
  AttentionCall call = call_of(args, 0, args.output(0), args.output(1), 2);
  call.sinks = sinks_of(args.input(4), call.shape.attributes);
  run_attention(args, call, kVariant, args.scratch);
}

template <AttentionVariant kVariant>
void attention_gradient_on_gpu(const CudaKernelArguments& args) {
  AttentionCall call = call_of(args, 1, args.input(3), args.input(4), 5);
  const AttentionAttributes& a = call.shape.attributes;
  const CudaTensor& d_kv = args.output(a.is_fused() ? 0 : 1);
  call.d_out = args.input(0).data;
  call.d_q = args.output(0).data;
  call.d_k = column_of(d_kv, a.key_column);
  call.d_v = column_of(d_kv, value_column(a));
  run_attention_gradient(args, call, kVariant, args.scratch);
}

}  // namespace

void run_attention(const CudaKernelArguments& args, const AttentionCall& call,
                   AttentionVariant variant, std::byte* scratch) {
  switch (variant) {
    case AttentionVariant::cudnn:
      cudnn_attention(args, call, scratch);
      break;
    case AttentionVariant::sm90:
      sm90_attention(args, call);
      break;
    case AttentionVariant::tiles:
      visit_kernels(call.shape, [&](auto kernels) { kernels.forward(args, call); });
  }
  if (call.sinks == nullptr) return;
  const AttentionAttributes& a = call.shape.attributes;
  add_attention_sinks(args, {.dtype = call.shape.dtype,
                             .rows = a.batch * call.shape.rows(),
                             .heads = a.heads,
                             .value_dim = a.value_size(),
                             .out = call.out,
                             .lse = call.lse,
                             .sinks = call.sinks});
}

const void* sinks_of(const CudaTensor& sinks, const AttentionAttributes& attributes) {
  if (sinks.data == nullptr) return nullptr;
  return static_cast<const std::byte*>(sinks.data) +
         static_cast<size_t>(attributes.first_sink) * size_of(sinks.dtype);
}

void run_attention_gradient(const CudaKernelArguments& args, const AttentionCall& call,
                            AttentionVariant variant, std::byte* scratch) {
  if (variant == AttentionVariant::cudnn) return cudnn_attention_gradient(args, call, scratch);
  if (variant == AttentionVariant::sm90) return sm90_attention_gradient(args, call, scratch);
  visit_kernels(call.shape, [&](auto kernels) { kernels.backward(args, call, scratch); });
}

CudaKernel attention_cuda_kernel(const OpView&, AttentionVariant variant) {
  return with_variant(variant, [](auto own) -> CudaKernel { return &attention_on_gpu<own.value>; });
}

CudaKernel attention_gradient_cuda_kernel(const OpView&, AttentionVariant variant) {
  return with_variant(variant,
                      [](auto own) -> CudaKernel { return &attention_gradient_on_gpu<own.value>; });
}

}  // namespace troupe
