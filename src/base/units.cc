#include "base/units.h"

#include <array>
#include <cmath>
#include <fmt/format.h>

namespace troupe {

std::string format_bytes(uint64_t bytes) {
  static constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= (unit == 0 ? 1024.0 : 1023.995) && unit + 1 < kUnits.size()) {
    value /= 1024.0;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.2f} {}", value, kUnits[unit]);
}

std::string format_count(double count) {
  // Each bound is where rounding reaches the next unit.
  if (count < 999.5) return fmt::format("{:.0f}", count);
  if (count < 999.95e3) return fmt::format("{:.1f} k", count / 1e3);
  if (count < 999.95e6) return fmt::format("{:.1f} M", count / 1e6);
  if (count < 999.95e9) return fmt::format("{:.1f} G", count / 1e9);
  return fmt::format("{:.1f} T", count / 1e12);
}

std::string format_duration(double seconds) {
  if (seconds > 0 && seconds < 0.99995e-3) return fmt::format("{:.1f} us", seconds * 1e6);
  if (seconds < 0.99995) return fmt::format("{:.1f} ms", seconds * 1e3);
  if (seconds < 9.995) return fmt::format("{:.2f} s", seconds);
  if (seconds < 59.95) return fmt::format("{:.1f} s", seconds);
  const auto whole = static_cast<int64_t>(std::llround(seconds));
  if (whole < 3600) return fmt::format("{} min {:02} s", whole / 60, whole % 60);
  return fmt::format("{} h {:02} min", whole / 3600, whole % 3600 / 60);
}

}  // namespace troupe
