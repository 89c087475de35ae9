// sinkhorn_topk against a naive loop over the formulas, and what it is for: balance.
#include "ops/routing/sinkhorn/sinkhorn.h"

#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <numeric>
#include <set>
#include <vector>

#include "base/random.h"
#include "support/sample_run.h"

namespace troupe::testing {
namespace {

std::vector<double> run_sinkhorn(const std::vector<double>& logits, int64_t experts, int32_t top_k,
                                 DType dtype = DType::f64, int threads = 1) {
  const OpSample sample{
      "", [&](SampleBuilder& builder) {
        const auto tokens = static_cast<int64_t>(logits.size()) / experts;
        const ValueId z = builder.values("logits", {tokens, experts}, logits, {});
        builder.result(sinkhorn_topk(builder.builder(), z, {.top_k = top_k}, "indices"));
      }};
  SampleRun run(sample, {.dtype = dtype, .threads = threads, .backward = false});
  run.run();
  return run.results()[0];
}

// The k largest of each row, lower index first among equals.
std::vector<double> largest_of_rows(const std::vector<double>& scores, size_t experts,
                                    size_t top_k) {
  std::vector<double> indices;
  for (size_t row = 0; row < scores.size(); row += experts) {
    std::vector<size_t> order(experts);
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return scores[row + a] > scores[row + b]; });
    for (size_t slot = 0; slot < top_k; ++slot) {
      indices.push_back(static_cast<double>(order[slot]));
    }
  }
  return indices;
}

// The formulas as they stand, without any scaling. Sets `rounds` to how many it took.
std::vector<double> naive_sinkhorn(const std::vector<double>& logits, size_t experts, size_t top_k,
                                   int* rounds = nullptr) {
  const size_t tokens = logits.size() / experts;
  std::vector<double> c(logits.size());
  for (size_t i = 0; i < c.size(); ++i) c[i] = std::exp(logits[i]);
  std::vector<double> d0(tokens, 1);
  std::vector<double> d1(experts, 1);
  double change = 1;
  int count = 0;
  while (change > 1e-4) {
    for (size_t t = 0; t < tokens; ++t) {
      double total = 0;
      for (size_t e = 0; e < experts; ++e) total += c[t * experts + e] * d1[e];
      d0[t] = 1 / (static_cast<double>(tokens) * (total + 1e-8));
    }
    change = 0;
    for (size_t e = 0; e < experts; ++e) {
      double total = 0;
      for (size_t t = 0; t < tokens; ++t) total += c[t * experts + e] * d0[t];
      const double next = 1 / (static_cast<double>(experts) * (total + 1e-8));
      change += std::abs(next - d1[e]) / static_cast<double>(experts);
      d1[e] = next;
    }
    ++count;
  }
  if (rounds != nullptr) *rounds = count;
  for (size_t i = 0; i < c.size(); ++i) c[i] *= d0[i / experts] * d1[i % experts];
  return largest_of_rows(c, experts, top_k);
}

std::vector<double> random_logits(size_t tokens, size_t experts, double deviation, double skew) {
  std::vector<double> logits;
  for (size_t i = 0; i < tokens * experts; ++i) {
    logits.push_back(deviation * random_normal(3, RandomStream::test, 0, i) +
                     skew * random_normal(3, RandomStream::test, 1, i % experts));
  }
  return logits;
}

double largest_load(const std::vector<double>& indices, size_t experts) {
  std::vector<double> load(experts, 0);
  for (const double index : indices) ++load[static_cast<size_t>(index)];
  const double mean = static_cast<double>(indices.size()) / static_cast<double>(experts);
  return *std::max_element(load.begin(), load.end()) / mean;
}

TEST(Sinkhorn, AgreesWithANaiveLoop) {
  struct Case {
    size_t tokens;
    size_t experts;
    size_t top_k;
    double deviation;
    double skew;
  };
  for (const Case& c : {Case{64, 8, 2, 1, 1}, Case{700, 40, 3, 2, 0.5}, Case{50, 17, 1, 4, 0},
                        Case{9, 5, 5, 1, 1}, Case{1, 6, 2, 1, 0}, Case{17, 1024, 3, 1, 0}}) {
    const auto logits = random_logits(c.tokens, c.experts, c.deviation, c.skew);
    const auto experts = static_cast<int64_t>(c.experts);
    EXPECT_EQ(run_sinkhorn(logits, experts, static_cast<int32_t>(c.top_k)),
              naive_sinkhorn(logits, c.experts, c.top_k))
        << c.tokens << " tokens, " << c.experts << " experts";
  }
}

// Logits so far apart take some thirty rounds; of 8,000 tokens a few have entries so near to each
// other that ten rounds more would put them into another order.
TEST(Sinkhorn, EndsWithTheRoundInWhichTheMeanChangeIsSmall) {
  const auto logits = random_logits(8000, 32, 8, 1);
  EXPECT_EQ(run_sinkhorn(logits, 32, 16, DType::f64, 2), naive_sinkhorn(logits, 32, 16));
}

