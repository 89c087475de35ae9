// The memory of a StateTable: parameters, gradients, optimizer and router state. Programs that are
// built on the same table (training, evaluation, generation) run on the same storage.
//
// The host always has room for the whole state: there it is initialised, loaded and saved. On the
// CPU that is what programs work with. On a GPU programs work with a copy, and what is written on
// one side must be carried to the other: to_device() after the host has written, to_host() before
// it reads. The host's room for gradients takes no memory until somebody reads them. Tensors that
// are kept on the host (StateTensor::on_host) have no copy: there programs on a GPU work with the
// host's memory.
//
// Owns its memory, which starts as zeros. Not synchronised: one interpreter runs at a time.
#pragma once

#include <memory>

#include "base/device.h"
#include "passes/memory_plan.h"
#include "program/kernel.h"
#include "runtime/arena.h"
#include "runtime/device_memory.h"
#include "runtime/host_memory.h"

namespace troupe {

class StateStorage {
 public:
  // `gpu`: which one, of Device::cuda. Interpreters of this state run there, too.
  explicit StateStorage(std::shared_ptr<const StateTable> table, Device device = Device::cpu,
                        int gpu = 0);

  const StateTable& table() const { return *table_; }
  std::shared_ptr<const StateTable> shared_table() const { return table_; }
  Device device() const { return device_; }
  int gpu() const { return gpu_; }
  // Of the state arena, and of what is kept on the host: as StateLayout says.
  uint64_t bytes() const { return arena_.bytes(); }
  uint64_t host_bytes() const { return host_.bytes(); }

  // The host's memory of a tensor.
  TensorView view(StateId id) const;

  // Copies all of it; nothing on the CPU.
  void to_device() const;
  // All but the gradients; and these.
  void to_host() const;
  void gradients_to_host() const;

  // Where programs on the GPU find a tensor.
  std::byte* device_address(StateId id) const;
  // All of the GPU's memory.
  const DeviceMemory& device_memory() const { return device_memory_; }

 private:
  std::shared_ptr<const StateTable> table_;
  Device device_;
  int gpu_;
  StateLayout layout_;
  Arena arena_;
  HostMemory host_;
  DeviceMemory device_memory_;
};

}  // namespace troupe
