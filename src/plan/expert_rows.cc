#include "plan/expert_rows.h"

#include <fmt/format.h>

#include "base/units.h"

namespace troupe {

ExpertRows expert_rows_of(const Program& program, bool has_fallback) {
  ExpertRows least{.has_fallback = has_fallback};
  for (int32_t index = 0; index < program.value_count(); ++index) {
    const Value& value = program.value(ValueId{index});
    if (!value.rows.valid() || value.rows.expected == 0) continue;
    const int64_t even = value.rows.expected;
    const int64_t planned = value.shape[0];
    // planned / even is smaller than that of the least
    if (least.even != 0 && planned * least.even >= least.planned * even) continue;
    least.even = even;
    least.planned = planned;
  }
  return least;
}

std::string text_of(const ExpertRows& rows) {
  if (rows.planned == rows.even && !rows.has_fallback) return {};
  return fmt::format("room for {} rows, {:.2f} times an even load{}",
                     format_count(static_cast<double>(rows.planned)),
                     static_cast<double>(rows.planned) / static_cast<double>(rows.even),
                     rows.has_fallback ? "; a step that needs more runs again in rounds"
                                       : ", which is the most that may come");
}

}  // namespace troupe
