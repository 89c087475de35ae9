#include <algorithm>
#include <array>

#include "ops/cpu/dropout_mask.h"
#include "ops/cpu/vector.h"
#include "ops/elementwise/dropout/dropout.h"
#include "program/kernel.h"

namespace troupe {
namespace {

// A chunk makes up for the start of a loop on the pool; the words of a block stay in the
// first-level cache.
constexpr int64_t kDropoutGrain = 16384;
constexpr int64_t kDropoutBlock = 1024;

template <class T>
struct DropoutKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const auto attributes = args.attributes->as<DropoutAttributes>();
    const T* x = args.in<T>(0);
    T* y = args.out<T>(0);
    const DropoutMask mask(attributes.seed, attributes.substream, *args.in<int64_t>(1),
                           attributes.probability);
    const A scale = static_cast<A>(mask.scale());
    const TensorView& view = args.input(0);
    const int64_t width = view.shape.row_elements();
    const RowOrigin origin = attributes.origin;
    const int64_t elements = view.live_elements();
    args.pool->parallel_ranges(elements, kDropoutGrain, [=](int64_t begin, int64_t end, int) {
      std::array<uint32_t, kDropoutBlock> words;
      origin.for_each_run(width, begin, end, [&](int64_t run, int64_t run_end, int64_t whole) {
        for (int64_t first = run; first < run_end; first += kDropoutBlock) {
          const int64_t count = std::min(kDropoutBlock, run_end - first);
          mask.draw(static_cast<uint64_t>(whole + first - run), count, words.data());
          const T* in = x + first;
          T* out = y + first;
          TROUPE_INDEPENDENT
          for (int64_t i = 0; i < count; ++i) {
            const A scaled = widen(in[i]) * scale;
            out[i] = T(mask.keeps(words[static_cast<size_t>(i)]) ? scaled : A(0));
          }
        }
      });
    });
  }
};

}  // namespace

CpuKernel dropout_cpu_kernel(const OpView& op) {
  return select_float_kernel<DropoutKernel>(op.output(0).dtype);
}

}  // namespace troupe
