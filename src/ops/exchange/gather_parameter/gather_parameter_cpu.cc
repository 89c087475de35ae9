#include <algorithm>

#include "ops/exchange/gather_parameter/gather_parameter.h"

namespace troupe {
namespace {

constexpr int64_t kGrain = 1 << 14;

// T and Out are the types of the terms and of the shard's gradient.
template <class T, class Out>
void run_sum_parameter_gradient(const KernelArguments& args) {
  const auto& attributes = args.attributes->as<GatherParameterAttributes>();
  const IndexRange own = shard_of(attributes.shape, attributes.shard);
  TensorView sums = args.input(0);
  sums.data = args.workspace;
  const T* gradient = args.in<T>(0);
  args.pool->parallel_ranges(sums.shape.elements(), kGrain, [&](int64_t begin, int64_t end, int) {
    std::copy(gradient + begin, gradient + end, sums.as<T>() + begin);
  });
  args.communicator->reduce_shards({.op = args.op, .index = args.op_index}, {&sums, 1}, {},
                                   *args.pool);
  const T* sum = sums.as<T>() + own.begin;
  Out* shard = args.out<Out>(0);
  args.pool->parallel_ranges(own.end - own.begin, kGrain, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      shard[i] = Out(attributes.accumulate ? T(shard[i]) + sum[i] : sum[i]);
    }
  });
}

}  // namespace

void gather_parameter_cpu(const KernelArguments& args) {
  const auto& attributes = args.attributes->as<GatherParameterAttributes>();
  const IndexRange own = shard_of(attributes.shape, attributes.shard);
  const auto size = static_cast<int64_t>(size_of(args.output(0).dtype));
  const auto* shard = static_cast<const std::byte*>(args.input(0).data);
  auto* whole = static_cast<std::byte*>(args.output(0).data) + own.begin * size;
  args.pool->parallel_ranges((own.end - own.begin) * size, kGrain,
                             [&](int64_t begin, int64_t end, int) {
                               std::copy(shard + begin, shard + end, whole + begin);
                             });
  const auto owner = static_cast<int16_t>(attributes.shard.owner);
  args.communicator->gather_shards({.op = args.op, .index = args.op_index}, args.outputs,
                                   {&owner, 1}, *args.pool);
}

CpuKernel sum_parameter_gradient_cpu_kernel(const OpView& op) {
  switch (op.output(0).dtype) {
    case DType::f64:
      return &run_sum_parameter_gradient<double, double>;
    case DType::f32:
      return &run_sum_parameter_gradient<float, float>;
    default:
      return &run_sum_parameter_gradient<float, bf16>;
  }
}

}  // namespace troupe
