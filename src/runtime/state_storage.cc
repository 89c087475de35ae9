#include "runtime/state_storage.h"

namespace troupe {

StateStorage::StateStorage(std::shared_ptr<const StateTable> table)
    : table_(std::move(table)),
      layout_(*table_),
      arena_(layout_.bytes, "parameters, gradients and optimizer states") {}

TensorView StateStorage::view(StateId id) const {
  const StateTensor& tensor = (*table_)[id];
  return {arena_.data() + layout_.offset[static_cast<size_t>(id.index)], tensor.dtype, tensor.shape,
          nullptr};
}

}  // namespace troupe
