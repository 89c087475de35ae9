#include "ops/attention/gated_delta_rule/cuda/delta_sm90.h"
#include "ops/attention/gated_delta_rule/delta_attributes.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

// What the kernels read and write. States have d_v columns, those of gated_delta_state two parts,
// of d_v and of d_k columns, which a block each works on: columns do not depend on one another.
template <class T>
struct DeltaOf {
  using A = accumulation_t<T>;
  GatedDeltaRuleAttributes a;
  int parts = 1;
  const T* qkv = nullptr;
  const A* gates = nullptr;
  const int32_t* starts = nullptr;
  const A* initial = nullptr;  // [B, H_v, d_k, d_v]; null: zeros, of the second part the identity
  // Of the forward pass: of the rule, of gated_delta_state.
  T* out = nullptr;
  A* ends = nullptr;
  // Of the gradient; where d_out is null, queries have none.
  const T* d_out = nullptr;
  const A* d_ends = nullptr;
  T* d_qkv = nullptr;
  A* d_gates = nullptr;  // of each part
  A* d_initial = nullptr;
  // Scratch of the gradient.
  A* states = nullptr;     // delta_states() of each block
  A* d_queries = nullptr;  // [T, H_v, d_k], of normed ones
  A* d_keys = nullptr;     // [T, H_v, parts, d_k]
};

// One part of one value head of one sequence, which a block works on: thread j has column j of the
// state, and, where sums go along rows of it, row j.
template <class T>
struct DeltaHead {
  using A = accumulation_t<T>;

  __device__ explicit DeltaHead(const DeltaOf<T>& of)
      : a(of.a),
        part(static_cast<int>(blockIdx.x) % of.parts),
        columns(part == 0 ? of.a.value_dim : of.a.key_dim),
        state(int64_t{blockIdx.x} / of.parts),
        head(state % a.value_heads),
        first_row(state / a.value_heads * a.sequence),
        qkv(of.qkv + first_row * a.row_size()),
        gates(of.gates + first_row * 2 * a.value_heads),
        starts(of.starts),
        initial(of.initial) {}

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
    const bool begins = starts != nullptr && t == starts[first_row + t];
    return begins ? A(0) : exp(gates[t * 2 * a.value_heads + a.value_heads + head]);
  }
  __device__ A value(int64_t t, int64_t j) const {
    return part == 0 ? widen(qkv[t * a.row_size() + a.value_of(head) + j]) : A(0);
  }
  // Of S before the first row.
  __device__ A first(int64_t i, int64_t j) const {
    if (initial != nullptr) return initial[state * a.state_size() + i * columns + j];
    return part == 1 && i == j ? A(1) : A(0);
  }
  // Of the part's element in Q beside P.
  __device__ int64_t end(int64_t i, int64_t j) const {
    return (state * a.key_dim + i) * a.end_columns() + part * a.value_dim + j;
  }

  __device__ void normalize(const T* x, A scale, A* out, A* shared) const {
    A squares = 0;
    for_row(a.key_dim, [&](int64_t i) { squares += widen(x[i]) * widen(x[i]); });
    const A factor = rsqrt(block_sum(squares, shared) + static_cast<A>(kDeltaNormEpsilon));
    for_row(a.key_dim, [&](int64_t i) { out[i] = widen(x[i]) * factor * scale; });
  }

  GatedDeltaRuleAttributes a;
  int part;
  int64_t columns;  // of the part
  int64_t state;    // the number of the sequence's head
  int64_t head;
  int64_t first_row;
  const T* qkv;
  const A* gates;
  const int32_t* starts;
  const A* initial;
};

template <class A>
__device__ __forceinline__ A* shared_numbers() {
  extern __shared__ __align__(16) unsigned char memory[];
  return reinterpret_cast<A*>(memory);
}

// Shared memory: state, key and query.
template <class T>
__global__ void delta_rule_kernel(DeltaOf<T> of) {
  using A = accumulation_t<T>;
  __shared__ A shared[32];
  const GatedDeltaRuleAttributes& a = of.a;
  const DeltaHead<T> in(of);
  const int64_t n = in.columns;
  A* key = shared_numbers<A>();
  A* query = key + a.key_dim;
  A* state = query + a.key_dim;
  const int64_t j = threadIdx.x;
  for (int64_t i = j; i < a.key_dim * n; i += blockDim.x) state[i] = in.first(i / n, i % n);
  for (int64_t t = 0; t < a.sequence; ++t) {
    in.load_row(t, key, of.out == nullptr ? nullptr : query, shared);
    if (j < n) {
      const A decay = in.decay(t);
      const A beta = in.beta(t);
      A u = in.value(t, j);
      for (int64_t i = 0; i < a.key_dim; ++i) u -= decay * state[i * n + j] * key[i];
      A o = 0;
      for (int64_t i = 0; i < a.key_dim; ++i) {
        const A element = decay * state[i * n + j] + beta * key[i] * u;
        state[i * n + j] = element;
        if (of.out != nullptr) o += element * query[i];
      }
      if (of.out != nullptr) {
        of.out[(in.first_row + t) * a.value_size() + in.head * n + j] = round_to<T>(o);
      }
    }
    __syncthreads();
  }
  if (of.ends == nullptr) return;
  for (int64_t i = j; i < a.key_dim * n; i += blockDim.x) {
    of.ends[in.end(i / n, i % n)] = state[i];
  }
}

