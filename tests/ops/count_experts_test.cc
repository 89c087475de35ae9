// Counts of experts against a naive count.
#include "ops/routing/count_experts/count_experts.h"

#include <gtest/gtest.h>
#include <vector>

#include "support/sample_run.h"

namespace troupe::testing {
namespace {

constexpr int64_t kTokens = 12000;  // four sequences of several chunks
constexpr int64_t kTopK = 8;
constexpr int32_t kExperts = 23;

std::vector<int32_t> some_indices(int32_t factor) {
  std::vector<int32_t> indices;
  for (int32_t i = 0; i < kTokens * kTopK; ++i) {
    indices.push_back(i / 50 * factor % 97 % (kExperts + 2) - 1);  // -1 and E are no experts
  }
  return indices;
}

std::vector<double> naive_counts(const std::vector<int32_t>& indices, int32_t sequences) {
  std::vector<double> counts(static_cast<size_t>(sequences * kExperts), 0);
  const size_t slots = indices.size() / static_cast<size_t>(sequences);
  for (size_t slot = 0; slot < indices.size(); ++slot) {
    if (indices[slot] < 0 || indices[slot] >= kExperts) continue;
    counts[slot / slots * kExperts + static_cast<size_t>(indices[slot])] += 1;
  }
  return counts;
}

TEST(CountExperts, AgreesWithANaiveCount) {
  const auto first = some_indices(7);
  const auto second = some_indices(11);
  for (const int32_t sequences : {1, 4}) {
    const CountExpertsAttributes attributes{.experts = kExperts, .sequences = sequences};
    const OpSample sample{
        "", [&](SampleBuilder& builder) {
          const ValueId a = builder.integers("first", {kTokens, kTopK}, first);
          const ValueId b = builder.integers("second", {kTokens, kTopK}, second);
          const ValueId counts = count_experts(builder.builder(), a, {}, attributes, "counts");
          builder.result(counts);
          builder.result(count_experts(builder.builder(), b, counts, attributes, "sums"));
        }};
    SampleRun run(sample, {.threads = 3, .backward = false});
    run.run();
    std::vector<double> expected = naive_counts(first, sequences);
    EXPECT_EQ(run.results()[0], expected) << sequences << " sequences";
    const auto more = naive_counts(second, sequences);
    for (size_t i = 0; i < expected.size(); ++i) expected[i] += more[i];
    EXPECT_EQ(run.results()[1], expected) << sequences << " sequences, running sum";
  }
}

TEST(CountExperts, LeavesPaddingOut) {
  const auto indices = some_indices(7);
  auto kept = indices;
  std::vector<int32_t> mask;
  for (size_t token = 0; token < kTokens; ++token) {
    mask.push_back(token * token % 7 < 3 ? 0 : 1);
    if (mask.back() != 0) continue;
    for (size_t slot = token * kTopK; slot < (token + 1) * kTopK; ++slot) kept[slot] = -1;
  }
  for (const int32_t sequences : {1, 4}) {
    const CountExpertsAttributes attributes{.experts = kExperts, .sequences = sequences};
    const OpSample sample{
        "", [&](SampleBuilder& builder) {
          const ValueId chosen = builder.integers("indices", {kTokens, kTopK}, indices);
          const ValueId valid = builder.integers("valid", {kTokens}, mask);
          builder.result(count_experts(builder.builder(), chosen, {}, attributes, "counts", valid));
        }};
    SampleRun run(sample, {.threads = 3, .backward = false});
    run.run();
    EXPECT_EQ(run.results()[0], naive_counts(kept, sequences)) << sequences << " sequences";
  }
}

TEST(CountExperts, HasOneDimensionForOneSequence) {
  EXPECT_EQ(expert_counts_shape(1, 5), Shape({5}));
  EXPECT_EQ(expert_counts_shape(3, 5), Shape({3, 5}));
}

}  // namespace
}  // namespace troupe::testing