// Beside tokens whose entries are about as large as the formulas' 1e-8 others count more.
TEST(Sinkhorn, SmallLogitsCountLess) {
  auto logits = random_logits(2000, 16, 1, 1);
  const auto as_large = naive_sinkhorn(logits, 16, 2);
  for (size_t row = 0; row < 2000; row += 2) {
    for (size_t e = 0; e < 16; ++e) logits[row * 16 + e] -= 21 + (e < 8 ? 1.0 : 0.0);
  }
  const auto expected = naive_sinkhorn(logits, 16, 2);
  ASSERT_NE(expected, as_large);
  EXPECT_EQ(run_sinkhorn(logits, 16, 2), expected);
}

TEST(Sinkhorn, OrdinaryLogitsAreFarFromTheBound) {
  for (const double deviation : {0.1, 1.0, 4.0, 8.0}) {
    int rounds = 0;
    naive_sinkhorn(random_logits(400, 32, deviation, 0), 32, 2, &rounds);
    EXPECT_LT(rounds, kSinkhornRounds / 10) << deviation;
  }
}

TEST(Sinkhorn, BalancesBetterThanPlainTopk) {
  constexpr size_t kTokens = 1000;
  constexpr size_t kExperts = 16;
  const auto logits = random_logits(kTokens, kExperts, 1, 1.5);
  for (const size_t top_k : {size_t{1}, size_t{2}, size_t{4}}) {
    const double plain = largest_load(largest_of_rows(logits, kExperts, top_k), kExperts);
    const double balanced =
        largest_load(run_sinkhorn(logits, kExperts, static_cast<int32_t>(top_k)), kExperts);
    // What is equal are the experts' shares of the plan, not the numbers of tokens whose largest
    // entries they hold; so some imbalance is left.
    EXPECT_GT(plain, 2.5) << "the logits are not skewed";
    EXPECT_LT(balanced, 1.5);
  }
}

TEST(Sinkhorn, AConstantAddedToARowChangesNothing) {
  auto logits = random_logits(60, 9, 1, 1);
  const auto expected = run_sinkhorn(logits, 9, 2);
  // The additions round to 1e-13, far below the distance of any two scores of a token. exp(1024)
  // would overflow.
  for (size_t i = 0; i < logits.size(); ++i) logits[i] += 512.0 * static_cast<double>(i / 9 % 3);
  EXPECT_EQ(run_sinkhorn(logits, 9, 2), expected);
}

void expect_distinct_experts(const std::vector<double>& indices, size_t experts, size_t top_k) {
  for (size_t row = 0; row < indices.size(); row += top_k) {
    std::set<double> seen;
    for (size_t slot = 0; slot < top_k; ++slot) {
      const double index = indices[row + slot];
      EXPECT_TRUE(index >= 0 && index < static_cast<double>(experts)) << index;
      seen.insert(index);
    }
    EXPECT_EQ(seen.size(), top_k) << "row " << row / top_k;
  }
}

TEST(Sinkhorn, ExtremeLogitsEnd) {
  // Logits in the thousands, of both signs; an expert that no token prefers; rows of one value.
  auto logits = random_logits(40, 6, 1, 1);
  for (size_t t = 0; t < 40; ++t) {
    logits[t * 6 + 5] = -200;
    for (size_t e = 0; e < 6 && t % 4 == 1; ++e) logits[t * 6 + e] += 5000;
    for (size_t e = 0; e < 6 && t % 4 == 2; ++e) logits[t * 6 + e] -= 5000;
    for (size_t e = 0; e < 6 && t % 4 == 3; ++e) logits[t * 6 + e] *= 1000;
  }
  for (const DType dtype : {DType::f32, DType::f64}) {
    expect_distinct_experts(run_sinkhorn(logits, 6, 2, dtype), 6, 2);
  }
}

TEST(Sinkhorn, IndicesAreDistinctExpertsEvenWithoutNumbers) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  // A token without numbers, one with an infinite logit, one with a NaN, and ordinary ones: the
  // ordinary ones are balanced among themselves.
  const std::vector<double> logits{nan,       nan, nan, nan,        //
                                   1,         nan, 0.5, -infinity,  //
                                   -infinity, 1,   2,   infinity,   //
                                   0,         1,   2,   3,          //
                                   0,         1.5, 2,   3};
  const auto indices = run_sinkhorn(logits, 4, 3);
  expect_distinct_experts(indices, 4, 3);
  EXPECT_EQ(std::vector<double>(indices.begin(), indices.begin() + 3),
            (std::vector<double>{0, 1, 2}));
  EXPECT_EQ(std::vector<double>(indices.begin() + 3, indices.begin() + 6),
            (std::vector<double>{0, 2, 1}));
  EXPECT_EQ(indices[6], 3);
}

TEST(Sinkhorn, ThreadsChangeNothing) {
  const auto logits = random_logits(3000, 24, 2, 1);
  EXPECT_EQ(run_sinkhorn(logits, 24, 2, DType::f32, 1), run_sinkhorn(logits, 24, 2, DType::f32, 3));
}

}  // namespace
}  // namespace troupe::testing
