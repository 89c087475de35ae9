#include "plan/memory_chart.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <fmt/format.h>
#include <vector>

#include "base/error.h"
#include "base/units.h"

namespace troupe {
namespace {

char letter_of(Phase phase) {
  switch (phase) {
    case Phase::forward:
      return 'F';
    case Phase::data_gradient:
    case Phase::weight_gradient:
    case Phase::recompute:
      return 'B';
    case Phase::optimizer:
      return 'O';
  }
  return '?';
}

}  // namespace

std::string draw_live_bytes(const Program& program, std::span<const uint64_t> live_bytes,
                            int width) {
  TROUPE_CHECK(!live_bytes.empty() &&
                   live_bytes.size() == static_cast<size_t>(program.op_count()) && width > 0,
               "live bytes by operation");
  constexpr int kHeight = 12;
  constexpr std::array<const char*, 9> kEighths = {" ",      "\u2581", "\u2582", "\u2583", "\u2584",
                                                   "\u2585", "\u2586", "\u2587", "\u2588"};
  const auto ops = static_cast<int64_t>(live_bytes.size());
  const int64_t columns = std::min<int64_t>(width, ops);
  const uint64_t peak = *std::max_element(live_bytes.begin(), live_bytes.end());

  // Each column stands for a stretch of operations: its highest number, the place of its first.
  std::vector<int64_t> eighths;
  std::string phases;
  std::string batches;
  int32_t last_batch = -1;
  for (int64_t column = 0; column < columns; ++column) {
    const int64_t begin = column * ops / columns;
    const int64_t end = (column + 1) * ops / columns;
    const uint64_t live = *std::max_element(live_bytes.begin() + begin, live_bytes.begin() + end);
    const double share = peak == 0 ? 0 : static_cast<double>(live) / static_cast<double>(peak);
    eighths.push_back(std::llround(share * kHeight * 8));
    const Place& place = program.op(static_cast<int32_t>(begin)).place;
    phases += letter_of(place.phase);
    if (place.micro_batch != last_batch && place.micro_batch >= 0 &&
        batches.size() <= static_cast<size_t>(column)) {
      batches.resize(static_cast<size_t>(column), ' ');
      batches += fmt::format("mb{} ", place.micro_batch);
    }
    last_batch = place.micro_batch;
  }

  std::string text;
  for (int row = kHeight - 1; row >= 0; --row) {
    // Bytes at the upper edge of this row of characters.
    const uint64_t edge = peak * static_cast<uint64_t>(row + 1) / kHeight;
    text += fmt::format("{:>12} |", (row + 1) % 3 == 0 ? format_bytes(edge) : "");
    std::string line;
    size_t filled = 0;
    for (size_t column = 0; column < eighths.size(); ++column) {
      const int64_t part = std::clamp<int64_t>(eighths[column] - int64_t{8} * row, 0, 8);
      line += kEighths[static_cast<size_t>(part)];
      if (part > 0) filled = line.size();
    }
    text += line.substr(0, filled) + "\n";
  }
  text += fmt::format("{:>12} |{}\n", "0 B", phases);
  if (!batches.empty()) {
    text += fmt::format("{:>12}  {}\n", "", batches.substr(0, batches.find_last_not_of(' ') + 1));
  }
  return text + fmt::format("{:>12}  F forward, B backward, O optimizer; {} operations\n", "", ops);
}

}  // namespace troupe
