// Included by every source of a copy of the project in which plant.py has planted faults; never by
// the project itself. Of the faults planted, the one whose number the variable TROUPE_FAULT gives is
// active in a process and those that it starts, or none. A file named by TROUPE_FAULTS_REACHED gets
// a byte 1 at the number of each fault whose place runs, from however many processes. Thread-safe.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <type_traits>

namespace troupe_fault {

inline constexpr int kNumbers = 4096;
inline std::atomic<int> active = -1; // -1: not read yet
inline std::atomic<char*> reached = nullptr;

inline int read_active() {
  const char* file = std::getenv("TROUPE_FAULTS_REACHED");
  if (file != nullptr) {
    const int descriptor = ::open(file, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (descriptor < 0 || ::ftruncate(descriptor, kNumbers) != 0) std::abort();
    void* bytes = ::mmap(nullptr, kNumbers, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (bytes == MAP_FAILED) std::abort();
    ::close(descriptor);
    reached = static_cast<char*>(bytes);
  }
  const char* number = std::getenv("TROUPE_FAULT");
  active = number == nullptr ? 0 : std::atoi(number);
  return active;
}

// Whether the fault of that number, at least 1, is the active one. What the compiler computes has none.
constexpr bool on(int number) {
  if (std::is_constant_evaluated()) return false;
  int which = active.load(std::memory_order_relaxed);
  if (which < 0) which = read_active();
  char* bytes = reached.load(std::memory_order_relaxed);
  if (bytes != nullptr) bytes[number] = 1;
  return which == number;
}

} // namespace troupe_fault
