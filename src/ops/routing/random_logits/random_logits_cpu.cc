#include <algorithm>
#include <cmath>

#include "base/random.h"
#include "ops/routing/random_logits/random_logits.h"

namespace troupe {
namespace {

// Numbers per chunk; each takes some ten nanoseconds.
constexpr int64_t kRandomLogitsGrain = 4096;
// Numbers that are drawn at a time.
constexpr int64_t kRandomLogitsBlock = 256;

// The bias of each expert, in the workspace; null: none.
const double* draw_bias(const KernelArguments& args) {
  const auto& attributes = args.attributes->as<RandomLogitsAttributes>();
  if (attributes.bias == 0) return nullptr;
  const uint32_t substream = attributes.bias_substream;
  const uint64_t seed = attributes.bias < 0
                            ? attributes.seed
                            : random_step_seed(attributes.seed, RandomStream::logit_bias, substream,
                                               static_cast<uint64_t>(args.in<int64_t>(1)[0]));
  auto* bias = reinterpret_cast<double*>(args.workspace);
  const int64_t experts = args.output(0).shape.row_elements();
  fill_random_normals(seed, RandomStream::logit_bias, substream, 0, experts, bias);
  for (int64_t e = 0; e < experts; ++e) bias[e] *= std::abs(attributes.bias);
  return bias;
}

template <class T>
void run_random_logits(const KernelArguments& args) {
  const auto& attributes = args.attributes->as<RandomLogitsAttributes>();
  const uint32_t substream = attributes.substream;
  const uint64_t seed = random_step_seed(attributes.seed, RandomStream::random_logits, substream,
                                         static_cast<uint64_t>(args.in<int64_t>(1)[0]));
  T* out = args.out<T>(0);
  const RowOrigin origin = attributes.origin;
  const int64_t width = args.output(0).shape.row_elements();
  const double* bias = draw_bias(args);
  const auto draw_run = [=](int64_t begin, int64_t end, int64_t whole) {
    for (int64_t i = begin; i < end; i += kRandomLogitsBlock) {
      double drawn[kRandomLogitsBlock];
      const int64_t count = std::min(kRandomLogitsBlock, end - i);
      fill_random_normals(seed, RandomStream::random_logits, substream,
                          static_cast<uint64_t>(whole + i - begin), count, drawn);
      std::transform(drawn, drawn + count, out + i,
                     [](double value) { return static_cast<T>(value); });
      if (bias == nullptr) continue;
      for (int64_t j = 0; j < count; ++j) {
        out[i + j] = static_cast<T>(drawn[j] + bias[(i + j) % width]);
      }
    }
  };
  args.pool->parallel_ranges(
      args.output(0).shape.elements(), kRandomLogitsGrain,
      [=](int64_t begin, int64_t end, int) { origin.for_each_run(width, begin, end, draw_run); });
}

}  // namespace

CpuKernel random_logits_cpu_kernel(DType dtype) {
  return dtype == DType::f64 ? &run_random_logits<double> : &run_random_logits<float>;
}

}  // namespace troupe
