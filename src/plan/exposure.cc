#include "plan/exposure.h"

#include <fmt/format.h>

#include "base/units.h"
#include "passes/overlap.h"
#include "program/op_spec.h"

namespace troupe {
Exposure measure_exposure(const Program& program) {
  Exposure exposure;
  const Program expected = program.with_expected_rows();
  for (int32_t index = 0; index < program.op_count(); ++index) {
    if (!is_expert_exchange(program.op(index))) continue;
    ++exposure.exchanges;
    double flops = 0;
    for (const int32_t other : operations_beside(program, index)) {
      flops += flops_of(expected, expected.op(other));
    }
    if (flops > 0) ++exposure.covered;
    exposure.flops += flops;
  }
  return exposure;
}

std::string text_of(const Exposure& exposure) {
  if (exposure.exchanges == 0) return {};
  return fmt::format("{} operations, {} overlap with compute ({} flops)", exposure.exchanges,
                     exposure.covered, format_count(exposure.flops));
}

}  // namespace troupe
