// Runs of layouts whose weights are kept as master weights alone, and what they have in common with
// each other (RunLayout::weight_codes).
#pragma once

#include <string>

#include "support/layout_run.h"

namespace troupe::testing {

inline constexpr Fp8Recipe kRecipes[] = {Fp8Recipe::tensorwise, Fp8Recipe::delayed,
                                         Fp8Recipe::blockwise, Fp8Recipe::mxfp8};
std::string recipe_name(Fp8Recipe recipe);

// Two layers with experts, of sizes that are cut in two between blocks; of `ranks` that share
// nothing else. Named after the recipe, too.
LayoutCase coded_weights(const std::string& name, Fp8Recipe recipe, int32_t ranks);

// Of bf16 runs whose masters are whole, and sharded so. Codes are the same: so losses and counts of
// the first step have the same bits, and gradients where they are not summed by micro-batch. Norms,
// by which gradients are clipped, are summed in another order; after that a code in some thousands
// is another one, while each step moves most elements of masters by some 1e-3.
void expect_same_codes(const Outcome& whole, const Outcome& shards, StateSharding sharding);

}  // namespace troupe::testing
