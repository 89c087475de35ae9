#include "ops/exchange/prefix_sum/prefix_sum.h"

namespace troupe {

void prefix_sum_cpu(const KernelArguments& args) {
  args.communicator->prefix_sum({.op = args.op, .index = args.op_index}, args.input(0),
                                args.output(0), args.output(1));
  const auto* previous = args.in<int32_t>(1);
  if (previous == nullptr) return;
  auto* running = args.out<int32_t>(0);
  auto* total = args.out<int32_t>(1);
  for (int64_t i = 0; i < args.input(0).shape.elements(); ++i) {
    running[i] += previous[i];
    total[i] += previous[i];
  }
}

}  // namespace troupe
