#include "ops/choose_kernel.h"

#include <algorithm>

namespace troupe {

int32_t staged_ranks(const OpView& op) {
  if (op.op.spec->group == nullptr) return 0;
  return op.program.staged_groups()[static_cast<size_t>(op.op.spec->group(op.op.attributes))];
}

int32_t multiprocessors_of(const OpView& op, const DeviceTraits& device) {
  const auto& [count, spares] = op.op.multiprocessors;
  if (count == 0) return device.multiprocessors;
  const int32_t part = std::min<int32_t>(count, std::max(1, device.multiprocessors / 2));
  return spares ? device.multiprocessors - part : part;
}

KernelChoice make_choice(const OpView& op, const DeviceTraits& device, const char* variant,
                         SelectCudaKernel select, ScratchRule scratch, StagingRule staging) {
  KernelChoice choice;
  if (select != nullptr) choice.function = select(op);
  choice.variant = variant != nullptr ? variant : op.op.spec->name;
  if (scratch != nullptr) choice.needs.scratch = scratch(op);
  const int32_t ranks = staged_ranks(op);
  if (staging != nullptr && ranks > 0) choice.needs.staging = staging(op, ranks);
  // Kernels of collectives go through their rows with any number of blocks.
  choice.multiprocessors =
      op.op.spec->group != nullptr ? multiprocessors_of(op, device) : device.multiprocessors;
  return choice;
}

int64_t row_elements_of_input(const OpView& op) {
  return op.input(0).shape.back();
}

}  // namespace troupe
