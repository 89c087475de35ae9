#include "plan/kernel_variants.h"

#include <algorithm>
#include <fmt/format.h>

#include "program/op_spec.h"

namespace troupe {
namespace {

KernelVariant variant_of(const Program& program, const Op& op, const DeviceTraits& gpu) {
  const KernelChoice choice =
      op.spec->cuda != nullptr ? op.spec->cuda(OpView{program, op}, gpu) : KernelChoice();
  return {
      .kind = op.spec->name,
      .variant = choice.variant != nullptr ? choice.variant : op.spec->name,
      .slow = choice.slow,
      .operations = 1,
      .multiprocessors = choice.multiprocessors < gpu.multiprocessors ? choice.multiprocessors : 0};
}

}  // namespace

std::string KernelVariant::name() const {
  return multiprocessors == 0 ? variant
                              : fmt::format("{} on {} multiprocessors", variant, multiprocessors);
}

void add_variants(std::vector<KernelVariant>& variants, std::span<const KernelVariant> others) {
  for (const KernelVariant& other : others) {
    const auto same = [&](const KernelVariant& variant) {
      return variant.kind == other.kind && variant.variant == other.variant &&
             variant.slow == other.slow && variant.multiprocessors == other.multiprocessors;
    };
    const auto found = std::find_if(variants.begin(), variants.end(), same);
    if (found == variants.end()) {
      variants.push_back(other);
    } else {
      found->operations += other.operations;
    }
  }
}

std::vector<KernelVariant> kernel_variants(const Program& program, const DeviceTraits& gpu) {
  std::vector<KernelVariant> variants;
  for (int32_t index = 0; index < program.op_count(); ++index) {
    const KernelVariant variant = variant_of(program, program.op(index), gpu);
    add_variants(variants, {&variant, 1});
  }
  return variants;
}

std::vector<std::string> variants_of_operations(const Program& program, const DeviceTraits& gpu) {
  std::vector<std::string> variants;
  for (int32_t index = 0; index < program.op_count(); ++index) {
    variants.push_back(variant_of(program, program.op(index), gpu).name());
  }
  return variants;
}

std::string text_of(std::span<const KernelVariant> variants) {
  std::vector<std::string> kinds;
  for (const KernelVariant& variant : variants) {
    const bool is_known = std::find(kinds.begin(), kinds.end(), variant.kind) != kinds.end();
    if (!variant.is_only() && !is_known) kinds.push_back(variant.kind);
  }
  std::string text;
  for (const std::string& kind : kinds) {
    std::vector<std::string> parts;
    for (const KernelVariant& variant : variants) {
      if (variant.kind != kind) continue;
      parts.push_back(fmt::format("{} {}", variant.name(), variant.operations));
    }
    text += fmt::format("  {:<33} {}\n", kind, fmt::join(parts, ", "));
  }
  return text;
}

}  // namespace troupe
