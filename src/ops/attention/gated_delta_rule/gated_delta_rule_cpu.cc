#include <algorithm>
#include <cmath>

#include "ops/attention/gated_delta_rule/delta_attributes.h"
#include "ops/cpu/vector.h"
#include "program/kernel.h"

namespace troupe {
namespace {

// out = x / sqrt(|x|^2 + epsilon) scale; returns the factor without the scale.
template <class T, class A>
A normalize(const T* x, int64_t n, A scale, A* out) {
  const A factor = A(1) / std::sqrt(sum_of_squares(x, n) + static_cast<A>(kDeltaNormEpsilon));
  for (int64_t i = 0; i < n; ++i) out[i] = widen(x[i]) * factor * scale;
  return factor;
}

// dx of the above, from that of what it returned: factor scale (d - x (x . d) factor^2).
template <class T, class A>
void differentiate_normalize(const T* x, const A* d, int64_t n, A factor, A scale, T* dx) {
  const A along = dot(d, x, n) * factor * factor;
  for (int64_t i = 0; i < n; ++i) dx[i] = T(factor * scale * (d[i] - widen(x[i]) * along));
}

// The state of one head and what it reads of one row.
template <class A>
struct Step {
  const A* key;
  A beta;
  A decay;  // e^g, or 0 at the beginning of a document
};

// A state of d_k rows: d_v columns, of gated_delta_state d_k more, whose values are zero.
struct StateShape {
  int64_t key_dim;
  int64_t value_dim;
  int64_t columns;

  int64_t size() const { return key_dim * columns; }
};

// state = S before the first row: `initial`, or zeros and, beyond the values, the identity.
template <class A>
void begin_state(const StateShape& shape, const A* initial, A* state) {
  if (initial != nullptr) {
    std::copy_n(initial, shape.size(), state);
    return;
  }
  std::fill_n(state, shape.size(), A(0));
  for (int64_t i = 0; shape.value_dim + i < shape.columns; ++i) {
    state[i * shape.columns + shape.value_dim + i] = A(1);
  }
}

// state = D of it, u = v - D^T k.
template <class T, class A>
void decay_and_compare(const StateShape& shape, const Step<A>& step, const T* value, A* state,
                       A* u) {
  load(value, u, shape.value_dim);
  std::fill(u + shape.value_dim, u + shape.columns, A(0));
  for (int64_t i = 0; i < shape.key_dim; ++i) {
    A* row = state + i * shape.columns;
    TROUPE_INDEPENDENT
    for (int64_t j = 0; j < shape.columns; ++j) {
      row[j] *= step.decay;
      u[j] -= row[j] * step.key[i];
    }
  }
}

// state += beta k u^T
template <class A>
void correct(const StateShape& shape, const Step<A>& step, const A* u, A* state) {
  for (int64_t i = 0; i < shape.key_dim; ++i) {
    axpy(step.beta * step.key[i], u, state + i * shape.columns, shape.columns);
  }
}

// What all kernels read of one sequence.
template <class T>
struct DeltaSequence {
  using A = accumulation_t<T>;

  DeltaSequence(const KernelArguments& args, int first, int64_t sequence)
      : a(args.attributes->as<GatedDeltaRuleAttributes>()),
        first_row(sequence * a.sequence),
        qkv(args.in<T>(first) + first_row * a.row_size()),
        gates(args.in<A>(first + 1) + first_row * 2 * a.value_heads),
        starts(args.in<int32_t>(first + 2)) {}

  const T* row(int64_t t) const { return qkv + t * a.row_size(); }
  bool begins_document(int64_t t) const { return starts != nullptr && t == starts[first_row + t]; }
  Step<A> step(int64_t t, int64_t head, const A* key) const {
    const A* gate = gates + t * 2 * a.value_heads;
    return {.key = key,
            .beta = gate[head],
            .decay = begins_document(t) ? A(0) : std::exp(gate[a.value_heads + head])};
  }

