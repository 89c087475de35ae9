// Sparse attention, its indexer and the indexer's loss against plain computations: scores of all
// pairs in full matrices, a sort for the choice, dense attention under a mask.
#include "ops/attention/sparse_attention/sparse_attention.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <gtest/gtest.h>
#include <string>
#include <vector>

#include "ops/attention/attention_target/attention_target.h"
#include "ops/attention/index_topk/index_topk.h"
#include "ops/losses/index_loss/index_loss.h"
#include "support/sample_run.h"

namespace troupe::testing {
namespace {

constexpr int kSequence = 13;
constexpr int kIndexHeads = 3;
constexpr int kIndexDim = 5;
constexpr int kHeads = 2;
constexpr int kKeyDim = 6;
constexpr int kValueDim = 4;
constexpr double kScale = 0.35;

using Matrix = std::vector<std::vector<double>>;

// What a sample's operations compute, with the numbers that it has drawn.
struct Outcome {
  std::vector<SampleBuilder::InputData> inputs;
  std::vector<std::vector<double>> results;
};
Outcome outcome_of(const std::function<void(SampleBuilder&)>& build) {
  SampleRun run({"", build}, {.dtype = DType::f64});
  run.run();
  return {run.inputs(), run.results()};
}

// I[t][s] of one sequence, -infinity where s is after t.
Matrix index_scores(const std::vector<double>& q, const std::vector<double>& k,
                    const std::vector<double>& w) {
  Matrix scores(kSequence, std::vector<double>(kSequence, -INFINITY));
  for (int t = 0; t < kSequence; ++t) {
    for (int s = 0; s <= t; ++s) {
      double sum = 0;
      for (int head = 0; head < kIndexHeads; ++head) {
        double product = 0;
        for (int e = 0; e < kIndexDim; ++e) {
          product += q[(t * kIndexHeads + head) * kIndexDim + e] * k[s * kIndexDim + e];
        }
        sum += w[t * kIndexHeads + head] * std::max(product, 0.0);
      }
      scores[t][s] = sum / std::sqrt(kIndexHeads * kIndexDim);
    }
  }
  return scores;
}

// The positions of the `most` largest of the first t + 1 scores, in ascending order.
std::vector<int> largest_of(const std::vector<double>& scores, int t, int most) {
  std::vector<int> order;
  for (int s = 0; s <= t; ++s) order.push_back(s);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return scores[a] > scores[b]; });
  if (static_cast<int>(order.size()) > most) order.resize(most);
  std::sort(order.begin(), order.end());
  return order;
}

IndexInputs index_inputs(SampleBuilder& sample) {
  return {.queries = sample.tensor("q", {kSequence, kIndexHeads * kIndexDim}),
          .keys = sample.tensor("k", {kSequence, kIndexDim}),
          .weights = sample.tensor("w", {kSequence, kIndexHeads}, {.accumulation = true})};
}
constexpr IndexAttributes kIndex{
    .sequence = kSequence, .heads = kIndexHeads, .head_dim = kIndexDim};
constexpr SparseAttentionAttributes kAttention{.sequence = kSequence,
                                               .heads = kHeads,
                                               .key_dim = kKeyDim,
                                               .value_dim = kValueDim,
                                               .scale = kScale};

TEST(SparseAttention, ChoosesTheLargestScores) {
  for (const int most : {1, 4, kSequence}) {
    const Outcome outcome = outcome_of([&](SampleBuilder& sample) {
      sample.result_without_gradient(index_topk(sample.builder(), index_inputs(sample),
                                                {.index = kIndex, .top_k = most}, "chosen"));
    });
    const auto& in = outcome.inputs;
    const Matrix scores = index_scores(in[0].data, in[1].data, in[2].data);
    for (int t = 0; t < kSequence; ++t) {
      const std::vector<int> expected = largest_of(scores[t], t, most);
      for (int i = 0; i < most; ++i) {
        const int wanted = i < static_cast<int>(expected.size()) ? expected[i] : -1;
        EXPECT_EQ(outcome.results[0][t * most + i], wanted) << "query " << t << " of " << most;
      }
    }
  }
}

// A query sees its document only, also where that has fewer keys than may be chosen.
TEST(SparseAttention, ChoosesKeysOfItsDocument) {
  constexpr int kMostChosen = 4;
  constexpr int kSecond = 7;  // where the second document begins
  const Outcome outcome = outcome_of([&](SampleBuilder& sample) {
    std::vector<int32_t> starts(kSequence, kSecond);
    std::fill(starts.begin(), starts.begin() + kSecond, 0);
    IndexInputs inputs = index_inputs(sample);
    inputs.starts = sample.integers("starts", {kSequence}, starts);
    sample.result_without_gradient(
        index_topk(sample.builder(), inputs, {.index = kIndex, .top_k = kMostChosen}, "chosen"));
  });
  const auto& in = outcome.inputs;
  Matrix scores = index_scores(in[0].data, in[1].data, in[2].data);
  for (int t = 0; t < kSequence; ++t) {
    const int first = t < kSecond ? 0 : kSecond;
    scores[t].erase(scores[t].begin(), scores[t].begin() + first);
    const std::vector<int> expected = largest_of(scores[t], t - first, kMostChosen);
    for (int i = 0; i < kMostChosen; ++i) {
      const int wanted = i < static_cast<int>(expected.size()) ? first + expected[i] : -1;
      EXPECT_EQ(outcome.results[0][t * kMostChosen + i], wanted) << "query " << t;
    }
  }
}

