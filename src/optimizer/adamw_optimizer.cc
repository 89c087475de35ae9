#include "optimizer/adamw_optimizer.h"

#include "base/error.h"
#include "ops/optimizer/adamw/adamw.h"
#include "ops/optimizer/adamw/moment_blocks.h"

namespace troupe {

std::vector<OptimizerTensor> AdamWOptimizer::declare(const OptimizedParameter& parameter,
                                                     const AddOptimizerState& add) const {
  const auto declare_moment = [&](const std::string& name, DType dtype) {
    if (accumulation_dtype(parameter.dtype) == DType::f64) dtype = DType::f64;
    if (dtype == DType::f8e4m3 && parameter.whole_shape.rank() == 1) dtype = DType::f32;
    OptimizerTensor moment{.name = name, .values = add(name, dtype, parameter.kept), .scales = {}};
    if (dtype == DType::f8e4m3) {
      moment.scales = add(name + "_scale", DType::u8, moment_scales_shape(parameter.kept));
    }
    return moment;
  };
  std::vector<OptimizerTensor> moments;
  moments.push_back(declare_moment("exp_avg", options_.exp_avg));
  moments.push_back(declare_moment("exp_avg_sq", options_.exp_avg_sq));
  return moments;
}

void AdamWOptimizer::emit_update(Builder& builder, const ParameterUpdate& update,
                                 const UpdateScalars& scalars) const {
  TROUPE_CHECK(update.tensors.size() == 2, "AdamW has two moments");
  const auto state_of = [&](StateId id) { return id.valid() ? builder.state(id) : ValueId{}; };
  const OptimizerTensor& mean = update.tensors[0];
  const OptimizerTensor& square = update.tensors[1];
  adamw(builder,
        {.parameter = update.parameter,
         .gradient = update.gradient,
         .exp_avg = builder.state(mean.values),
         .exp_avg_sq = builder.state(square.values),
         .master = update.master,
         .exp_avg_scale = state_of(mean.scales),
         .exp_avg_sq_scale = state_of(square.scales)},
        {.learning_rate = scalars.learning_rate,
         .weight_decay = scalars.weight_decay,
         .step = scalars.number,
         .coefficient = scalars.coefficient,
         .skip = scalars.skip},
        {.beta1 = options_.beta1,
         .beta2 = options_.beta2,
         .epsilon = options_.epsilon,
         .decay = update.decay,
         .first = update.first},
        update.name);
}

std::shared_ptr<const Optimizer> default_optimizer() {
  static const auto kOptimizer = std::make_shared<const AdamWOptimizer>(AdamWOptions{});
  return kOptimizer;
}

}  // namespace troupe
