#include "passes/whole_amax.h"

#include "ops/exchange/all_gather/all_gather.h"

namespace troupe {
namespace {

AllGatherAttributes ranks_of_parts(const Layout& layout, bool of_experts) {
  const bool spread = of_experts && layout.ep() > 1;
  return {.group = spread ? RankGroup::etp : RankGroup::tp_cp,
          .ranks = spread ? layout.etp() : layout.tp() * layout.cp()};
}

}  // namespace

ValueId amax_of_parts(Builder& builder, const Layout& layout, ValueId amax, bool of_experts,
                      const std::string& name) {
  const AllGatherAttributes all = ranks_of_parts(layout, of_experts);
  return all.ranks == 1 ? amax : all_gather(builder, amax, all, name + "_amax_all");
}

ValueId whole_amax(Builder& builder, const Layout& layout, Fp8Recipe recipe, ValueId value,
                   ValueId offsets, bool of_experts, const QuantizeAttributes& attributes,
                   const std::string& name) {
  const bool is_part =
      recipe == Fp8Recipe::tensorwise && ranks_of_parts(layout, of_experts).ranks > 1;
  if (!is_part && recipe != Fp8Recipe::nvfp4) return {};
  const ValueId own =
      block_amax(builder, value, offsets,
                 {.rounds = attributes.rounds, .rotates = attributes.rotates}, name + "_amax");
  return amax_of_parts(builder, layout, own, of_experts, name);
}

}  // namespace troupe
