#include "cli/inspect_passes.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/units.h"

namespace troupe {
namespace {

// "102.40 MiB", or "-1.00 MiB" where it is more.
std::string saved_text(uint64_t before, uint64_t after) {
  return after <= before ? format_bytes(before - after) : "-" + format_bytes(after - before);
}

}  // namespace

PassTable::PassTable(std::function<uint64_t(const Program&)> memory_of)
    : memory_of_(std::move(memory_of)) {}

void PassTable::add(const PassRecord& record, const Program& program) {
  lines_.push_back({record, memory_of_(program)});
}

std::string PassTable::text() const {
  std::string text = fmt::format("{:<15} {:>9} {:>10} {:>9} {:>8} {:>12} {:>11}\n", "pass", "time",
                                 "operations", "added", "moved", "memory", "saved");
  for (size_t i = 0; i < lines_.size(); ++i) {
    const PassRecord& record = lines_[i].record;
    const bool is_first = i == 0;
    const int32_t added = is_first ? 0 : record.ops_after - record.ops_before;
    text += fmt::format("{:<15} {:>9} {:>10} {:>9} {:>8} {:>12} {:>11}\n", record.name,
                        format_duration(record.seconds), record.ops_after, added, record.ops_moved,
                        format_bytes(lines_[i].bytes),
                        is_first ? "-" : saved_text(lines_[i - 1].bytes, lines_[i].bytes));
  }
  text += '\n';
  for (const PassInfo& pass : all_passes()) {
    text += fmt::format("  {:<15} {}\n", pass.name, pass.purpose);
  }
  return text;
}

std::string PassTable::json() const {
  nlohmann::ordered_json passes = nlohmann::ordered_json::array();
  for (const Line& line : lines_) {
    passes.push_back({{"name", line.record.name},
                      {"seconds", line.record.seconds},
                      {"ops_before", line.record.ops_before},
                      {"ops_after", line.record.ops_after},
                      {"ops_moved", line.record.ops_moved},
                      {"bytes", line.bytes}});
  }
  return nlohmann::ordered_json({{"passes", std::move(passes)}}).dump() + "\n";
}

}  // namespace troupe
