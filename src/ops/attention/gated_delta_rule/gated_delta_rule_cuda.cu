#include "ops/attention/gated_delta_rule/cuda/delta_sm90.h"
#include "ops/attention/gated_delta_rule/gated_delta_rule.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

// One value head of one sequence, which a block works on: thread j has column j of the state, and,
// where sums go along rows of it, row j.
template <class T>
struct DeltaHead {
  using A = accumulation_t<T>;

  __device__ DeltaHead(const T* qkv, const accumulation_t<T>* gates, const int32_t* starts,
                       const GatedDeltaRuleAttributes& a)
      : a(a),
        head(blockIdx.x % a.value_heads),
        first_row(int64_t{blockIdx.x} / a.value_heads * a.sequence),
        qkv(qkv + first_row * a.row_size()),
        gates(gates + first_row * 2 * a.value_heads),
        starts(starts) {}

  // Reads a row: its normed key and, where wanted, query into shared memory, for all threads.
  __device__ void load_row(int64_t t, A* key, A* query, A* shared) const {
    const T* row = qkv + t * a.row_size();
    normalize(row + a.key_of(head), A(1), key, shared);
    if (query != nullptr) {
      normalize(row + a.query_of(head), A(1) / sqrt(static_cast<A>(a.key_dim)), query, shared);
    }
    __syncthreads();
  }
  __device__ A beta(int64_t t) const { return gates[t * 2 * a.value_heads + head]; }
  // 0 at the beginning of a document.
  __device__ A decay(int64_t t) const {
    const bool begins = t == (starts == nullptr ? 0 : starts[first_row + t]);
    return begins ? A(0) : exp(gates[t * 2 * a.value_heads + a.value_heads + head]);
  }
  __device__ A value(int64_t t, int64_t j) const {
    return widen(qkv[t * a.row_size() + a.value_of(head) + j]);
  }

  __device__ void normalize(const T* x, A scale, A* out, A* shared) const {
    A squares = 0;
    for_row(a.key_dim, [&](int64_t i) { squares += widen(x[i]) * widen(x[i]); });
    const A factor = rsqrt(block_sum(squares, shared) + static_cast<A>(kDeltaNormEpsilon));
    for_row(a.key_dim, [&](int64_t i) { out[i] = widen(x[i]) * factor * scale; });
  }

  GatedDeltaRuleAttributes a;
  int64_t head;
  int64_t first_row;
  const T* qkv;
  const A* gates;
  const int32_t* starts;
};

template <class A>
__device__ __forceinline__ A* shared_numbers() {
  extern __shared__ __align__(16) unsigned char memory[];
  return reinterpret_cast<A*>(memory);
}

// Shared memory: state, key and query.
template <class T>
__global__ void delta_rule_kernel(const T* qkv, const accumulation_t<T>* gates,
                                  const int32_t* starts, T* out, GatedDeltaRuleAttributes a) {
  using A = accumulation_t<T>;
  __shared__ A shared[32];
  const DeltaHead<T> in(qkv, gates, starts, a);
  A* state = shared_numbers<A>();
  A* key = state + a.state_size();
  A* query = key + a.key_dim;
  const int64_t n = a.value_dim;
  const int64_t j = threadIdx.x;
  for (int64_t i = j; i < a.state_size(); i += blockDim.x) state[i] = 0;
  for (int64_t t = 0; t < a.sequence; ++t) {
    in.load_row(t, key, query, shared);
    if (j < n) {
      const A decay = in.decay(t);
      const A beta = in.beta(t);
      A u = in.value(t, j);
      for (int64_t i = 0; i < a.key_dim; ++i) u -= decay * state[i * n + j] * key[i];
      A o = 0;
      for (int64_t i = 0; i < a.key_dim; ++i) {
        const A element = decay * state[i * n + j] + beta * key[i] * u;
        state[i * n + j] = element;
        o += element * query[i];
      }
      out[(in.first_row + t) * a.value_size() + in.head * n + j] = round_to<T>(o);
    }
    __syncthreads();
  }
}

