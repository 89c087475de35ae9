#include "runtime/state_storage.h"

namespace troupe {
namespace {

constexpr const char* kPurpose = "parameters, gradients and optimizer states";

}  // namespace

StateStorage::StateStorage(std::shared_ptr<const StateTable> table, Device device, int gpu)
    : table_(std::move(table)),
      device_(device),
      gpu_(gpu),
      layout_(*table_),
      arena_(layout_.bytes, kPurpose),
      host_(layout_.host_bytes, "optimizer states on the host", device) {
  if (device == Device::cuda) device_memory_ = DeviceMemory(layout_.bytes, kPurpose, gpu);
}

TensorView StateStorage::view(StateId id) const {
  const StateTensor& tensor = (*table_)[id];
  TROUPE_CHECK(tensor.is_stored, "a tensor without memory is read: " + tensor.name);
  std::byte* const base = tensor.on_host ? host_.data() : arena_.data();
  return {base + layout_.offset[static_cast<size_t>(id.index)], tensor.dtype, tensor.shape,
          nullptr};
}

void StateStorage::to_device() const {
  if (device_ == Device::cuda) device_memory_.copy_in(arena_.data(), 0, layout_.bytes);
}

void StateStorage::to_host() const {
  if (device_ == Device::cuda) device_memory_.copy_out(arena_.data(), 0, layout_.lasting_bytes);
}

void StateStorage::gradients_to_host() const {
  if (device_ == Device::cuda) {
    const uint64_t begin = layout_.lasting_bytes;
    device_memory_.copy_out(arena_.data() + begin, begin, layout_.bytes - begin);
  }
}

std::byte* StateStorage::device_address(StateId id) const {
  TROUPE_CHECK(device_ == Device::cuda, "the state is on the CPU");
  std::byte* const base = (*table_)[id].on_host ? host_.data() : device_memory_.data();
  return base + layout_.offset[static_cast<size_t>(id.index)];
}

}  // namespace troupe
