// Arena: one block of memory for the whole life of its owner, and a count of what all arenas hold.
//
// The count is what "allocated bytes" means in reports: the memory plan promises it to the byte.
// Construction may throw UserError (the machine refuses the memory). Counting is thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace troupe {

class Arena {
 public:
  Arena() = default;
  // Zero-initialised, aligned to 64 bytes or better. `purpose` appears in the error message.
  Arena(uint64_t bytes, const std::string& purpose);
  ~Arena();
  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&& other) noexcept;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  std::byte* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }

  static uint64_t allocated_bytes();       // in all arenas of this process, now
  static uint64_t peak_allocated_bytes();  // the largest that was

 private:
  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace troupe
