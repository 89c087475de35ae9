// Independent pieces of work of different lengths on a few threads, each taken by the thread that
// is free first.
//
// Blocks until all are done. The first exception ends the rest and is thrown again.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace troupe {

// Calls work(i) for all i below `count`, on at most `workers` threads, the caller's among them.
template <class Work>
void for_each_item(size_t count, int workers, const Work& work) {
  std::atomic<size_t> next = 0;
  std::exception_ptr failure;
  std::mutex mutex;
  const auto run = [&] {
    try {
      for (size_t i = next++; i < count; i = next++) work(i);
    } catch (...) {
      next = count;
      const std::lock_guard lock(mutex);
      if (!failure) failure = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  for (size_t i = 1; i < std::min(count, static_cast<size_t>(workers)); ++i) {
    threads.emplace_back(run);
  }
  run();
  for (std::thread& thread : threads) thread.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace troupe
