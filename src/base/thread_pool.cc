#include "base/thread_pool.h"

#include "base/error.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace troupe {
namespace {

// Loops of one training step follow each other within microseconds, so a waiting thread first spins
// for about this many pauses (some 20 us) before it sleeps in the kernel.
constexpr int kSpins = 1000;

void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace

ThreadPool::ThreadPool(int threads) {
  TROUPE_CHECK(threads >= 1, "a thread pool needs at least one thread");
  workers_.reserve(static_cast<size_t>(threads - 1));
  for (int worker = 1; worker < threads; ++worker) {
    workers_.emplace_back([this, worker] { work(worker); });
  }
}

ThreadPool::~ThreadPool() {
  stop_.store(true, std::memory_order_relaxed);
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run(int64_t chunks, Function function, const void* context) {
  function_ = function;
  context_ = context;
  chunks_ = chunks;
  next_chunk_.store(0, std::memory_order_relaxed);
  busy_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();

  take_chunks(0);

  for (int spin = 0;; ++spin) {
    const int busy = busy_.load(std::memory_order_acquire);
    if (busy == 0) return;
    if (spin < kSpins) {
      pause_briefly();
    } else {
      busy_.wait(busy, std::memory_order_acquire);
    }
  }
}

void ThreadPool::take_chunks(int worker) {
  for (;;) {
    const int64_t chunk = next_chunk_.fetch_add(1, std::memory_order_relaxed);
    if (chunk >= chunks_) return;
    function_(context_, chunk, worker);
  }
}

void ThreadPool::work(int worker) {
  uint32_t seen = 0;
  for (;;) {
    for (int spin = 0; generation_.load(std::memory_order_acquire) == seen; ++spin) {
      if (spin < kSpins) {
        pause_briefly();
      } else {
        generation_.wait(seen, std::memory_order_acquire);
      }
    }
    ++seen;
    if (stop_.load(std::memory_order_relaxed)) return;
    take_chunks(worker);
    if (busy_.fetch_sub(1, std::memory_order_acq_rel) == 1) busy_.notify_one();
  }
}

}  // namespace troupe
