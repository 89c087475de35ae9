#include "model/read_parameter.h"

#include "ops/gather_parameter/gather_parameter.h"

namespace troupe {

ValueId read_parameter(Builder& builder, const ModelState& state, ParameterKind kind,
                       int32_t layer) {
  const Parameter* parameter = state.search(kind, layer);
  if (parameter == nullptr) return {};
  const ValueId held = builder.state(parameter->value);
  const Shard shard = state.part.shard(parameter->slice.gradient);
  if (state.part.run->sharding != StateSharding::parameters || shard.count == 1) return held;
  std::vector<int64_t> extents;
  for (int i = 0; i < parameter->whole_shape.rank(); ++i) {
    extents.push_back(parameter->slice.extent(i));
  }
  return gather_parameter(builder, held,
                          {.group = state.part.shard_groups(parameter->slice.gradient).within,
                           .shard = shard,
                           .shape = Shape(extents)},
                          builder.value(held).name);
}

}  // namespace troupe