// Shared memory: key, query, u, dv, do, and dS in rows of one more than the columns.
template <class T>
__global__ void delta_rule_gradient_kernel(DeltaOf<T> of) {
  using A = accumulation_t<T>;
  __shared__ A shared[32];
  const GatedDeltaRuleAttributes& a = of.a;
  const DeltaHead<T> in(of);
  const int64_t n = in.columns;
  const int64_t size = a.key_dim * n;
  const int64_t stride = n + 1;
  A* key = shared_numbers<A>();
  A* query = key + a.key_dim;
  A* u_all = query + a.key_dim;
  A* dv_all = u_all + n;
  A* do_all = dv_all + n;
  A* d_state = do_all + n;
  const int64_t chunk = delta_chunk(a.sequence);
  const int64_t chunks = (a.sequence + chunk - 1) / chunk;
  const int64_t all = of.parts == 1 ? a.state_size() : a.key_dim * a.end_columns();
  A* before = of.states + delta_states(a.sequence) * (in.state * all + in.part * a.state_size());
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

  for (int64_t i = j; i < size; i += blockDim.x) {
    before[i] = in.first(i / n, i % n);
    d_state[i / n * stride + i % n] = of.d_ends == nullptr ? A(0) : of.d_ends[in.end(i / n, i % n)];
  }
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
        const A d = of.d_out == nullptr
                        ? A(0)
                        : widen(of.d_out[(in.first_row + t) * a.value_size() + in.head * n + j]);
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
        if (in.part == 0) {
          of.d_qkv[(in.first_row + t) * a.row_size() + a.value_of(in.head) + j] = round_to<T>(dv);
        }
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
        const int64_t to = (in.first_row + t) * a.value_heads + in.head;
        if (of.d_out != nullptr) of.d_queries[to * a.key_dim + j] = dq + beta * key[j] * u_out;
        of.d_keys[(to * of.parts + in.part) * a.key_dim + j] = dk;
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
        A* row = of.d_gates + ((in.first_row + t) * of.parts + in.part) * 2 * a.value_heads;
        row[in.head] = d_beta;
        row[a.value_heads + in.head] = d_gate;
      }
      __syncthreads();
    }
  }
  if (of.d_initial == nullptr) return;
  for (int64_t i = j; i < size; i += blockDim.x) {
    of.d_initial[in.state * size + i] = d_state[i / n * stride + i % n];
  }
}

// Adds up what the value heads of a key head have, and goes back through the norms. A warp for each
// row and key head.
template <class T>
__global__ void delta_norms_gradient_kernel(DeltaOf<T> of, int64_t rows) {
  using A = accumulation_t<T>;
  const GatedDeltaRuleAttributes& a = of.a;
  const int64_t work = int64_t{blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32;
  if (work >= rows * a.key_heads) return;
  const int64_t row = work / a.key_heads;
  const int64_t of_key = a.value_heads / a.key_heads;
  const int64_t head = work % a.key_heads * of_key;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto differentiate = [&](int64_t column, const A* d_normed, int64_t parts, A scale) {
    const T* x = of.qkv + row * a.row_size() + column;
    const A* d = d_normed + (row * a.value_heads + head) * parts * a.key_dim;
    const auto sum_of_heads = [=](int64_t i) {
      A sum = 0;
      for (int64_t other = 0; other < of_key * parts; ++other) sum += d[other * a.key_dim + i];
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
    T* dx = of.d_qkv + row * a.row_size() + column;
    for (int64_t i = lane; i < a.key_dim; i += 32) {
      dx[i] = round_to<T>(factor * scale * (sum_of_heads(i) - widen(x[i]) * along));
    }
  };
  if (of.d_out != nullptr) {
    differentiate(a.query_of(head), of.d_queries, 1, A(1) / sqrt(static_cast<A>(a.key_dim)));
  } else {
    T* d_query = of.d_qkv + row * a.row_size() + a.query_of(head);
    for (int64_t i = lane; i < a.key_dim; i += 32) d_query[i] = round_to<T>(A(0));
  }
  differentiate(a.key_of(head), of.d_keys, of.parts, A(1));
}

// Both parts of each row's gates, one after the other in `parts`.
template <class A>
__global__ void delta_gates_sum_kernel(const A* parts, A* d_gates, int64_t width,
                                       int64_t elements) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= elements) return;
  const A* row = parts + i / width * 2 * width + i % width;
  d_gates[i] = row[0] + row[width];
}

// Threads for the columns and the rows of a state.
unsigned delta_threads(const GatedDeltaRuleAttributes& a) {
  return static_cast<unsigned>(ceil_divide(std::max(a.key_dim, a.value_dim), 32) * 32);
}

