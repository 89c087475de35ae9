#include "model/parameter_owners.h"

#include <algorithm>
#include <map>

#include "model/parameter_layout.h"

namespace troupe {

std::vector<int32_t> parameter_owners(std::span<const ParameterSpec> parameters,
                                      const ModelPart& part) {
  std::vector<int32_t> owners(parameters.size(), -1);
  if (part.run->sharding != StateSharding::optimizer) return owners;
  struct Whole {
    const ParameterSpec* parameter;
    double cost;
  };
  std::vector<Whole> wholes;
  for (const ParameterSpec& parameter : parameters) {
    if (!holds(part.partition(), part.dense().pp, parameter)) continue;
    const double cost = part.run->optimizer->cost_of_whole(
        {.whole_shape = parameter.whole_shape,
         .kept = {},
         .is_hidden_matrix = parameter.is_matrix && !parameter.is_outer,
         .row_matrices = {},
         .cut = {}});
    if (cost > 0) wholes.push_back({&parameter, cost});
  }
  std::stable_sort(wholes.begin(), wholes.end(),
                   [](const Whole& a, const Whole& b) { return a.cost > b.cost; });
  // What each member of a group has to do; experts may be spread over other ranks than all else.
  std::map<std::vector<int32_t>, std::vector<double>> loads;
  for (const Whole& whole : wholes) {
    const RankGroup group = part.shard_groups(whole.parameter->gradient_class).within;
    const std::vector<int32_t> ranks = part.layout().members(group, part.rank);
    std::vector<double>& load = loads[ranks];
    load.resize(ranks.size());
    const auto least = std::min_element(load.begin(), load.end());
    *least += whole.cost;
    owners[static_cast<size_t>(whole.parameter->id.index)] =
        static_cast<int32_t>(least - load.begin());
  }
  return owners;
}

}  // namespace troupe
