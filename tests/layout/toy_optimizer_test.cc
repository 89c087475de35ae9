// An optimizer that the program does not have, made in this file alone: momentum SGD of Muon's
// elementwise operations. Its state is planned and updated in layouts as AdamW's is.
#include <gtest/gtest.h>

#include "ops/optimizer/muon/muon.h"
#include "optimizer/optimizer.h"
#include "support/layout_models.h"
#include "support/layout_run.h"

namespace troupe::testing {
namespace {

class ToyOptimizer : public Optimizer {
 public:
  std::vector<OptimizerTensor> declare(const OptimizedParameter& parameter,
                                       const AddOptimizerState& add) const override {
    const DType dtype = accumulation_dtype(parameter.dtype);
    return {{.name = "toy", .values = add("toy", dtype, parameter.kept), .scales = {}}};
  }

  void emit_update(Builder& builder, const ParameterUpdate& update,
                   const UpdateScalars& scalars) const override {
    const ValueId direction =
        muon_momentum(builder,
                      {.gradient = update.gradient,
                       .momentum = builder.state(update.tensors.front().values),
                       .coefficient = scalars.coefficient,
                       .skip = scalars.skip},
                      {.beta = 0.5}, "toy." + update.name);
    muon_update(builder,
                {.update = direction,
                 .parameter = update.parameter,
                 .master = update.master,
                 .learning_rate = scalars.learning_rate,
                 .weight_decay = scalars.weight_decay,
                 .skip = scalars.skip},
                {.scale = 2, .decay = update.decay}, update.name);
  }
};

TEST(ToyOptimizer, LayoutsEqualOneRank) {
  LayoutCase c;
  c.model = moe_model(2);
  c.micro_batches = 2;
  c.optimizer = std::make_shared<const ToyOptimizer>();
  c.layout.world_size = 4;
  c.layout.tensor_parallel = 2;
  c.layout.expert_parallel = 2;
  c.layout.sequence_parallel = true;
  const Outcome one = run_one_rank(c);
  EXPECT_TRUE(one.contains("after it, toy of layers.1.w_qkv"));
  expect_same_outcome(one, run_layout(c));
  c.layout.tensor_parallel = 1;
  c.layout.pipeline_parallel = 2;
  expect_same_outcome(run_one_rank(c), run_layout(c));
}

}  // namespace
}  // namespace troupe::testing