template <class T>
int64_t delta_blocks(const DeltaOf<T>& of, int64_t rows) {
  return rows / of.a.sequence * of.a.value_heads * of.parts;
}

// Columns of the wider part.
template <class T>
int64_t most_columns(const DeltaOf<T>& of) {
  return of.parts == 1 ? of.a.value_dim : std::max(of.a.value_dim, of.a.key_dim);
}

template <class T>
void launch_delta(const CudaKernelArguments& args, const DeltaOf<T>& of) {
  const int64_t elements = of.a.key_dim * (most_columns(of) + 2);
  const size_t shared = static_cast<size_t>(elements) * sizeof(accumulation_t<T>);
  allow_shared_bytes(delta_rule_kernel<T>, shared);
  launch(args,
         {static_cast<unsigned>(delta_blocks(of, args.input(0).shape[0])), delta_threads(of.a),
          shared},
         delta_rule_kernel<T>, of);
}

// `scratch` is taken from its beginning.
template <class T>
void launch_delta_gradient(const CudaKernelArguments& args, DeltaOf<T> of,
                           accumulation_t<T>* scratch) {
  const int64_t rows = args.input(1).shape[0];
  const int64_t head_rows = rows * of.a.value_heads * of.a.key_dim;
  of.d_keys = scratch;
  of.d_queries = of.d_keys + of.parts * head_rows;
  of.states = of.d_queries + (of.d_out == nullptr ? 0 : head_rows);
  const int64_t columns = most_columns(of);
  const int64_t elements = of.a.key_dim * (columns + 3) + 3 * columns;
  const size_t shared = static_cast<size_t>(elements) * sizeof(accumulation_t<T>);
  allow_shared_bytes(delta_rule_gradient_kernel<T>, shared);
  launch(args, {static_cast<unsigned>(delta_blocks(of, rows)), delta_threads(of.a), shared},
         delta_rule_gradient_kernel<T>, of);
  launch(args, {static_cast<unsigned>(ceil_divide(rows * of.a.key_heads, 8)), 256},
         delta_norms_gradient_kernel<T>, of, rows);
}

template <class T>
struct DeltaRuleCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    launch_delta<T>(args, {.a = args.attributes->as<GatedDeltaRuleAttributes>(),
                           .qkv = args.in<T>(0),
                           .gates = args.in<A>(1),
                           .starts = args.in<int32_t>(2),
                           .initial = args.in<A>(3),
                           .out = args.out<T>(0)});
  }
};

template <class T>
struct DeltaRuleGradientCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const A* initial = args.in<A>(4);
    launch_delta_gradient<T>(args,
                             {.a = args.attributes->as<GatedDeltaRuleAttributes>(),
                              .qkv = args.in<T>(1),
                              .gates = args.in<A>(2),
                              .starts = args.in<int32_t>(3),
                              .initial = initial,
                              .d_out = args.in<T>(0),
                              .d_qkv = args.out<T>(0),
                              .d_gates = args.out<A>(1),
                              .d_initial = initial == nullptr ? nullptr : args.out<A>(2)},
                             reinterpret_cast<A*>(args.scratch));
  }
};

template <class T>
struct DeltaStateCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    launch_delta<T>(args, {.a = args.attributes->as<GatedDeltaRuleAttributes>(),
                           .parts = 2,
                           .qkv = args.in<T>(0),
                           .gates = args.in<A>(1),
                           .starts = args.in<int32_t>(2),
                           .ends = args.out<A>(0)});
  }
};

template <class T>
struct DeltaStateGradientCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const auto a = args.attributes->as<GatedDeltaRuleAttributes>();
    const int64_t gates = args.output(1).shape.elements();
    auto* const of_parts = reinterpret_cast<A*>(args.scratch);
    launch_delta_gradient<T>(args,
                             {.a = a,
                              .parts = 2,
                              .qkv = args.in<T>(1),
                              .gates = args.in<A>(2),
                              .starts = args.in<int32_t>(3),
                              .d_ends = args.in<A>(0),
                              .d_qkv = args.out<T>(0),
                              .d_gates = of_parts},
                             of_parts + 2 * gates);
    launch(args, {static_cast<unsigned>(ceil_divide(gates, 256)), 256}, delta_gates_sum_kernel<A>,
           of_parts, args.out<A>(1), 2 * int64_t{a.value_heads}, gates);
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

CudaKernel gated_delta_state_cuda_kernel(const OpView& op) {
  const DType dtype = op.input(0).dtype;
  if (has_delta_sm90(dtype, op.attributes<GatedDeltaRuleAttributes>())) return delta_state_sm90;
  return select_cuda_kernel<DeltaStateCuda>(dtype);
}

CudaKernel gated_delta_state_gradient_cuda_kernel(const OpView& op) {
  const DType dtype = op.input(1).dtype;
  if (has_delta_sm90(dtype, op.attributes<GatedDeltaRuleAttributes>())) {
    return delta_state_gradient_sm90;
  }
  return select_cuda_kernel<DeltaStateGradientCuda>(dtype);
}

}  // namespace troupe