  GatedDeltaRuleAttributes a;
  int64_t first_row;
  const T* qkv;
  const A* gates;
  const int32_t* starts;
};

template <class T>
struct GatedDeltaRuleKernel {
  using A = accumulation_t<T>;
  static void run(const KernelArguments& args) {
    const auto a = args.attributes->as<GatedDeltaRuleAttributes>();
    const A scale = A(1) / std::sqrt(static_cast<A>(a.key_dim));
    const int64_t sequences = args.input(0).shape[0] / a.sequence;
    args.pool->parallel_for(sequences * a.value_heads, [&](int64_t work, int worker) {
      const DeltaSequence<T> in(args, 0, work / a.value_heads);
      const int64_t head = work % a.value_heads;
      A* state = args.thread_scratch<A>(worker);
      A* query = state + a.state_size();
      A* key = query + a.key_dim;
      A* u = key + a.key_dim;
      const StateShape shape = {a.key_dim, a.value_dim, a.value_dim};
      const A* initial = args.in<A>(3);
      begin_state(shape, initial == nullptr ? nullptr : initial + work * a.state_size(), state);
      T* out = args.out<T>(0) + in.first_row * a.value_size() + head * a.value_dim;
      for (int64_t t = 0; t < a.sequence; ++t) {
        const T* row = in.row(t);
        normalize(row + a.query_of(head), a.key_dim, scale, query);
        normalize(row + a.key_of(head), a.key_dim, A(1), key);
        const Step<A> step = in.step(t, head, key);
        decay_and_compare(shape, step, row + a.value_of(head), state, u);
        correct(shape, step, u, state);
        std::fill_n(u, a.value_dim, A(0));
        for (int64_t i = 0; i < a.key_dim; ++i) {
          axpy(query[i], state + i * a.value_dim, u, a.value_dim);
        }
        store(u, out + t * a.value_size(), a.value_dim);
      }
    });
  }
};

// The state of one head after a sequence, made in the output itself.
template <class T>
struct GatedDeltaStateKernel {
  using A = accumulation_t<T>;
  static void run(const KernelArguments& args) {
    const auto a = args.attributes->as<GatedDeltaRuleAttributes>();
    const StateShape shape = {a.key_dim, a.value_dim, a.end_columns()};
    const int64_t sequences = args.input(0).shape[0] / a.sequence;
    args.pool->parallel_for(sequences * a.value_heads, [&](int64_t work, int worker) {
      const DeltaSequence<T> in(args, 0, work / a.value_heads);
      const int64_t head = work % a.value_heads;
      A* key = args.thread_scratch<A>(worker);
      A* u = key + a.key_dim;
      A* state = args.out<A>(0) + work * shape.size();
      begin_state<A>(shape, nullptr, state);
      for (int64_t t = 0; t < a.sequence; ++t) {
        normalize(in.row(t) + a.key_of(head), a.key_dim, A(1), key);
        const Step<A> step = in.step(t, head, key);
        decay_and_compare(shape, step, in.row(t) + a.value_of(head), state, u);
        correct(shape, step, u, state);
      }
    });
  }
};

// What gradients start from and end in, each null where there is none. States are [sequences, H_v,
// ...].
template <class T>
struct DeltaEnds {
  using A = accumulation_t<T>;
  int64_t columns;  // of a state
  const T* d_out = nullptr;
  const A* initial = nullptr;
  const A* d_last = nullptr;  // of the state after the last row
  A* d_initial = nullptr;
};

// The gradients of one key head and its value heads in one sequence.
template <class T>
class DeltaGradient {
 public:
  using A = accumulation_t<T>;

  DeltaGradient(const KernelArguments& args, const DeltaEnds<T>& ends, int64_t sequence,
                int64_t key_head, A* scratch)
      : args_(args), ends_(ends), in_(args, 1, sequence), sequence_(sequence), key_head_(key_head) {
    const GatedDeltaRuleAttributes& a = in_.a;
    shape_ = {a.key_dim, a.value_dim, ends.columns};
    const auto take = [&](int64_t elements) {
      A* taken = scratch;
      scratch += elements;
      return taken;
    };
    chunk_ = delta_chunk(a.sequence);
    states_ = take(delta_states(a.sequence) * shape_.size());
    d_state_ = take(shape_.size());
    queries_ = take(int64_t{a.sequence} * a.key_dim);
    keys_ = take(int64_t{a.sequence} * a.key_dim);
    d_queries_ = take(int64_t{a.sequence} * a.key_dim);
    d_keys_ = take(int64_t{a.sequence} * a.key_dim);
    query_factors_ = take(a.sequence);
    key_factors_ = take(a.sequence);
    u_ = take(shape_.columns);
    d_u_ = take(shape_.columns);
  }

