#include "model/modules.h"

#include "model/blocks/dense_mlp.h"
#include "model/blocks/gqa_attention.h"
#include "model/blocks/moe.h"
#include "model/blocks/norm.h"

namespace troupe {
namespace {

// Those that have a name, in the order in which people read of them.
constexpr const ModuleSpec* kModules[] = {&kInputNormModule,
                                          &kQkvModule,
                                          &kCoreAttentionModule,
                                          &kAttentionOutModule,
                                          &kFeedForwardNormModule,
                                          &kExpertFc1Module,
                                          &kExpertActivationModule,
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
  std::string names;
  for (const ModuleSpec* module : kModules) {
    if (module->*which == nullptr) continue;
    if (!names.empty()) names += ", ";
    names += module->*which;
  }
  return names;
}

}  // namespace troupe
