#include "model/rank_parameters.h"

#include "model/parameter_layout.h"

namespace troupe {

RankParameters count_parameters(const ModelState& state, const Layout& layout,
                                const PipelinePartition& partition, int32_t rank) {
  RankParameters count;
  const int32_t place = layout.dense_place(rank).pp;
  for (const Parameter& parameter : state.parameters) {
    if (!holds(partition, place, parameter)) continue;
    const StateTensor& tensor = (*state.table)[parameter.value];
    const int64_t elements = slice_of(parameter, layout, rank).elements();
    (parameter.gradient_class == GradientClass::expert ? count.expert : count.dense) += elements;
    if (tensor.is_stored) count.bytes += static_cast<uint64_t>(elements) * size_of(tensor.dtype);
  }
  return count;
}

}  // namespace troupe
