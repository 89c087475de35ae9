#include "model/tensor_parallel.h"

#include "ops/elementwise/add_bias/add_bias.h"
#include "ops/exchange/all_gather/all_gather.h"
#include "ops/exchange/copy_to_ranks/copy_to_ranks.h"
#include "ops/exchange/reduce_scatter/reduce_scatter.h"
#include "ops/exchange/sum_over_ranks/sum_over_ranks.h"
#include "ops/products/linear/linear.h"

namespace troupe {

ValueId TensorParallel::enter(ValueId rows, const std::string& name) const {
  if (ranks_ == 1) return rows;
  if (!sequence_parallel_) return copy_to_ranks(builder_, rows, {.group = RankGroup::tp}, name);
  return all_gather(builder_, rows, {.group = RankGroup::tp, .ranks = ranks_}, name);
}

ValueId TensorParallel::leave(ValueId partial, const std::string& name) const {
  if (ranks_ == 1) return partial;
  if (!sequence_parallel_) return sum_over_ranks(builder_, partial, {.group = RankGroup::tp}, name);
  return reduce_scatter(builder_, partial, {.group = RankGroup::tp, .ranks = ranks_}, name);
}

ValueId TensorParallel::sum_for_all(ValueId partial, const std::string& name) const {
  if (ranks_ == 1) return partial;
  const ValueId sum = sum_over_ranks(builder_, partial, {.group = RankGroup::tp}, name);
  return copy_to_ranks(builder_, sum, {.group = RankGroup::tp}, name + "_for_all");
}

ValueId leave_linear(Builder& builder, const TensorParallel& tensor_parallel, ValueId x,
                     ValueId weight, ValueId bias, const std::string& name) {
  if (tensor_parallel.ranks() == 1) return linear(builder, x, weight, {.bias = bias}, name);
  const ValueId partial = linear(builder, x, weight, {}, name + "_part");
  const ValueId sum = tensor_parallel.leave(partial, name);
  return add_bias(builder, sum, bias, name + "_biased");
}

}  // namespace troupe
