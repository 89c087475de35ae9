#include "plan/expert_rows.h"

#include <fmt/format.h>

#include "base/units.h"
#include "ops/routing/route/route.h"

namespace troupe {
namespace {

constexpr size_t kRowSlot = 2;  // of route's outputs, a row for each row of the experts

}  // namespace

ExpertRows expert_rows_of(const Program& program, bool has_fallback) {
  ExpertRows least{.has_fallback = has_fallback};
  for (int32_t index = 0; index < program.op_count(); ++index) {
    const Op& op = program.op(index);
    if (op.spec != &kRoute) continue;
    const Value& value = program.value(program.outputs(op)[kRowSlot]);
    if (value.rows.expected == 0) continue;
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
