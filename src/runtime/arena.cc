#include "runtime/arena.h"

#include <atomic>
#include <cerrno>
#include <cstring>
#include <sys/mman.h>
#include <utility>

#include "base/error.h"
#include "base/units.h"

namespace troupe {
namespace {

std::atomic<uint64_t> allocated{0};
std::atomic<uint64_t> peak{0};

void count(uint64_t bytes) {
  const uint64_t now = allocated.fetch_add(bytes) + bytes;
  uint64_t seen = peak.load();
  while (now > seen && !peak.compare_exchange_weak(seen, now)) {
  }
}

}  // namespace

Arena::Arena(uint64_t bytes, const std::string& purpose) : bytes_(bytes) {
  if (bytes == 0) return;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    throw UserError(ExitStatus::does_not_fit,
                    "This machine refuses " + format_bytes(bytes) + " for " + purpose + " (" +
                        std::strerror(errno) + "). Use a smaller model, sequence or micro-batch.");
  }
  madvise(memory, bytes, MADV_HUGEPAGE);  // advice only: speed, not correctness
  data_ = static_cast<std::byte*>(memory);
  count(bytes);
}

Arena::~Arena() {
  if (data_ == nullptr) return;
  munmap(data_, bytes_);
  allocated.fetch_sub(bytes_);
}

Arena::Arena(Arena&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Arena& Arena::operator=(Arena&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

uint64_t Arena::allocated_bytes() {
  return allocated.load();
}
uint64_t Arena::peak_allocated_bytes() {
  return peak.load();
}

}  // namespace troupe
