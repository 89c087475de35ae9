// Modules: the parts of a layer by which options choose what is moved or computed again.
//
// A block defines its modules as constants and gives each operation that it emits the one that it
// belongs to (Place::module); gradients and clones of the operation belong to it, too. Modules are
// compared by address. Any thread may read them.
#pragma once

#include <array>
#include <cstdint>
#include <set>
#include <vector>

namespace troupe {

// Whose products can be kept out of 8 bits (--fp8-modules).
enum class ProductGroup : uint8_t { none, attention, mlp, shared_experts, experts };
inline constexpr int kProductGroupCount = static_cast<int>(ProductGroup::experts) + 1;

struct ModuleSpec {
  // The module of which this one is a part: who chooses that chooses this, too.
  const ModuleSpec* part_of = nullptr;
  // What --recompute-modules and --offload-modules call it; null: they cannot choose it. Several
  // modules may have one name.
  const char* recompute = nullptr;
  const char* offload = nullptr;
  ProductGroup products = ProductGroup::none;
  // Of a recomputed module: what it hands on within its layer is not kept either.
  bool discards_outputs = false;
  // Of an offloaded module: what it computes is offloaded with what it reads.
  bool offloads_outputs = false;
  // Its exchanges between the ranks of the experts carry tokens, which other work can hide.
  bool exchanges_tokens = false;
  // Does not depend on those exchanges, and can run beside them.
  bool runs_beside_exchanges = false;
};

inline ProductGroup product_group(const ModuleSpec* module) {
  return module == nullptr ? ProductGroup::none : module->products;
}

// By layer and group: whose products keep their precision. None do of layers that are not here.
using KeptProducts = std::vector<std::array<bool, kProductGroupCount>>;

inline bool keeps_products(const KeptProducts& kept, int32_t layer, ProductGroup group) {
  const auto index = static_cast<size_t>(layer);
  return index < kept.size() && kept[index][static_cast<size_t>(group)];
}

using ModuleSet = std::set<const ModuleSpec*>;

// The outermost module of `set` that `module` is or is a part of; null if there is none.
inline const ModuleSpec* chosen_of(const ModuleSet& set, const ModuleSpec* module) {
  const ModuleSpec* chosen = nullptr;
  for (; module != nullptr; module = module->part_of) {
    if (set.contains(module)) chosen = module;
  }
  return chosen;
}

}  // namespace troupe
