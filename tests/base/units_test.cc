// Numbers for people: the unit changes where the number would get long, and never rounds to the
// size of the next unit.
#include "base/units.h"

#include <cstdint>
#include <gtest/gtest.h>

namespace troupe {
namespace {

TEST(FormatBytes, Units) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(1024), "1.00 KiB");
  EXPECT_EQ(format_bytes(1536), "1.50 KiB");
  EXPECT_EQ(format_bytes(uint64_t{5} << 20), "5.00 MiB");
  EXPECT_EQ(format_bytes(uint64_t{1} << 30), "1.00 GiB");
  EXPECT_EQ(format_bytes(uint64_t{3} << 39), "1.50 TiB");
  EXPECT_EQ(format_bytes(uint64_t{1} << 60), "1048576.00 TiB");
}

TEST(FormatCount, Units) {
  EXPECT_EQ(format_count(0), "0");
  EXPECT_EQ(format_count(950), "950");
  EXPECT_EQ(format_count(14100), "14.1 k");
  EXPECT_EQ(format_count(3.2e6), "3.2 M");
  EXPECT_EQ(format_count(46702792704.0), "46.7 G");
  EXPECT_EQ(format_count(1.5e12), "1.5 T");
}

TEST(FormatDuration, Units) {
  EXPECT_EQ(format_duration(0), "0.0 ms");
  EXPECT_EQ(format_duration(12.34e-6), "12.3 us");
  EXPECT_EQ(format_duration(0.0081), "8.1 ms");
  EXPECT_EQ(format_duration(1.234), "1.23 s");
  EXPECT_EQ(format_duration(12.4), "12.4 s");
  EXPECT_EQ(format_duration(187), "3 min 07 s");
  EXPECT_EQ(format_duration(3600), "1 h 00 min");
  EXPECT_EQ(format_duration(3725), "1 h 02 min");
}

TEST(Units, RoundingReachesTheNextUnit) {
  EXPECT_EQ(format_bytes(1048575), "1.00 MiB");
  EXPECT_EQ(format_count(999.7), "1.0 k");
  EXPECT_EQ(format_count(999960), "1.0 M");
  EXPECT_EQ(format_duration(0.99996e-3), "1.0 ms");
  EXPECT_EQ(format_duration(0.99996), "1.00 s");
  EXPECT_EQ(format_duration(9.996), "10.0 s");
  EXPECT_EQ(format_duration(59.96), "1 min 00 s");
  EXPECT_EQ(format_duration(3599.6), "1 h 00 min");
}

// Below each border, and at it.
TEST(Units, BordersAreThoseOfTheRounding) {
  EXPECT_EQ(format_bytes(1048570), "1023.99 KiB");
  EXPECT_EQ(format_bytes(1048571), "1.00 MiB");
  EXPECT_EQ(format_count(999.4), "999");
  EXPECT_EQ(format_count(999.5), "1.0 k");
  EXPECT_EQ(format_count(999949), "999.9 k");
  EXPECT_EQ(format_count(999950), "1.0 M");
  EXPECT_EQ(format_count(999949e3), "999.9 M");
  EXPECT_EQ(format_count(999950e3), "1.0 G");
  EXPECT_EQ(format_count(999949e6), "999.9 G");
  EXPECT_EQ(format_count(999950e6), "1.0 T");
  EXPECT_EQ(format_count(1234e12), "1234.0 T");
  EXPECT_EQ(format_duration(0.99994e-3), "999.9 us");
  EXPECT_EQ(format_duration(0.99995e-3), "1.0 ms");
  EXPECT_EQ(format_duration(0.99994), "999.9 ms");
  EXPECT_EQ(format_duration(0.99995), "1.00 s");
  EXPECT_EQ(format_duration(9.994), "9.99 s");
  EXPECT_EQ(format_duration(9.995), "10.0 s");
  EXPECT_EQ(format_duration(59.94), "59.9 s");
  EXPECT_EQ(format_duration(59.95), "1 min 00 s");
  EXPECT_EQ(format_duration(3599.4), "59 min 59 s");
  EXPECT_EQ(format_duration(100 * 3600 + 59 * 60), "100 h 59 min");
}

}  // namespace
}  // namespace troupe
