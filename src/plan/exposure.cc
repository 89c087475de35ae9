#include "plan/exposure.h"

#include <algorithm>
#include <fmt/format.h>
#include <utility>
#include <vector>

#include "base/id_vector.h"
#include "base/units.h"
#include "passes/overlap.h"
#include "program/op_spec.h"

namespace troupe {
namespace {

bool reads_any(const Program& program, const Op& op, const IdVector<ValueId, bool>& marked) {
  const auto is_marked = [&](ValueId id) {
    return id.valid() && (marked[id] || (program.value(id).rows.valid() &&
                                         marked[program.value(id).rows.counter]));
  };
  const auto inputs = program.inputs(op);
  return std::any_of(inputs.begin(), inputs.end(), is_marked);
}

}  // namespace

Exposure measure_exposure(const Program& program) {
  Exposure exposure;
  const Program expected = program.with_expected_rows();
  IdVector<ValueId, bool> results(program.value_count(), false);
  std::vector<ValueId> marked;
  for (int32_t index = 0; index < program.op_count(); ++index) {
    if (!is_expert_exchange(program.op(index))) continue;
    ++exposure.exchanges;
    double flops = 0;
    for (const ValueId id : std::exchange(marked, {})) {
      results[id] = false;
    }
    for (int32_t other = index; other < program.op_count(); ++other) {
      const Op& op = program.op(other);
      const bool needs = other == index || reads_any(program, op, results);
      const bool collective = op.place.queue == Queue::communication;
      if (needs && !collective) break;
      if (!collective) flops += flops_of(expected, op);
      if (!needs) continue;
      for (const ValueId output : program.outputs(op)) {
        results[output] = true;
        marked.push_back(output);
      }
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
