#include "parallel/collective_schedule.h"

#include <algorithm>
#include <fmt/format.h>
#include <string>
#include <string_view>
#include <vector>

#include "program/op_spec.h"

namespace troupe {
namespace {

// The collectives' numbers in the program.
std::vector<int32_t> collectives_of(const Program& program) {
  std::vector<int32_t> indices;
  for (int32_t index = 0; index < program.op_count(); ++index) {
    if (program.op(index).spec->group != nullptr) indices.push_back(index);
  }
  return indices;
}

RankGroup group_of(const Op& op) {
  return op.spec->group(op.attributes);
}

std::string describe(const Program& program, int32_t index) {
  const Op& op = program.op(index);
  std::string text = fmt::format("operation {} ({}", index, op.spec->name);
  if (op.place.layer >= 0) text += fmt::format(", layer {}", op.place.layer);
  if (op.place.micro_batch >= 0) text += fmt::format(", micro-batch {}", op.place.micro_batch);
  text += fmt::format(", group {}) of", name_of(group_of(op)));
  for (const ValueId id : program.inputs(op)) {
    if (!id.valid()) continue;
    const Value& value = program.value(id);
    text += fmt::format(" {} {} {}", value.name, name_of(value.dtype), value.shape.to_string());
  }
  return text;
}

bool same_operand(const Program& a, ValueId x, const Program& b, ValueId y) {
  if (!x.valid() || !y.valid()) return x.valid() == y.valid();
  return a.value(x).dtype == b.value(y).dtype && a.value(x).shape == b.value(y).shape;
}

bool same_collective(const Program& a, const Op& x, const Program& b, const Op& y) {
  const auto inputs = a.inputs(x);
  const auto others = b.inputs(y);
  return x.spec == y.spec && group_of(x) == group_of(y) &&
         std::equal(inputs.begin(), inputs.end(), others.begin(), others.end(),
                    [&](ValueId i, ValueId j) { return same_operand(a, i, b, j); });
}

[[noreturn]] void refuse(const std::string& difference) {
  throw UserError(
      ExitStatus::does_not_fit,
      "The ranks' programs do not fit together and would wait for each other for ever: " +
          difference);
}

}  // namespace

void verify_collectives(std::span<const Program* const> programs) {
  const Program& first = *programs.front();
  const std::vector<int32_t> expected = collectives_of(first);
  for (size_t rank = 1; rank < programs.size(); ++rank) {
    const Program& other = *programs[rank];
    const std::vector<int32_t> found = collectives_of(other);
    const size_t both = std::min(expected.size(), found.size());
    for (size_t i = 0; i < both; ++i) {
      if (same_collective(first, first.op(expected[i]), other, other.op(found[i]))) continue;
      refuse(fmt::format("collective {} of rank 0 is {}, of rank {} {}.", i,
                         describe(first, expected[i]), rank, describe(other, found[i])));
    }
    if (expected.size() > both) {
      refuse(fmt::format("rank {} has no collective {}, which in rank 0 is {}.", rank, both,
                         describe(first, expected[both])));
    }
    if (found.size() > both) {
      refuse(fmt::format("rank 0 has no collective {}, which in rank {} is {}.", both, rank,
                         describe(other, found[both])));
    }
  }
}

uint64_t hash_collectives(const Program& program) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a, 64 bits
  const auto add = [&](std::string_view text) {
    for (const char c : text) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3;
  };
  for (const int32_t index : collectives_of(program)) {
    const Op& op = program.op(index);
    add(fmt::format("{}@{}(", op.spec->name, name_of(group_of(op))));
    for (const ValueId id : program.inputs(op)) {
      if (!id.valid()) {
        add("-,");
        continue;
      }
      const Value& value = program.value(id);
      add(fmt::format("{} {},", name_of(value.dtype), value.shape.to_string()));
    }
    add(")");
  }
  return hash;
}

}  // namespace troupe
