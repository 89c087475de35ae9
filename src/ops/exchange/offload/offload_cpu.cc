#include <cstddef>
#include <cstring>

#include "ops/exchange/offload/offload.h"

namespace troupe {
namespace {

constexpr int64_t kOffloadGrain = int64_t{1} << 18;  // bytes

}  // namespace

void copy_live_rows_cpu(const KernelArguments& args) {
  const TensorView& x = args.input(0);
  auto* target = static_cast<std::byte*>(args.output(0).data);
  const auto* source = static_cast<const std::byte*>(x.data);
  args.pool->parallel_ranges(x.live_elements() * static_cast<int64_t>(size_of(x.dtype)),
                             kOffloadGrain, [=](int64_t begin, int64_t end, int) {
                               std::memcpy(target + begin, source + begin,
                                           static_cast<size_t>(end - begin));
                             });
}

}  // namespace troupe
