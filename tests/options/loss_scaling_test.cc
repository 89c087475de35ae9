// How the loss scale of --fp16 follows overflows.
#include "options/loss_scaling.h"

#include <gtest/gtest.h>
#include <string>
#include <vector>

#include "support/errors.h"

namespace troupe {
namespace {

// The scales of the steps of which each overflows ('x') or not ('.'), and of the one after them.
std::vector<double> scales(const LossScaling& scaling, const std::string& steps) {
  std::vector<double> all;
  LossScale reached;
  for (const char step : steps) {
    const LossScale scale = scaling.before(reached);
    all.push_back(scale.value);
    reached = scaling.after(scale, step == 'x');
  }
  all.push_back(scaling.before(reached).value);
  return all;
}

using Scales = std::vector<double>;

// As Megatron Core's DynamicGradScaler: only doubling gives the patience back.
TEST(LossScaling, FallsAfterAsManyOverflowsAsHysteresisSays) {
  const LossScaling two{.enabled = true, .initial = 64, .window = 100, .hysteresis = 2};
  EXPECT_EQ(scales(two, "x"), (Scales{64, 64}));
  EXPECT_EQ(scales(two, "x.x"), (Scales{64, 64, 64, 32}));
  EXPECT_EQ(scales(two, "xx.x"), (Scales{64, 64, 32, 32, 16}));
  const LossScaling one{.enabled = true, .initial = 64, .window = 100, .hysteresis = 1};
  EXPECT_EQ(scales(one, "x.x"), (Scales{64, 32, 32, 16}));
}

TEST(LossScaling, RisesAfterACleanWindow) {
  const LossScaling scaling{.enabled = true, .initial = 64, .window = 3, .hysteresis = 2};
  EXPECT_EQ(scales(scaling, "......"), (Scales{64, 64, 64, 128, 128, 128, 256}));
  EXPECT_EQ(scales(scaling, "..x..."), (Scales{64, 64, 64, 64, 64, 64, 128}));
  // The two overflows after a doubling: the first is let pass again.
  EXPECT_EQ(scales(scaling, "xx...xx"), (Scales{64, 64, 32, 32, 32, 64, 64, 32}));
}

TEST(LossScaling, StaysAboveTheLeast) {
  const LossScaling scaling{.enabled = true, .initial = 8, .least = 3, .hysteresis = 1};
  EXPECT_EQ(scales(scaling, "xxx"), (Scales{8, 4, 3, 3}));
  EXPECT_TRUE(scaling.can_fall({.value = 4}));
  EXPECT_FALSE(scaling.can_fall({.value = 3}));
}

TEST(LossScaling, AConstantOneDoesNotChange) {
  const LossScaling scaling{.enabled = true, .constant = 128, .window = 1, .hysteresis = 1};
  EXPECT_EQ(scales(scaling, "x.x."), (Scales{128, 128, 128, 128, 128}));
  EXPECT_FALSE(scaling.can_fall({.value = 128}));
}

TEST(LossScaling, IsSaidAsAPowerOfTwo) {
  EXPECT_EQ(loss_scale_text(4294967296.0), "2^32");
  EXPECT_EQ(loss_scale_text(1024), "2^10");
  EXPECT_EQ(loss_scale_text(512), "512");
  EXPECT_EQ(loss_scale_text(1), "1");
  EXPECT_EQ(loss_scale_text(1000.5), "1000.5");
}

TEST(LossScaling, BelongsToHalfPrecision) {
  Options options;
  EXPECT_FALSE(loss_scaling_of(options).enabled);
  options.loss_scale = 16;
  const auto refusal = [&] {
    return testing::message_of(ExitStatus::bad_request, [&] { loss_scaling_of(options); });
  };
  testing::expect_phrase(refusal(), "--loss-scale: it belongs to --fp16");
  options.compute_dtype = DType::f16;
  EXPECT_TRUE(loss_scaling_of(options).enabled);
  options.loss_scale.reset();
  options.initial_loss_scale = 4;
  options.min_loss_scale = 8;
  testing::expect_phrase(refusal(), "above --initial-loss-scale 4");
}

}  // namespace
}  // namespace troupe
