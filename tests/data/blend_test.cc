// Weights of a mixture, added up as numpy does.
#include "data/blend.h"

#include <gtest/gtest.h>
#include <vector>

namespace troupe {
namespace {

// numpy.sum(1 / numpy.arange(3, 203)). Added up in order, in eight lanes from end to end, or cut
// elsewhere than at half, the last bits are others.
constexpr double kNumpysSum = 0x1.18d447c879105p+2;

TEST(NormalizeWeights, MoreThan128AreAddedUpInHalves) {
  std::vector<double> weights;
  for (int i = 0; i < 200; ++i) weights.push_back(1.0 / (i + 3));
  const std::vector<double> normalized = normalize_weights(weights);
  for (size_t i = 0; i < weights.size(); ++i) {
    EXPECT_EQ(normalized[i], weights[i] / kNumpysSum) << "weight " << i;
  }
}

}  // namespace
}  // namespace troupe
