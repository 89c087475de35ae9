#include <algorithm>

#include "base/random.h"
#include "ops/cpu/vector.h"
#include "ops/routing/jitter/jitter.h"

namespace troupe {
namespace {

// Random numbers at one index of the stream.
constexpr int64_t kJitterGroup = 4;
// Elements per chunk: whole groups.
constexpr int64_t kJitterGrain = 8192;

template <class T>
struct JitterKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const auto& attributes = args.attributes->as<JitterAttributes>();
    const uint32_t substream = attributes.substream;
    const uint64_t seed = random_step_seed(attributes.seed, RandomStream::router_noise, substream,
                                           static_cast<uint64_t>(args.in<int64_t>(1)[0]));
    const auto epsilon = static_cast<A>(attributes.epsilon);
    const T* x = args.in<T>(0);
    T* y = args.out<T>(0);
    const RowOrigin origin = attributes.origin;
    const int64_t width = args.input(0).shape.row_elements();
    const auto scale_run = [=](int64_t begin, int64_t end, int64_t whole) {
      for (int64_t i = begin; i < end;) {
        const int64_t number = whole + i - begin;
        const auto words = random_words(seed, RandomStream::router_noise, substream,
                                        static_cast<uint64_t>(number / kJitterGroup));
        const int64_t skipped = number % kJitterGroup;
        const int64_t count = std::min(kJitterGroup - skipped, end - i);
        for (int64_t j = 0; j < count; ++j) {
          // A signed word over 2^31 is uniform in [-1, 1).
          const auto word = static_cast<int32_t>(words[static_cast<size_t>(skipped + j)]);
          const A factor = 1 + epsilon * (static_cast<A>(word) * A(0x1.0p-31));
          y[i + j] = T(widen(x[i + j]) * factor);
        }
        i += count;
      }
    };
    args.pool->parallel_ranges(args.input(0).shape.elements(), kJitterGrain,
                               [=](int64_t begin, int64_t end, int) {
                                 origin.for_each_run(width, begin, end, scale_run);
                               });
  }
};

}  // namespace

CpuKernel jitter_cpu_kernel(const OpView& op) {
  return select_float_kernel<JitterKernel>(op.input(0).dtype);
}

}  // namespace troupe
