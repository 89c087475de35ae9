#include <memory>

#include "ops/all_reduce/all_reduce.h"

namespace troupe {

void all_reduce_cpu(const KernelArguments& args) {
  const CollectiveCall call{.op = args.op, .index = args.op_index};
  const int64_t first = args.attributes->as<AllReduceAttributes>().first_row;
  if (first == 0) {
    args.communicator->all_reduce(call, args.outputs, *args.pool);
    return;
  }
  auto* views = reinterpret_cast<TensorView*>(args.workspace);
  for (size_t i = 0; i < args.outputs.size(); ++i) {
    TensorView view = args.outputs[i];
    const int64_t row = view.shape.row_elements();
    view.data =
        static_cast<std::byte*>(view.data) + static_cast<size_t>(first * row) * size_of(view.dtype);
    view.shape = Shape{(view.shape[0] - first) * row};
    std::construct_at(views + i, view);
  }
  args.communicator->all_reduce(call, {views, args.outputs.size()}, *args.pool);
}

}  // namespace troupe
