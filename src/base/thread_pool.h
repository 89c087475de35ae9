// A fixed set of worker threads that run the chunks of one loop at a time.
//
// The split of a loop into chunks is the caller's and must depend on the problem alone, never on
// the number of threads: then results are the same bits for any number of threads. Which worker
// runs which chunk is not defined. A loop allocates nothing.
//
// One thread (the owner) calls parallel_for; it takes part in the work. Loops do not nest.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

namespace troupe {

class ThreadPool {
 public:
  // `threads` >= 1 counts the owner: a pool of one starts no thread.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(chunk, worker) once for each chunk in [0, chunks), with worker in [0, threads()),
  // and returns when all calls have returned. `body` must not throw.
  template <class Body>
  void parallel_for(int64_t chunks, const Body& body) {
    if (chunks <= 1 || workers_.empty()) {
      for (int64_t chunk = 0; chunk < chunks; ++chunk) body(chunk, 0);
      return;
    }
    run(
        chunks,
        [](const void* context, int64_t chunk, int worker) {
          (*static_cast<const Body*>(context))(chunk, worker);
        },
        &body);
  }

  // Splits [0, count) into pieces of `grain` (the last may be shorter) and calls
  // body(begin, end, worker) for each.
  template <class Body>
  void parallel_ranges(int64_t count, int64_t grain, const Body& body) {
    if (count <= 0) return;
    parallel_for((count + grain - 1) / grain, [&](int64_t chunk, int worker) {
      const int64_t begin = chunk * grain;
      const int64_t end = begin + grain < count ? begin + grain : count;
      body(begin, end, worker);
    });
  }

 private:
  using Function = void (*)(const void* context, int64_t chunk, int worker);

  void run(int64_t chunks, Function function, const void* context);
  void work(int worker);
  void take_chunks(int worker);

  std::vector<std::thread> workers_;
  Function function_ = nullptr;
  const void* context_ = nullptr;
  int64_t chunks_ = 0;
  std::atomic<int64_t> next_chunk_{0};
  std::atomic<uint32_t> generation_{0};  // raised to start a loop; the top value means stop
  std::atomic<int> busy_{0};             // workers that have not finished the current loop
  std::atomic<bool> stop_{false};
};

}  // namespace troupe
