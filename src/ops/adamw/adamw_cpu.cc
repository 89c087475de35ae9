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

// T is the type of the parameter.
template <class T>
struct AdamWKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    if (args.in<int32_t>(9)[0] != 0) return;
    const AdamWFactors<A> factors(args);
    const int64_t first = args.attributes->as<AdamWAttributes>().first;
    const A* gradient = args.in<A>(1) + first;
    T* parameter = args.out<T>(0) + first;
    A* exp_avg = args.out<A>(1);
    A* exp_avg_sq = args.out<A>(2);
    A* master;
    if constexpr (std::is_same_v<T, A>) {
      master = parameter;
    } else {
      master = args.out<A>(3);
    }
    args.pool->parallel_ranges(
        args.output(1).shape.elements(), kAdamWChunkElements, [&](int64_t begin, int64_t end, int) {
          update_adamw_range(factors, gradient + begin, master + begin, exp_avg + begin,
                             exp_avg_sq + begin, end - begin);
          if constexpr (!std::is_same_v<T, A>)
            store(master + begin, parameter + begin, end - begin);
        });
  }
};

}  // namespace

CpuKernel adamw_cpu_kernel(DType dtype) {
  return select_float_kernel<AdamWKernel>(dtype);
}

}  // namespace troupe