// Which of the keys of a query the strided choice of these tests has: every other one.
bool is_chosen(int t, int s) {
  return s <= t && (t - s) % 2 == 0;
}
constexpr int kMost = (kSequence + 1) / 2;
ValueId every_other_key(SampleBuilder& sample) {
  std::vector<int32_t> chosen;
  for (int t = 0; t < kSequence; ++t) {
    for (int s = 0; s < kSequence; ++s) {
      if (is_chosen(t, s)) chosen.push_back(s);
    }
    chosen.resize((t + 1) * kMost, -1);
  }
  return sample.integers("chosen", {kSequence, kMost}, chosen);
}

// p[t][s] of a head, over the keys for which `sees` holds.
template <class Sees>
Matrix probabilities(const std::vector<double>& q, const std::vector<double>& k, int head,
                     const Sees& sees) {
  Matrix p(kSequence, std::vector<double>(kSequence, 0));
  for (int t = 0; t < kSequence; ++t) {
    double total = 0;
    for (int s = 0; s < kSequence; ++s) {
      if (!sees(t, s)) continue;
      double product = 0;
      for (int e = 0; e < kKeyDim; ++e) {
        product += q[(t * kHeads + head) * kKeyDim + e] * k[s * kKeyDim + e];
      }
      p[t][s] = std::exp(kScale * product);
      total += p[t][s];
    }
    for (double& each : p[t]) each /= total;
  }
  return p;
}

TEST(SparseAttention, IsDenseAttentionUnderAMask) {
  const Outcome outcome = outcome_of([&](SampleBuilder& sample) {
    const ValueId q = sample.tensor("q", {kSequence, kHeads * kKeyDim});
    const ValueId k = sample.tensor("k", {kSequence, kKeyDim});
    sample.result(
        sparse_attention(sample.builder(), q, k, every_other_key(sample), kAttention, "out"));
  });
  const auto& q = outcome.inputs[0].data;
  const auto& k = outcome.inputs[1].data;
  for (int head = 0; head < kHeads; ++head) {
    const Matrix p = probabilities(q, k, head, is_chosen);
    for (int t = 0; t < kSequence; ++t) {
      for (int e = 0; e < kValueDim; ++e) {
        double expected = 0;
        for (int s = 0; s < kSequence; ++s) expected += p[t][s] * k[s * kKeyDim + e];
        EXPECT_NEAR(outcome.results[0][(t * kHeads + head) * kValueDim + e], expected, 1e-12);
      }
    }
  }
}

// The target is the sum of the heads' probabilities, and the loss the mean divergence of the
// indexer's from it: over all keys, and over the chosen ones.
TEST(SparseAttention, LossIsTheDivergenceFromAttention) {
  for (const bool all : {true, false}) {
    const auto sees = [=](int t, int s) { return all ? s <= t : is_chosen(t, s); };
    const Outcome outcome = outcome_of([&](SampleBuilder& sample) {
      const IndexInputs index = index_inputs(sample);
      const ValueId q = sample.tensor("main_q", {kSequence, kHeads * kKeyDim});
      const ValueId k = sample.tensor("main_k", {kSequence, kKeyDim});
      const ValueId chosen = all ? ValueId() : every_other_key(sample);
      const ValueId target =
          attention_target(sample.builder(), q, k, chosen, {}, kAttention, "target");
      sample.result_without_gradient(target);
      sample.result(index_loss(sample.builder(), index, target, chosen,
                               {.index = kIndex, .coefficient = 2.5}, "loss"));
    });
    const auto& in = outcome.inputs;
    const Matrix scores = index_scores(in[0].data, in[1].data, in[2].data);
    Matrix target(kSequence, std::vector<double>(kSequence, 0));
    for (int head = 0; head < kHeads; ++head) {
      const Matrix p = probabilities(in[3].data, in[4].data, head, sees);
      for (int t = 0; t < kSequence; ++t) {
        for (int s = 0; s < kSequence; ++s) target[t][s] += p[t][s];
      }
    }
    double loss = 0;
    for (int t = 0; t < kSequence; ++t) {
      double total = 0;
      for (int s = 0; s < kSequence; ++s) total += sees(t, s) ? std::exp(scores[t][s]) : 0;
      int column = 0;
      for (int s = 0; s < kSequence; ++s) {
        if (!sees(t, s)) continue;
        const int columns = all ? kSequence : kMost;
        const int at = all ? s : column++;
        EXPECT_NEAR(outcome.results[0][t * columns + at], target[t][s], 1e-12);
        const double wanted = target[t][s] / kHeads;
        loss += wanted * (std::log(wanted) - (scores[t][s] - std::log(total)));
      }
    }
    EXPECT_NEAR(outcome.results[1][0], 2.5 * loss / kSequence, 1e-12);
  }
}

// All ranks' keys together are the sequences, each once.
TEST(SparseAttention, KeysOfRanksAreWhereTheirPositionsAre) {
  constexpr int kRanks = 4;
  constexpr int kBatch = 3;
  constexpr int kRows = 6;
  std::vector<int> seen(kRanks * kBatch * kRows, 0);
  for (int rank = 0; rank < kRanks; ++rank) {
    const KeyRows rows{.batch = kBatch, .rows = kRows, .ranks = kRanks, .rank = rank};
    EXPECT_EQ(rows.sequence(), kRanks * kRows);
    for (int64_t query = 0; query < rows.queries(); ++query) {
      const int64_t key = rows.key(query / kRows, rows.position(query));
      EXPECT_EQ(key, rank * rows.queries() + query) << "a rank's own rows";
      EXPECT_EQ(rows.key_position(key), rows.position(query));
      EXPECT_EQ(rows.key_sequence(key), query / kRows);
      ++seen[static_cast<size_t>(key)];
    }
  }
  EXPECT_EQ(seen, std::vector<int>(seen.size(), 1));
}

}  // namespace
}  // namespace troupe::testing
