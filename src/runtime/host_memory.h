// Memory of the host that programs work with, wherever they run: plain memory on the CPU; pinned
// memory for a GPU, which reads and writes it at the same address, and copies it without the host.
//
// One block for the whole life of its owner, zero-initialised, aligned to 64 bytes or better.
// Construction may throw UserError (the machine refuses the memory). On the CPU it counts as an
// Arena.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/device.h"
#include "runtime/arena.h"

namespace troupe {

class HostMemory {
 public:
  HostMemory() = default;
  // `purpose` appears in the error message. `device`: what the programs run on.
  HostMemory(uint64_t bytes, const std::string& purpose, Device device);

  std::byte* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }

 private:
  struct Unpin {
    void operator()(std::byte* memory) const;
  };

  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
  Arena arena_;                               // on the CPU
  std::unique_ptr<std::byte, Unpin> pinned_;  // for a GPU
};

}  // namespace troupe
