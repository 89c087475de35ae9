#include <algorithm>

#include "base/random.h"
#include "ops/random_logits/random_logits.h"

namespace troupe {
namespace {

// Numbers per chunk; each takes some ten nanoseconds.
constexpr int64_t kRandomLogitsGrain = 4096;
// Numbers that are drawn at a time.
constexpr int64_t kRandomLogitsBlock = 256;

template <class T>
void run_random_logits(const KernelArguments& args) {
  const auto& attributes = args.attributes->as<RandomLogitsAttributes>();
  const uint32_t substream = attributes.substream;
  const uint64_t seed = random_step_seed(attributes.seed, RandomStream::random_logits, substream,
                                         static_cast<uint64_t>(args.in<int64_t>(1)[0]));
  T* out = args.out<T>(0);
  const RowOrigin origin = attributes.origin;
  const int64_t width = args.output(0).shape.row_elements();
  const auto draw_run = [=](int64_t begin, int64_t end, int64_t whole) {
    for (int64_t i = begin; i < end; i += kRandomLogitsBlock) {
      double drawn[kRandomLogitsBlock];
      const int64_t count = std::min(kRandomLogitsBlock, end - i);
      fill_random_normals(seed, RandomStream::random_logits, substream,
                          static_cast<uint64_t>(whole + i - begin), count, drawn);
      std::transform(drawn, drawn + count, out + i,
                     [](double value) { return static_cast<T>(value); });
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
