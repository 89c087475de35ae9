#include <algorithm>
#include <type_traits>

#include "ops/cpu/vector.h"
#include "ops/optimizer/muon/muon.h"
#include "ops/optimizer/parameter_dtype.h"

namespace troupe {
namespace {

constexpr int64_t kMuonChunkElements = 16384;

// A and G are the types of the momentum and of the gradient.
template <class A, class G>
void run_muon_momentum(const KernelArguments& args) {
  const auto& attributes = args.attributes->as<MuonMomentumAttributes>();
  const bool skip = args.in<int32_t>(3)[0] != 0;
  const G* gradient = args.in<G>(0) + attributes.first;
  A* momentum = args.out<A>(0);
  A* update = attributes.nesterov ? args.out<A>(1) : nullptr;
  if (skip && update == nullptr) return;
  const auto clip = static_cast<A>(args.in<double>(2)[0]);
  const auto weight = static_cast<A>(1 - attributes.beta);
  const auto beta = static_cast<A>(attributes.beta);
  args.pool->parallel_ranges(args.output(0).shape.elements(), kMuonChunkElements,
                             [=](int64_t begin, int64_t end, int) {
                               if (skip) {
                                 std::copy(momentum + begin, momentum + end, update + begin);
                                 return;
                               }
                               TROUPE_INDEPENDENT
                               for (int64_t i = begin; i < end; ++i) {
                                 const A g = widen(gradient[i]) * clip;
                                 momentum[i] = momentum[i] + weight * (g - momentum[i]);
                               }
                               if (update == nullptr) return;
                               TROUPE_INDEPENDENT
                               for (int64_t i = begin; i < end; ++i) {
                                 const A g = widen(gradient[i]) * clip;
                                 update[i] = g + beta * (momentum[i] - g);
                               }
                             });
}

template <class T>
struct MuonUpdateKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    if (args.in<int32_t>(5)[0] != 0) return;
    const auto& attributes = args.attributes->as<MuonUpdateAttributes>();
    const double learning_rate = args.in<double>(3)[0];
    const double weight_decay = attributes.decay ? args.in<double>(4)[0] : 0.0;
    const auto keep = static_cast<A>(1 - learning_rate * weight_decay);
    const auto step_size = static_cast<A>(learning_rate * attributes.scale);
    const A* y = args.in<A>(0) + attributes.first;
    constexpr bool kHasMaster = !std::is_same_v<T, A>;
    const bool has_parameter = args.in<T>(1) != nullptr;
    T* parameter = has_parameter ? args.out<T>(0) + attributes.first : nullptr;
    const int updated = kHasMaster && has_parameter ? 1 : 0;
    A* weights = args.out<A>(updated);
    args.pool->parallel_ranges(args.output(updated).shape.elements(), kMuonChunkElements,
                               [=](int64_t begin, int64_t end, int) {
                                 TROUPE_INDEPENDENT
                                 for (int64_t i = begin; i < end; ++i)
                                   weights[i] = weights[i] * keep - step_size * y[i];
                                 if constexpr (kHasMaster) {
                                   if (!has_parameter) return;
                                   store(weights + begin, parameter + begin, end - begin);
                                 }
                               });
  }
};

}  // namespace

CpuKernel muon_momentum_cpu_kernel(const OpView& op) {
  if (op.input(1).dtype == DType::f64) return &run_muon_momentum<double, double>;
  return op.input(0).dtype == DType::bf16 ? &run_muon_momentum<float, bf16>
                                          : &run_muon_momentum<float, float>;
}

CpuKernel muon_update_cpu_kernel(const OpView& op) {
  return select_float_kernel<MuonUpdateKernel>(parameter_dtype(op, 1));
}

}  // namespace troupe
