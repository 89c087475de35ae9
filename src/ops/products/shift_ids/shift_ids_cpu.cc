#include <algorithm>
#include <limits>

#include "ops/products/shift_ids/shift_ids.h"
#include "program/kernel.h"

namespace troupe {

void shift_ids_cpu(const KernelArguments& args) {
  const int64_t first = args.attributes->as<ShiftIdsAttributes>().first;
  const auto* ids = args.in<int32_t>(0);
  auto* shifted = args.out<int32_t>(0);
  const int64_t count = args.input(0).shape.elements();
  for (int64_t i = 0; i < count; ++i) {
    shifted[i] = static_cast<int32_t>(
        std::max<int64_t>(ids[i] - first, std::numeric_limits<int32_t>::min()));
  }
}

}  // namespace troupe
