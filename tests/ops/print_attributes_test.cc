// What the printed program says of an operation's attributes: that a gradient is added to what is
// there and does not replace it.
#include <gtest/gtest.h>
#include <string>
#include <string_view>

#include "ops/attention/attention_sinks/attention_sinks.h"
#include "ops/attention/causal_conv/causal_conv.h"
#include "ops/attention/delta_gates/delta_gates.h"
#include "ops/exchange/gather_parameter/gather_parameter.h"
#include "ops/exchange/slices/slices.h"
#include "ops/experts/grouped_bias/grouped_bias.h"
#include "ops/experts/grouped_linear/grouped_linear.h"
#include "ops/norms/gated_norm/gated_norm.h"
#include "ops/norms/layer_norm/layer_norm.h"
#include "ops/norms/qk_norm/qk_norm.h"
#include "ops/norms/rms_norm/rms_norm.h"
#include "ops/products/embedding/embedding.h"
#include "ops/products/head_linear/head_linear.h"
#include "ops/products/linear/linear.h"

namespace troupe {
namespace {

template <class Values>
void expect_says_whether_it_adds(const OpSpec& kind, Values values = {}) {
  SCOPED_TRACE(kind.name);
  ASSERT_NE(kind.print_attributes, nullptr);
  constexpr std::string_view kAdds = "accumulate=1";
  values.accumulate = false;
  EXPECT_EQ(kind.print_attributes(Attributes(values)).find(kAdds), std::string::npos);
  values.accumulate = true;
  EXPECT_NE(kind.print_attributes(Attributes(values)).find(kAdds), std::string::npos);
}

TEST(PrintAttributes, GradientsOfParametersSayWhetherTheyAdd) {
  expect_says_whether_it_adds<LayerNormWeightGradientAttributes>(kLayerNormWeightGradient);
  expect_says_whether_it_adds<LayerNormBiasGradientAttributes>(kLayerNormBiasGradient);
  expect_says_whether_it_adds<RmsNormWeightGradientAttributes>(kRmsNormWeightGradient);
  expect_says_whether_it_adds<QkNormWeightGradientAttributes>(kQkNormRopeWeightGradient);
  expect_says_whether_it_adds<GatedNormAttributes>(kGatedNormWeightGradient);
  expect_says_whether_it_adds<DeltaGatesParameterGradientAttributes>(kDeltaGatesParameterGradient);
  expect_says_whether_it_adds<AttentionSinkGradientAttributes>(kAttentionSinkGradient);
  expect_says_whether_it_adds<CausalConvAttributes>(kCausalConvWeightGradient);
  expect_says_whether_it_adds<GroupedBiasWeightGradientAttributes>(kGroupedBiasWeightGradient);
  expect_says_whether_it_adds<GroupedLinearWeightGradientAttributes>(kGroupedLinearWeightGradient);
  expect_says_whether_it_adds<LinearWeightGradientAttributes>(kLinearWeightGradient);
  expect_says_whether_it_adds<LinearBiasGradientAttributes>(kLinearBiasGradient);
  expect_says_whether_it_adds<EmbeddingWeightGradientAttributes>(kEmbeddingWeightGradient);
  expect_says_whether_it_adds<HeadLinearWeightGradientAttributes>(kHeadLinearWeightGradient);
  expect_says_whether_it_adds<GatherParameterAttributes>(kSumParameterGradient);
  expect_says_whether_it_adds<SliceCut>(kTakeSliceGradient);
}

TEST(PrintAttributes, SectionsSayOfHowManyCopiesTheyAre) {
  const SliceCut cut{.sections = {{{8}, {4, 2}, {6, 4}}}, .ranks = 4};
  EXPECT_EQ(kJoinSlices.print_attributes(Attributes(cut)),
            "dimension=0 ranks=4 sections=8+4x2+6x4");
}

}  // namespace
}  // namespace troupe
