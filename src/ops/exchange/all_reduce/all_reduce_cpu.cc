#include <memory>

#include "ops/exchange/all_reduce/all_reduce.h"

namespace troupe {

void all_reduce_cpu(const KernelArguments& args) {
  const CollectiveCall call{.op = args.op, .index = args.op_index};
  const auto& attributes = args.attributes->as<AllReduceAttributes>();
  if (attributes.first_row == 0 && attributes.shard.count == 1) {
    args.communicator->all_reduce(call, args.outputs, *args.pool);
    return;
  }
  auto* views = reinterpret_cast<TensorView*>(args.workspace);
  for (size_t i = 0; i < args.outputs.size(); ++i) {
    TensorView view = args.outputs[i];
    IndexRange summed = shard_of(view.shape, attributes.shard);
    if (attributes.first_row > 0) summed.begin = attributes.first_row * view.shape.row_elements();
    view.data = static_cast<std::byte*>(view.data) +
                static_cast<size_t>(summed.begin) * size_of(view.dtype);
    view.shape = Shape{summed.end - summed.begin};
    std::construct_at(views + i, view);
  }
  args.communicator->all_reduce(call, {views, args.outputs.size()}, *args.pool);
}

}  // namespace troupe
