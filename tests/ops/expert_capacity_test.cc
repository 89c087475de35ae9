// Expert capacity against naive selections, the capacity of a batch, and the room of ranks'
// experts.
#include "ops/routing/expert_capacity/expert_capacity.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <limits>
#include <utility>
#include <vector>

#include "ops/experts/expert_rows/expert_rows.h"
#include "ops/value_test_support.h"
#include "support/sample_run.h"

namespace troupe::testing {
namespace {

constexpr int64_t kCapacityTopK = 3;
constexpr int32_t kCapacityExperts = 9;
constexpr int32_t kSlots = 60000;  // several chunks

// Few distinct probabilities, so that there are many ties; expert 4 is never chosen, expert 8 has
// one slot.
std::vector<int32_t> some_indices() {
  std::vector<int32_t> indices;
  for (int32_t slot = 0; slot < kSlots; ++slot) {
    const int32_t expert = slot * 13 % 101 % (kCapacityExperts - 1) - (slot % 17 == 0 ? 8 : 0);
    indices.push_back(expert < 0 || expert == 4 ? -1 : expert);
  }
  indices[777] = kCapacityExperts - 1;
  return indices;
}

std::vector<double> some_probabilities() {
  std::vector<double> probabilities;
  for (int32_t slot = 0; slot < kSlots; ++slot) probabilities.push_back(slot * 31 % 53 / 64.0);
  return probabilities;
}

std::vector<double> run_capacity(const std::vector<int32_t>& indices,
                                 const std::vector<double>& probabilities,
                                 const ExpertCapacityAttributes& attributes, int64_t top_k) {
  const OpSample sample{
      "", [&](SampleBuilder& builder) {
        const Shape shape{static_cast<int64_t>(indices.size()) / top_k, top_k};
        const ValueId p =
            builder.values("probabilities", shape, probabilities, SampleBuilder::Options());
        const ValueId chosen = builder.integers("indices", shape, indices);
        builder.result(limit_to_capacity(builder.builder(), p, chosen, attributes, "kept"));
      }};
  SampleRun run(sample, {.threads = 3, .backward = false});
  run.run();
  return run.results()[0];
}

// The place of a token in its sequence, and then the sequence, as one number.
double place_in_sequence(int64_t token, const ExpertCapacityAttributes& attributes) {
  if (attributes.sequence_tokens == 0) return 0;
  const int64_t number = attributes.first_token + token;
  return static_cast<double>(number % attributes.sequence_tokens) * 1e6 +
         static_cast<double>(number / attributes.sequence_tokens);
}

// For each expert: sorts its slots as the policy orders them and drops all but the first C.
std::vector<double> naive_capacity(const std::vector<int32_t>& indices,
                                   const std::vector<double>& probabilities,
                                   const ExpertCapacityAttributes& attributes,
                                   int64_t top_k = kCapacityTopK) {
  std::vector<double> kept(indices.begin(), indices.end());
  for (int32_t expert = 0; expert < attributes.experts; ++expert) {
    std::vector<std::pair<double, size_t>> slots;
    for (size_t slot = 0; slot < indices.size(); ++slot) {
      if (indices[slot] != expert) continue;
      const bool compares = attributes.policy == DropPolicy::probs;
      const auto token = static_cast<int64_t>(slot) / top_k;
      slots.emplace_back(compares ? -probabilities[slot] : place_in_sequence(token, attributes),
                         slot);
    }
    std::sort(slots.begin(), slots.end());
    for (size_t i = static_cast<size_t>(attributes.capacity); i < slots.size(); ++i) {
      kept[slots[i].second] = -1;
    }
  }
  return kept;
}

TEST(ExpertCapacity, AgreesWithANaiveSelection) {
  const auto indices = some_indices();
  const auto probabilities = some_probabilities();
  for (const DropPolicy policy : {DropPolicy::probs, DropPolicy::position}) {
    for (const int64_t capacity : {1, 2500, 7000, kSlots}) {
      const ExpertCapacityAttributes attributes{
          .experts = kCapacityExperts, .capacity = capacity, .policy = policy};
      EXPECT_EQ(run_capacity(indices, probabilities, attributes, kCapacityTopK),
                naive_capacity(indices, probabilities, attributes))
          << name_of(policy) << " " << capacity;
    }
  }
}

// Megatron's tokens are ordered by place, then sequence: no sequence starves another.
TEST(ExpertCapacity, PositionsAreThoseInTheSequences) {
  const ExpertCapacityAttributes attributes{
      .experts = 1, .capacity = 4, .policy = DropPolicy::position, .sequence_tokens = 3};
  EXPECT_EQ(run_capacity({0, 0, 0, 0, 0, 0}, std::vector<double>(6), attributes, 1),
            (std::vector<double>{0, 0, -1, 0, 0, -1}));
  const auto indices = some_indices();
  const auto probabilities = some_probabilities();
  for (const int64_t sequence_tokens : {1, 7, 512, 19999, 20000}) {
    for (const int64_t first_token : {0, 5}) {
      const ExpertCapacityAttributes each{.experts = kCapacityExperts,
                                          .capacity = 2500,
                                          .policy = DropPolicy::position,
                                          .sequence_tokens = sequence_tokens,
                                          .first_token = first_token};
      EXPECT_EQ(run_capacity(indices, probabilities, each, kCapacityTopK),
                naive_capacity(indices, probabilities, each))
          << sequence_tokens << " " << first_token;
    }
  }
}

TEST(ExpertCapacity, DropsProbabilitiesThatAreNotNumbersFirst) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<double> expected = {-1, 0, -1, 0, -1};
  EXPECT_EQ(
      run_capacity({0, 0, 0, 0, 0}, {nan, 0.0, nan, 0.5, nan}, {.experts = 1, .capacity = 2}, 1),
      expected);
}

TEST(ExpertCapacity, IsTheShareTimesTheFactorRoundedUp) {
  EXPECT_EQ(expert_capacity(4096, 2, 8, 1.0), 1024);
  EXPECT_EQ(expert_capacity(4096, 2, 8, 1.25), 1280);
  EXPECT_EQ(expert_capacity(10, 2, 8, 1.0), 3);  // 2.5
  EXPECT_EQ(expert_capacity(1, 1, 64, 1.0), 1);
}

// A part may be full; one row more, in any part, and nothing is sent.
TEST(LimitExpertRows, FullPartsHaveRoom) {
  const std::vector<int32_t> indices = {0, 3, 2, -1, 3, 1};
  const auto limited_by = [&](int64_t rows) {
    return run_sample([&](SampleBuilder& sample) {
      const ValueId chosen = sample.integers("indices", {3, 2}, indices);
      const ValueId loads = sample.integers("loads", {4}, {3, 1, 2, 5});
      const LimitedRows limited =
          limit_expert_rows(sample.builder(), chosen, loads, {.parts = 2, .rows = rows}, "kept");
      sample.result_without_gradient(limited.kept);
      sample.result_without_gradient(limited.over);
      sample.result_without_gradient(limited.fullest);
    });
  };
  for (const int64_t rows : {7, 8}) {
    const auto full = limited_by(rows);
    EXPECT_EQ(full[0], std::vector<double>(indices.begin(), indices.end())) << rows;
    EXPECT_EQ(full[1], (std::vector<double>{0})) << rows;
    EXPECT_EQ(full[2], (std::vector<double>{7})) << rows;
  }
  const auto over = limited_by(6);
  EXPECT_EQ(over[0], std::vector<double>(6, -1));
  EXPECT_EQ(over[1], (std::vector<double>{1}));
  EXPECT_EQ(over[2], (std::vector<double>{7}));
}

}  // namespace
}  // namespace troupe::testing
