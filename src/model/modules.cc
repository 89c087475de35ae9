#include "model/modules.h"

#include <algorithm>
#include <fmt/ranges.h>
#include <vector>

#include "model/blocks/dense_mlp.h"
#include "model/blocks/gqa_attention.h"
#include "model/blocks/mla_attention.h"
#include "model/blocks/moe.h"
#include "model/blocks/norm.h"

namespace troupe {
namespace {

// Those that have a name, in the order in which people read of them.
constexpr const ModuleSpec* kModules[] = {&kInputNormModule,
                                          &kQkvModule,
                                          &kMlaLatentModule,
                                          &kMlaUpProjectionModule,
                                          &kCoreAttentionModule,
                                          &kAttentionOutModule,
                                          &kFeedForwardNormModule,
                                          &kExpertFc1Module,
                                          &kExpertActivationModule,
                                          &kExpertRowsModule,
                                          &kNormModule,
                                          &kMlpModule,
                                          &kMoeModule,
                                          &kSharedExpertModule};

}  // namespace

ModuleSet modules_named(ModuleName which, std::string_view name) {
  ModuleSet found;
  for (const ModuleSpec* module : kModules) {
    if (module->*which != nullptr && name == module->*which) found.insert(module);
  }
  return found;
}

std::string module_names(ModuleName which) {
  std::vector<std::string_view> names;
  for (const ModuleSpec* module : kModules) {
    if (module->*which == nullptr) continue;
    const std::string_view name = module->*which;
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  return fmt::format("{}", fmt::join(names, ", "));
}

}  // namespace troupe
