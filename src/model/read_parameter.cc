#include "model/read_parameter.h"

#include "ops/exchange/gather_parameter/gather_parameter.h"

namespace troupe {

ValueId read_parameter(Builder& builder, const ModelState& state, ParameterId id) {
  const Parameter& parameter = state.get(id);
  const ValueId held = builder.state(parameter.value);
  const Shard shard = state.part.shard(parameter.gradient_class);
  if (state.part.run->sharding != StateSharding::parameters || shard.count == 1) return held;
  std::vector<int64_t> extents;
  for (int i = 0; i < parameter.whole_shape.rank(); ++i) {
    extents.push_back(parameter.slice.extent(i));
  }
  return gather_parameter(builder, held,
                          {.group = state.part.shard_groups(parameter.gradient_class).within,
                           .shard = shard,
                           .shape = Shape(extents)},
                          builder.value(held).name);
}

}  // namespace troupe
