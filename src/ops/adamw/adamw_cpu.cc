#include <algorithm>
#include <cmath>
#include <type_traits>

#include "ops/adamw/adamw.h"
#include "ops/cpu/vector.h"

namespace troupe {
namespace {

// Elements per chunk.
constexpr int64_t kAdamWChunkElements = 16384;

// The scalars of one update, as they multiply in the loop.
template <class A>
struct AdamWFactors {
  A clip;
  A keep;               // 1 - learning_rate * weight_decay
  A first_weight;       // 1 - beta1
  A second_decay;       // beta2
  A second_weight;      // 1 - beta2
  A inverse_root_bias;  // 1 / sqrt(1 - beta2^step)
  A step_size;          // learning_rate / (1 - beta1^step)
  A epsilon;

  explicit AdamWFactors(const KernelArguments& args) {
    const auto& attributes = args.attributes->as<AdamWAttributes>();
    const double learning_rate = args.in<double>(5)[0];
    const double weight_decay = attributes.decay ? args.in<double>(6)[0] : 0.0;
    const auto step = static_cast<double>(args.in<int64_t>(7)[0]);
    clip = static_cast<A>(args.in<double>(8)[0]);
    keep = static_cast<A>(1 - learning_rate * weight_decay);
    first_weight = static_cast<A>(1 - attributes.beta1);
    second_decay = static_cast<A>(attributes.beta2);
    second_weight = static_cast<A>(1 - attributes.beta2);
    inverse_root_bias = static_cast<A>(1 / std::sqrt(1 - std::pow(attributes.beta2, step)));
    step_size = static_cast<A>(learning_rate / (1 - std::pow(attributes.beta1, step)));
    epsilon = static_cast<A>(attributes.epsilon);
  }
};

// By value, so that the loop need not fear that a store changes a factor.
template <class A>
void update_adamw_range(const AdamWFactors<A> f, const A* gradient, A* parameter, A* exp_avg,
                        A* exp_avg_sq, int64_t n) {
  TROUPE_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) {
    const A g = gradient[i] * f.clip;
    const A m = exp_avg[i] + f.first_weight * (g - exp_avg[i]);
    const A v = f.second_decay * exp_avg_sq[i] + f.second_weight * g * g;
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    parameter[i] =
        parameter[i] * f.keep - f.step_size * m / (std::sqrt(v) * f.inverse_root_bias + f.epsilon);
  }
}

// Elements that are widened at a time, where moments are narrow.
constexpr int64_t kAdamWBlockElements = 512;

// A stretch of a moment in the type that it is computed with: the moment itself, or a widened copy.
template <class M, class A>
class WideMoment {
 public:
  A* read(M* moment, int64_t n) {
    if constexpr (std::is_same_v<M, A>) {
      return moment;
    } else {
      load(moment, copy_, n);
      return copy_;
    }
  }
  void write(M* moment, int64_t n) const {
    if constexpr (!std::is_same_v<M, A>) store(copy_, moment, n);
  }

 private:
  A copy_[std::is_same_v<M, A> ? 1 : kAdamWBlockElements];
};

// T, M and V are the types of the parameter, of exp_avg and of exp_avg_sq.
template <class T, class M, class V>
void run_adamw(const KernelArguments& args) {
  using A = accumulation_t<T>;
  if (args.in<int32_t>(9)[0] != 0) return;
  const AdamWFactors<A> factors(args);
  const int64_t first = args.attributes->as<AdamWAttributes>().first;
  const A* gradient = args.in<A>(1) + first;
  T* parameter = args.out<T>(0) + first;
  M* exp_avg = args.out<M>(1);
  V* exp_avg_sq = args.out<V>(2);
  A* master;
  if constexpr (std::is_same_v<T, A>) {
    master = parameter;
  } else {
    master = args.out<A>(3);
  }
  constexpr bool kWide = std::is_same_v<M, A> && std::is_same_v<V, A>;
  constexpr int64_t kBlock = kWide ? kAdamWChunkElements : kAdamWBlockElements;
  args.pool->parallel_ranges(
      args.output(1).shape.elements(), kAdamWChunkElements, [&](int64_t begin, int64_t end, int) {
        WideMoment<M, A> means;
        WideMoment<V, A> squares;
        for (int64_t i = begin; i < end; i += kBlock) {
          const int64_t n = std::min(kBlock, end - i);
          update_adamw_range(factors, gradient + i, master + i, means.read(exp_avg + i, n),
                             squares.read(exp_avg_sq + i, n), n);
          means.write(exp_avg + i, n);
          squares.write(exp_avg_sq + i, n);
        }
        if constexpr (!std::is_same_v<T, A>) store(master + begin, parameter + begin, end - begin);
      });
}

template <class T>
CpuKernel select_moments(const OpView& op) {
  const bool narrow_mean = op.input(2).dtype == DType::bf16;
  const bool narrow_square = op.input(3).dtype == DType::bf16;
  if (narrow_mean) {
    return narrow_square ? &run_adamw<T, bf16, bf16> : &run_adamw<T, bf16, float>;
  }
  return narrow_square ? &run_adamw<T, float, bf16> : &run_adamw<T, float, float>;
}

}  // namespace

CpuKernel adamw_cpu_kernel(const OpView& op) {
  switch (op.input(0).dtype) {
    case DType::f64:
      return &run_adamw<double, double, double>;
    case DType::f32:
      return select_moments<float>(op);
    default:
      return select_moments<bf16>(op);
  }
}

}  // namespace troupe
