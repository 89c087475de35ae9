// Arenas: what is counted, and what an arena promises about its memory.
#include "runtime/arena.h"

#include <algorithm>
#include <cstdint>
#include <gtest/gtest.h>
#include <string>
#include <utility>

#include "base/error.h"

namespace troupe {
namespace {

TEST(Arena, CountsWhatIsHeld) {
  const uint64_t before = Arena::allocated_bytes();
  {
    const Arena a(1000, "a");
    EXPECT_EQ(a.bytes(), 1000U);
    EXPECT_EQ(Arena::allocated_bytes(), before + 1000);
    {
      const Arena b(5 << 20, "b");
      EXPECT_EQ(Arena::allocated_bytes(), before + 1000 + (5 << 20));
    }
    EXPECT_EQ(Arena::allocated_bytes(), before + 1000);
  }
  EXPECT_EQ(Arena::allocated_bytes(), before);
}

TEST(Arena, RemembersThePeak) {
  const uint64_t before = Arena::allocated_bytes();
  const uint64_t large = Arena::peak_allocated_bytes() + 4096;
  { const Arena a(large, "a"); }
  EXPECT_EQ(Arena::peak_allocated_bytes(), before + large);
  const Arena small(64, "small");
  EXPECT_EQ(Arena::peak_allocated_bytes(), before + large);
}

TEST(Arena, IsZeroedAndAligned) {
  const Arena arena(100000, "a");
  EXPECT_EQ(reinterpret_cast<uintptr_t>(arena.data()) % 64, 0U);
  EXPECT_TRUE(std::all_of(arena.data(), arena.data() + arena.bytes(),
                          [](std::byte byte) { return byte == std::byte{0}; }));
  arena.data()[99999] = std::byte{1};
}

TEST(Arena, EmptyHoldsNothing) {
  const uint64_t before = Arena::allocated_bytes();
  const Arena none;
  const Arena empty(0, "nothing");
  EXPECT_EQ(empty.bytes(), 0U);
  EXPECT_EQ(empty.data(), nullptr);
  EXPECT_EQ(Arena::allocated_bytes(), before);
}

TEST(Arena, MovesWithoutCounting) {
  const uint64_t before = Arena::allocated_bytes();
  {
    Arena a(1000, "a");
    std::byte* const data = a.data();
    Arena b(std::move(a));
    EXPECT_EQ(b.data(), data);
    EXPECT_EQ(Arena::allocated_bytes(), before + 1000);
    Arena c(2000, "c");
    c = std::move(b);
    EXPECT_EQ(c.data(), data);
    EXPECT_EQ(c.bytes(), 1000U);
  }
  EXPECT_EQ(Arena::allocated_bytes(), before);
}

TEST(Arena, RefusesWhatTheMachineCannotGive) {
  const uint64_t before = Arena::allocated_bytes();
  try {
    const Arena arena(uint64_t{1} << 60, "activations and workspace");
    FAIL() << "this machine has 2^60 bytes";
  } catch (const UserError& error) {
    EXPECT_EQ(error.status(), ExitStatus::does_not_fit);
    EXPECT_NE(std::string(error.what()).find("activations and workspace"), std::string::npos)
        << error.what();
  }
  EXPECT_EQ(Arena::allocated_bytes(), before);
}

}  // namespace
}  // namespace troupe
