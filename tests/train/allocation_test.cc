// Running a planned program allocates nothing. This file replaces the global operator new of the
// test program by one that counts while it is told to; what it returns is plain malloc's.
#include <atomic>
#include <cstdlib>
#include <gtest/gtest.h>
#include <new>

#include "train/train_test_support.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)

TEST(NoAllocations, InARun) {
  GTEST_SKIP() << "the sanitizer brings its own operator new";
}

#else

namespace {

std::atomic<bool> counting{false};
std::atomic<int> allocations{0};

void* allocate(std::size_t bytes, std::size_t alignment) {
  if (counting.load(std::memory_order_relaxed)) allocations.fetch_add(1);
  if (bytes == 0) bytes = 1;
  void* memory =
      alignment <= alignof(std::max_align_t)
          ? std::malloc(bytes)
          : std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

// The other forms (arrays, nothrow) call these. Not inlined, or g++ 12 takes free() for a
// mismatched partner of operator new.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  return allocate(bytes, 1);
}
[[gnu::noinline]] void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<std::size_t>(alignment));
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  std::free(memory);
}

namespace troupe {
namespace {

using namespace testing;

template <class Body>
int count_allocations(const Body& body) {
  allocations.store(0);
  counting.store(true);
  body();
  counting.store(false);
  return allocations.load();
}

TEST(Allocations, AreCounted) {
  // Called as functions: a compiler may leave out a new expression whose result is not used.
  EXPECT_EQ(count_allocations([] { ::operator delete(::operator new(4)); }), 1);
  constexpr std::align_val_t kLine{64};
  EXPECT_EQ(count_allocations([] { ::operator delete(::operator new(4, kLine), kLine); }), 1);
  EXPECT_EQ(count_allocations([] {}), 0);
}

class NoAllocations : public ::testing::TestWithParam<DType> {};

TEST_P(NoAllocations, InARun) {
  for (const int threads : {1, 3}) {
    StepRun run(trained_model(), {.dtype = GetParam(),
                                  .threads = threads,
                                  .micro_batch_size = 2,
                                  .micro_batches = 2,
                                  .sequence = 64});
    EXPECT_EQ(count_allocations([&] { run.interpreter.run(); }), 0) << threads << " threads";
  }
}

INSTANTIATE_TEST_SUITE_P(DTypes, NoAllocations,
                         ::testing::Values(DType::f64, DType::f32, DType::bf16),
                         [](const auto& info) { return std::string(name_of(info.param)); });

}  // namespace
}  // namespace troupe

#endif
