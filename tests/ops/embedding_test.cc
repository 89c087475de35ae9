// The gradient of the embedding table against the plain sum over tokens, with a padding token,
// which gets none: stored, and added to what is there; also of rows that are summed in several
// parts.
#include "ops/products/embedding/embedding.h"

#include <gtest/gtest.h>

#include "ops/value_test_support.h"
#include "program/op_sample.h"

namespace troupe::testing {
namespace {

void check_padding(int64_t hidden) {
  constexpr int32_t kVocabulary = 6;
  const std::vector<int32_t> ids = {2, 4, 2, 0, 4, 4, 5, 2};
  const auto count = static_cast<int64_t>(ids.size());
  const std::vector<double> dy = normal_numbers(count * hidden, 0);
  for (const int32_t padding : {-1, 0, 2, 3, 5}) {
    for (const int uses : {1, 2}) {
      const auto results = run_sample([&](SampleBuilder& sample) {
        Builder& builder = sample.builder();
        const ValueId tokens = sample.integers("tokens", {count}, ids);
        const ValueId d_out = sample.values("dy", {count, hidden}, dy, {.differentiable = false});
        const ValueId gradient = builder.metric("d_weight", DType::f64, {kVocabulary, hidden});
        for (int use = 0; use < uses; ++use) {
          const EmbeddingWeightGradientAttributes attributes{
              .vocabulary = kVocabulary, .padding_token = padding, .accumulate = use > 0};
          builder.emit(kEmbeddingWeightGradient, Attributes(attributes), {d_out, tokens, gradient},
                       "d_weight");
        }
        sample.result_without_gradient(gradient);
      });
      const auto columns = static_cast<size_t>(hidden);
      std::vector<double> expected(kVocabulary * columns, 0.0);
      for (size_t t = 0; t < ids.size(); ++t) {
        if (ids[t] == padding) continue;
        for (size_t i = 0; i < columns; ++i) {
          expected[static_cast<size_t>(ids[t]) * columns + i] += uses * dy[t * columns + i];
        }
      }
      for (size_t i = 0; i < expected.size(); ++i) {
        // Sums of at most six numbers of the order of 1, in f64.
        EXPECT_NEAR(results[0][i], expected[i], 1e-14) << "padding " << padding << " at " << i;
      }
    }
  }
}

TEST(Embedding, ThePaddingTokenGetsNoGradient) {
  check_padding(5);
}

TEST(Embedding, WideRowsAreSummedWhole) {
  check_padding(2500);
}

}  // namespace
}  // namespace troupe::testing
