#include "model/read_parameter.h"

#include "ops/exchange/gather_parameter/gather_parameter.h"

namespace troupe {

ValueId read_parameter(Builder& builder, const ModelState& state, ParameterId id) {
  const Parameter& parameter = state.get(id);
  const ValueId held = builder.state(parameter.value);
  const Shard shard = state.part.shard(parameter.gradient_class);
  if (state.part.run->sharding != StateSharding::parameters || shard.count == 1) return held;
  return gather_parameter(builder, held,
                          {.group = state.part.shard_groups(parameter.gradient_class).within,
                           .shard = shard,
                           .shape = parameter.slice.shape()},
                          builder.value(held).name);
}

}  // namespace troupe