  void run() {
    const GatedDeltaRuleAttributes& a = in_.a;
    const A scale = A(1) / std::sqrt(static_cast<A>(a.key_dim));
    const int64_t of_key = a.value_heads / a.key_heads;
    const int64_t query = a.query_of(key_head_ * of_key);
    const int64_t key = a.key_of(key_head_ * of_key);
    for (int64_t t = 0; t < a.sequence; ++t) {
      query_factors_[t] = normalize(in_.row(t) + query, a.key_dim, scale, queries_ + t * a.key_dim);
      key_factors_[t] = normalize(in_.row(t) + key, a.key_dim, A(1), keys_ + t * a.key_dim);
    }
    std::fill_n(d_queries_, int64_t{a.sequence} * a.key_dim, A(0));
    std::fill_n(d_keys_, int64_t{a.sequence} * a.key_dim, A(0));
    for (int64_t i = 0; i < of_key; ++i) run_head(key_head_ * of_key + i);
    T* d_qkv = args_.out<T>(0) + in_.first_row * a.row_size();
    for (int64_t t = 0; t < a.sequence; ++t) {
      const T* row = in_.row(t);
      T* d_row = d_qkv + t * a.row_size();
      differentiate_normalize(row + query, d_queries_ + t * a.key_dim, a.key_dim, query_factors_[t],
                              scale, d_row + query);
      differentiate_normalize(row + key, d_keys_ + t * a.key_dim, a.key_dim, key_factors_[t], A(1),
                              d_row + key);
    }
  }

 private:
  void run_head(int64_t head) {
    const GatedDeltaRuleAttributes& a = in_.a;
    const int64_t size = shape_.size();
    const int64_t at = (sequence_ * a.value_heads + head) * size;  // of the head's state
    const int64_t chunks = (a.sequence + chunk_ - 1) / chunk_;
    // S before each chunk.
    begin_state(shape_, ends_.initial == nullptr ? nullptr : ends_.initial + at, states_);
    for (int64_t c = 0; c + 1 < chunks; ++c) {
      A* state = states_ + (c + 1) * size;
      std::copy_n(states_ + c * size, size, state);
      for (int64_t t = c * chunk_; t < (c + 1) * chunk_; ++t) {
        const Step<A> step = step_of(t, head);
        decay_and_compare(shape_, step, in_.row(t) + a.value_of(head), state, u_);
        correct(shape_, step, u_, state);
      }
    }
    if (ends_.d_last == nullptr) {
      std::fill_n(d_state_, size, A(0));
    } else {
      std::copy_n(ends_.d_last + at, size, d_state_);
    }
    A* within = states_ + chunks * size;  // D of the rows of a chunk
    for (int64_t c = chunks - 1; c >= 0; --c) {
      const int64_t begin = c * chunk_;
      const int64_t end = std::min<int64_t>(a.sequence, begin + chunk_);
      std::copy_n(states_ + c * size, size, within);
      for (int64_t t = begin; t < end; ++t) {
        A* state = within + (t - begin) * size;
        const Step<A> step = step_of(t, head);
        decay_and_compare(shape_, step, in_.row(t) + a.value_of(head), state, u_);
        if (t + 1 == end) continue;
        std::copy_n(state, size, state + size);
        correct(shape_, step, u_, state + size);
      }
      for (int64_t t = end - 1; t >= begin; --t) {
        differentiate_row(t, head, within + (t - begin) * size);
      }
    }
    if (ends_.d_initial != nullptr) std::copy_n(d_state_, size, ends_.d_initial + at);
  }

  Step<A> step_of(int64_t t, int64_t head) const {
    return in_.step(t, head, keys_ + t * in_.a.key_dim);
  }

