// The coefficients of auxiliary losses.
#include "model/forward_pass.h"

#include <gtest/gtest.h>

#include "program/test_models.h"

namespace troupe {
namespace {

// A layer of prediction that is used more than once adds its losses as often: together they weigh
// as much as those of a layer that is used once. The z loss has no balance of its tokens to keep.
TEST(AuxiliaryLossCoefficient, IsDividedAmongTheUsesOfALayer) {
  ModelConfig config = testing::moe_model(2);
  config.mtp_num_layers = 3;
  config.mtp_use_repeated_layer = true;
  config.moe_aux_loss_coeff = 0.3;
  config.moe_seq_aux_loss_coeff = 0.6;
  config.moe_global_aux_loss_coeff = 0.9;
  config.moe_z_loss_coeff = 0.5;
  struct Expected {
    AuxiliaryLossKind kind;
    double once, repeated;
  };
  for (const Expected& each : {Expected{AuxiliaryLossKind::load_balancing, 0.3, 0.1},
                               Expected{AuxiliaryLossKind::seq_load_balancing, 0.6, 0.2},
                               Expected{AuxiliaryLossKind::global_load_balancing, 0.9, 0.3},
                               Expected{AuxiliaryLossKind::z, 0.5, 0.5}}) {
    EXPECT_DOUBLE_EQ(coefficient_of(each.kind, config, 1), each.once);
    for (const int32_t layer : {2, 3, 4}) {
      EXPECT_DOUBLE_EQ(coefficient_of(each.kind, config, layer), each.repeated) << layer;
    }
  }
}

}  // namespace
}  // namespace troupe