// `states` has delta_states() of each block; `d_queries` and `d_keys` [T, H_v, d_k] take the
// gradients of normed queries and keys. Shared memory: dS in rows of d_v + 1, key, query, u, dv,
// do.
template <class T>
__global__ void delta_rule_gradient_kernel(const T* d_out, const T* qkv,
                                           const accumulation_t<T>* gates, const int32_t* starts,
                                           T* d_qkv, accumulation_t<T>* d_gates,
                                           accumulation_t<T>* states, accumulation_t<T>* d_queries,
                                           accumulation_t<T>* d_keys, GatedDeltaRuleAttributes a) {
  using A = accumulation_t<T>;
  __shared__ A shared[32];
  const DeltaHead<T> in(qkv, gates, starts, a);
  const int64_t n = a.value_dim;
  const int64_t size = a.state_size();
  const int64_t stride = n + 1;
  A* d_state = shared_numbers<A>();
  A* key = d_state + a.key_dim * stride;
  A* query = key + a.key_dim;
  A* u_all = query + a.key_dim;
  A* dv_all = u_all + n;
  A* do_all = dv_all + n;
  const int64_t chunk = delta_chunk(a.sequence);
  const int64_t chunks = (a.sequence + chunk - 1) / chunk;
  A* before = states + int64_t{blockIdx.x} * delta_states(a.sequence) * size;
  A* within = before + chunks * size;
  const int64_t j = threadIdx.x;

  // Turns S before the row at `from` into D of the row at `decayed` and S after it at `after`.
  const auto advance = [&](int64_t t, const A* from, A* decayed, A* after) {
    in.load_row(t, key, nullptr, shared);
    if (j < n) {
      const A decay = in.decay(t);
      const A beta = in.beta(t);
      A u = in.value(t, j);
      for (int64_t i = 0; i < a.key_dim; ++i) u -= decay * from[i * n + j] * key[i];
      for (int64_t i = 0; i < a.key_dim; ++i) {
        const A d = decay * from[i * n + j];
        if (decayed != nullptr) decayed[i * n + j] = d;
        if (after != nullptr) after[i * n + j] = d + beta * key[i] * u;
      }
    }
    __syncthreads();
  };

  for (int64_t i = j; i < size; i += blockDim.x) before[i] = 0;
  for (int64_t i = j; i < a.key_dim * stride; i += blockDim.x) d_state[i] = 0;
  __syncthreads();
  for (int64_t t = 0; t < (chunks - 1) * chunk; ++t) {
    A* to = before + (t / chunk + 1) * size;
    advance(t, t % chunk == 0 ? before + t / chunk * size : to, nullptr, to);
  }
  for (int64_t c = chunks - 1; c >= 0; --c) {
    const int64_t begin = c * chunk;
    const int64_t end = begin + chunk < a.sequence ? begin + chunk : a.sequence;
    for (int64_t t = begin; t < end; ++t) {
      A* own = within + (t - begin) * size;
      advance(t, t == begin ? before + c * size : own, own, t + 1 < end ? own + size : nullptr);
    }
    for (int64_t t = end - 1; t >= begin; --t) {
      in.load_row(t, key, query, shared);
      const A* decayed = within + (t - begin) * size;
      const A beta = in.beta(t);
      const A decay = in.decay(t);
      A d_beta = 0;
      if (j < n) {
        const A d = widen(d_out[(in.first_row + t) * a.value_size() + in.head * n + j]);
        A u = in.value(t, j);
        A dv = 0;
        for (int64_t i = 0; i < a.key_dim; ++i) {
          u -= decayed[i * n + j] * key[i];
          const A element = d_state[i * stride + j] + query[i] * d;
          d_state[i * stride + j] = element;
          dv += element * key[i];
        }
        d_beta = u * dv;
        dv *= beta;
        u_all[j] = u;
        dv_all[j] = dv;
        do_all[j] = d;
        d_qkv[(in.first_row + t) * a.row_size() + a.value_of(in.head) + j] = round_to<T>(dv);
      }
      __syncthreads();
      if (j < a.key_dim) {
        A dq = 0;
        A dk = 0;
        A u_out = 0;
        for (int64_t i = 0; i < n; ++i) {
          const A d = decayed[j * n + i];
          dq += d * do_all[i];
          u_out += u_all[i] * do_all[i];
          dk += beta * d_state[j * stride + i] * u_all[i] - d * dv_all[i];
        }
        const int64_t to = ((in.first_row + t) * a.value_heads + in.head) * a.key_dim + j;
        d_queries[to] = dq + beta * key[j] * u_out;
        d_keys[to] = dk;
      }
      __syncthreads();
      A d_gate = 0;
      if (j < n) {
        for (int64_t i = 0; i < a.key_dim; ++i) {
          const A element = d_state[i * stride + j] - key[i] * dv_all[j];
          d_gate += element * decayed[i * n + j];
          d_state[i * stride + j] = decay * element;
        }
      }
      d_beta = block_sum(d_beta, shared);
      d_gate = block_sum(d_gate, shared);
      if (j == 0) {
        A* row = d_gates + (in.first_row + t) * 2 * a.value_heads;
        row[in.head] = d_beta;
        row[a.value_heads + in.head] = d_gate;
      }
      __syncthreads();
    }
  }
}