  // `decayed`: D of the row.
  void differentiate_row(int64_t t, int64_t head, const A* decayed) {
    const GatedDeltaRuleAttributes& a = in_.a;
    const Step<A> step = step_of(t, head);
    const int64_t n = shape_.columns;
    const bool has_out = ends_.d_out != nullptr;
    const A* query = queries_ + t * a.key_dim;
    const T* d_out =
        has_out ? ends_.d_out + (in_.first_row + t) * a.value_size() + head * n : nullptr;
    load(in_.row(t) + a.value_of(head), u_, a.value_dim);
    std::fill(u_ + a.value_dim, u_ + n, A(0));
    std::fill_n(d_u_, n, A(0));
    for (int64_t i = 0; i < a.key_dim; ++i) {
      A* d_row = d_state_ + i * n;
      axpy(-step.key[i], decayed + i * n, u_, n);
      if (has_out) axpy(query[i], d_out, d_row, n);
      axpy(step.key[i], d_row, d_u_, n);
    }
    const A d_beta = dot(u_, d_u_, n);
    for (int64_t j = 0; j < n; ++j) d_u_[j] *= step.beta;
    const A u_out = has_out ? dot(u_, d_out, n) : A(0);
    A d_gate = 0;
    for (int64_t i = 0; i < a.key_dim; ++i) {
      const A* row = decayed + i * n;
      A* d_row = d_state_ + i * n;
      if (has_out) {
        d_queries_[t * a.key_dim + i] += dot(row, d_out, n) + step.beta * step.key[i] * u_out;
      }
      d_keys_[t * a.key_dim + i] += step.beta * dot(d_row, u_, n) - dot(row, d_u_, n);
      axpy(-step.key[i], d_u_, d_row, n);
      d_gate += dot(row, d_row, n);
      for (int64_t j = 0; j < n; ++j) d_row[j] *= step.decay;
    }
    store(d_u_, args_.out<T>(0) + (in_.first_row + t) * a.row_size() + a.value_of(head),
          a.value_dim);
    A* d_gates = args_.out<A>(1) + (in_.first_row + t) * 2 * a.value_heads;
    d_gates[head] = d_beta;
    d_gates[a.value_heads + head] = d_gate;
  }

  const KernelArguments& args_;
  const DeltaEnds<T>& ends_;
  const DeltaSequence<T> in_;
  const int64_t sequence_;
  const int64_t key_head_;
  StateShape shape_;
  int64_t chunk_;
  A* states_;
  A* d_state_;
  A* queries_;  // normed
  A* keys_;
  A* d_queries_;
  A* d_keys_;
  A* query_factors_;
  A* key_factors_;
  A* u_;
  A* d_u_;
};

template <class T>
void differentiate_delta(const KernelArguments& args, const DeltaEnds<T>& ends) {
  const auto a = args.attributes->as<GatedDeltaRuleAttributes>();
  const int64_t sequences = args.input(1).shape[0] / a.sequence;
  args.pool->parallel_for(sequences * a.key_heads, [&](int64_t work, int worker) {
    DeltaGradient<T>(args, ends, work / a.key_heads, work % a.key_heads,
                     args.thread_scratch<accumulation_t<T>>(worker))
        .run();
  });
}

template <class T>
struct GatedDeltaRuleGradientKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const A* initial = args.in<A>(4);
    differentiate_delta<T>(args,
                           {.columns = args.attributes->as<GatedDeltaRuleAttributes>().value_dim,
                            .d_out = args.in<T>(0),
                            .initial = initial,
                            .d_initial = initial == nullptr ? nullptr : args.out<A>(2)});
  }
};

template <class T>
struct GatedDeltaStateGradientKernel {
  static void run(const KernelArguments& args) {
    differentiate_delta<T>(
        args, {.columns = args.attributes->as<GatedDeltaRuleAttributes>().end_columns(),
               .d_last = args.in<accumulation_t<T>>(0)});
  }
};

}  // namespace

CpuKernel gated_delta_rule_cpu_kernel(const OpView& op) {
  return select_float_kernel<GatedDeltaRuleKernel>(op.input(0).dtype);
}

CpuKernel gated_delta_rule_gradient_cpu_kernel(const OpView& op) {
  return select_float_kernel<GatedDeltaRuleGradientKernel>(op.input(1).dtype);
}

CpuKernel gated_delta_state_cpu_kernel(const OpView& op) {
  return select_float_kernel<GatedDeltaStateKernel>(op.input(0).dtype);
}

CpuKernel gated_delta_state_gradient_cpu_kernel(const OpView& op) {
  return select_float_kernel<GatedDeltaStateGradientKernel>(op.input(1).dtype);
}

}  // namespace troupe