// Adds up what the value heads of a key head have, and goes back through the norms. A warp for each
// row and key head.
template <class T>
__global__ void delta_norms_gradient_kernel(const T* qkv, const accumulation_t<T>* d_queries,
                                            const accumulation_t<T>* d_keys, T* d_qkv, int64_t rows,
                                            GatedDeltaRuleAttributes a) {
  using A = accumulation_t<T>;
  const int64_t work = int64_t{blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32;
  if (work >= rows * a.key_heads) return;
  const int64_t row = work / a.key_heads;
  const int64_t of_key = a.value_heads / a.key_heads;
  const int64_t head = work % a.key_heads * of_key;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto differentiate = [&](int64_t column, const A* d_normed, A scale) {
    const T* x = qkv + row * a.row_size() + column;
    const A* d = d_normed + (row * a.value_heads + head) * a.key_dim;
    const auto sum_of_heads = [=](int64_t i) {
      A sum = 0;
      for (int64_t other = 0; other < of_key; ++other) sum += d[other * a.key_dim + i];
      return sum;
    };
    A squares = 0;
    A along = 0;
    for (int64_t i = lane; i < a.key_dim; i += 32) {
      squares += widen(x[i]) * widen(x[i]);
      along += widen(x[i]) * sum_of_heads(i);
    }
    const A factor = rsqrt(warp_sum(squares) + static_cast<A>(kDeltaNormEpsilon));
    along = warp_sum(along) * factor * factor;
    T* dx = d_qkv + row * a.row_size() + column;
    for (int64_t i = lane; i < a.key_dim; i += 32) {
      dx[i] = round_to<T>(factor * scale * (sum_of_heads(i) - widen(x[i]) * along));
    }
  };
  differentiate(a.query_of(head), d_queries, A(1) / sqrt(static_cast<A>(a.key_dim)));
  differentiate(a.key_of(head), d_keys, A(1));
}

unsigned delta_threads(const GatedDeltaRuleAttributes& a) {
  return static_cast<unsigned>(ceil_divide(std::max(a.key_dim, a.value_dim), 32) * 32);
}

template <class T>
struct DeltaRuleCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const auto a = args.attributes->as<GatedDeltaRuleAttributes>();
    const int64_t heads = args.input(0).shape[0] / a.sequence * a.value_heads;
    const size_t shared = static_cast<size_t>(a.state_size() + 2 * a.key_dim) * sizeof(A);
    allow_shared_bytes(delta_rule_kernel<T>, shared);
    launch(args, {static_cast<unsigned>(heads), delta_threads(a), shared}, delta_rule_kernel<T>,
           args.in<T>(0), args.in<A>(1), args.in<int32_t>(2), args.out<T>(0), a);
  }
};

template <class T>
struct DeltaRuleGradientCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const auto a = args.attributes->as<GatedDeltaRuleAttributes>();
    const int64_t rows = args.input(1).shape[0];
    const int64_t heads = rows / a.sequence * a.value_heads;
    auto* d_queries = reinterpret_cast<A*>(args.scratch);
    A* d_keys = d_queries + rows * a.value_heads * a.key_dim;
    A* states = d_keys + rows * a.value_heads * a.key_dim;
    const size_t shared = static_cast<size_t>(int64_t{a.key_dim} * (a.value_dim + 1) +
                                              2 * a.key_dim + 3 * a.value_dim) *
                          sizeof(A);
    allow_shared_bytes(delta_rule_gradient_kernel<T>, shared);
    launch(args, {static_cast<unsigned>(heads), delta_threads(a), shared},
           delta_rule_gradient_kernel<T>, args.in<T>(0), args.in<T>(1), args.in<A>(2),
           args.in<int32_t>(3), args.out<T>(0), args.out<A>(1), states, d_queries, d_keys, a);
    launch(args, {static_cast<unsigned>(ceil_divide(rows * a.key_heads, 8)), 256},
           delta_norms_gradient_kernel<T>, args.in<T>(1), d_queries, d_keys, args.out<T>(0), rows,
           a);
  }
};

}  // namespace

CudaKernel gated_delta_rule_cuda_kernel(const OpView& op) {
  const DType dtype = op.input(0).dtype;
  if (has_delta_sm90(dtype, op.attributes<GatedDeltaRuleAttributes>())) return delta_rule_sm90;
  return select_cuda_kernel<DeltaRuleCuda>(dtype);
}

CudaKernel gated_delta_rule_gradient_cuda_kernel(const OpView& op) {
  const DType dtype = op.input(1).dtype;
  if (has_delta_sm90(dtype, op.attributes<GatedDeltaRuleAttributes>())) {
    return delta_rule_gradient_sm90;
  }
  return select_cuda_kernel<DeltaRuleGradientCuda>(dtype);
}

}  // namespace troupe
