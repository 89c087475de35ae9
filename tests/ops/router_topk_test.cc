// The results of router_topk against a naive computation in double, and its rules for ties, NaN and
// given experts.
#include "ops/routing/router_topk/router_topk.h"

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

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Inputs {
  int64_t experts = 0;
  std::vector<double> logits = {};
  std::vector<double> bias = {};
  std::vector<int32_t> selected = {};
};

struct Selection {
  std::vector<double> probabilities;
  std::vector<double> indices;
  std::vector<double> d_logits;
  std::vector<double> d_probabilities;  // the cotangent that was used
};

struct Run {
  DType dtype = DType::f64;
  bool backward = false;
};

// What SampleRun sends back into its first result.
double cotangent(size_t element) {
  return random_normal(2, RandomStream::test, 0, element);
}

Selection run_router_topk(const Inputs& inputs, const RouterTopkAttributes& attributes,
                          const Run& options = {}) {
  const OpSample sample{
      "", [&](SampleBuilder& builder) {
        const auto tokens = static_cast<int64_t>(inputs.logits.size()) / inputs.experts;
        RouterTopkInputs ids;
        ids.logits = builder.values("logits", {tokens, inputs.experts}, inputs.logits, {});
        if (!inputs.bias.empty()) {
          ids.expert_bias = builder.values("bias", {inputs.experts}, inputs.bias,
                                           {.differentiable = false, .dtype = DType::f32});
        }
        if (!inputs.selected.empty()) {
          ids.selected = builder.integers("selected", {tokens, attributes.top_k}, inputs.selected);
        }
        const auto result = router_topk(builder.builder(), ids, attributes, "probabilities");
        builder.result(result.probabilities);
        builder.result_without_gradient(result.indices);
      }};
  SampleRun run(sample, {.dtype = options.dtype, .backward = options.backward});
  run.run();
  Selection selection{run.results()[0], run.results()[1], {}, {}};
  if (options.backward) {
    selection.d_logits = run.gradients()[0];
    for (size_t i = 0; i < selection.probabilities.size(); ++i) {
      selection.d_probabilities.push_back(cotangent(i));
    }
  }
  return selection;
}

// The formulas, one token at a time.
struct Naive {
  const RouterTopkAttributes& attributes;
  std::vector<double> z;
  std::vector<double> bias;

  bool softmax() const { return attributes.score_function == ScoreFunction::softmax; }

  double score(size_t i) const {
    switch (attributes.score_function) {
      case ScoreFunction::softmax: {
        double total = 0;
        for (const double value : z) total += std::exp(value);
        return std::exp(z[i]) / total;
      }
      case ScoreFunction::sigmoid:
        return 1 / (1 + std::exp(-z[i]));
      case ScoreFunction::sqrtsoftplus:
        return std::sqrt(std::log(1 + std::exp(z[i])));
    }
    return 0;
  }

  // ds_i / dz_i
  double slope(size_t i) const {
    const double s = score(i);
    const double sigma = 1 / (1 + std::exp(-z[i]));
    return attributes.score_function == ScoreFunction::sigmoid ? s * (1 - s) : sigma / (2 * s);
  }

  std::vector<int> select() const {
    std::vector<double> compared(z.size());
    for (size_t i = 0; i < z.size(); ++i) {
      compared[i] = softmax() && !attributes.pre_softmax ? z[i] : score(i);
      if (!bias.empty()) compared[i] += bias[i];
    }
    const auto descending = [](const std::vector<double>& values) {
      std::vector<int> order(values.size());
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
        return values[static_cast<size_t>(a)] > values[static_cast<size_t>(b)];
      });
      return order;
    };
    std::vector<int> order = descending(compared);
    if (attributes.num_groups > 0) {
      const size_t size = z.size() / static_cast<size_t>(attributes.num_groups);
      std::vector<double> group_scores;
      for (size_t begin = 0; begin < z.size(); begin += size) {
        std::vector<double> members(compared.begin() + static_cast<int64_t>(begin),
                                    compared.begin() + static_cast<int64_t>(begin + size));
        std::sort(members.rbegin(), members.rend());
        const int counted = attributes.group_scores > 0 ? attributes.group_scores
                                                        : attributes.top_k / attributes.group_topk;
        group_scores.push_back(std::accumulate(members.begin(), members.begin() + counted, 0.0));
      }
      const std::vector<int> groups = descending(group_scores);
      const std::set<int> kept(groups.begin(), groups.begin() + attributes.group_topk);
      std::erase_if(order, [&](int i) { return !kept.contains(i / static_cast<int>(size)); });
    }
    order.resize(static_cast<size_t>(attributes.top_k));
    return order;
  }

  std::vector<double> weights(const std::vector<int>& chosen) const {
    std::vector<double> p;
    double total = 0;
    for (const int i : chosen) {
      p.push_back(score(static_cast<size_t>(i)));
      total += p.back();
    }
    const bool normalised =
        softmax() ? !attributes.pre_softmax : attributes.normalize && chosen.size() > 1;
    for (double& value : p) {
      if (normalised) value /= total + (softmax() ? 0 : 1e-20);
      value *= attributes.scaling_factor;
    }
    return p;
  }

  // From the Jacobian of each weight, entry by entry.
  std::vector<double> gradient(const std::vector<int>& chosen, const double* d) const {
    std::vector<double> dz(z.size(), 0);
    const std::vector<double> p = weights(chosen);
    const double g = attributes.scaling_factor;
    double total = 1e-20;
    for (const int i : chosen) total += score(static_cast<size_t>(i));
    for (size_t slot = 0; slot < chosen.size(); ++slot) {
      const auto own = static_cast<size_t>(chosen[slot]);
      if (softmax()) {
        dz[own] += d[slot] * p[slot];
        for (size_t i = 0; i < z.size(); ++i) {
          const auto at = std::find(chosen.begin(), chosen.end(), static_cast<int>(i));
          double share = 0;  // d log(denominator) / dz_i
          if (attributes.pre_softmax) {
            share = score(i);
          } else if (at != chosen.end()) {
            share = p[static_cast<size_t>(at - chosen.begin())] / g;
          }
          dz[i] -= d[slot] * p[slot] * share;
        }
      } else if (chosen.size() == 1 || !attributes.normalize) {
        dz[own] += d[slot] * g * slope(own);
      } else {
        dz[own] += d[slot] * g / total * slope(own);
        for (const int j : chosen) {
          const auto other = static_cast<size_t>(j);
          dz[other] -= d[slot] * p[slot] / total * slope(other);
        }
      }
    }
    return dz;
  }
};

struct Case {
  const char* name;
  RouterTopkAttributes attributes;
  bool bias = false;
  bool replay = false;  // experts are given, in an order of their own
};

constexpr int64_t kDrawnTokens = 60;
constexpr int64_t kDrawnExperts = 36;

Inputs random_inputs(const Case& parameters) {
  Inputs inputs{.experts = kDrawnExperts};
  for (uint64_t i = 0; i < kDrawnTokens * kDrawnExperts; ++i) {
    inputs.logits.push_back(3 * random_normal(5, RandomStream::test, 0, i));
  }
  for (uint64_t i = 0; parameters.bias && i < kDrawnExperts; ++i) {
    // Of few bits: exact in f32.
    inputs.bias.push_back(std::round(64 * random_normal(6, RandomStream::test, 0, i)) / 256);
  }
  for (int64_t token = 0; parameters.replay && token < kDrawnTokens; ++token) {
    for (int slot = 0; slot < parameters.attributes.top_k; ++slot) {
      // 5 and 36 have no common divisor: the experts of a token are distinct.
      inputs.selected.push_back(static_cast<int32_t>((token + 5 * slot) % kDrawnExperts));
    }
  }
  return inputs;
}

class RouterTopk : public ::testing::TestWithParam<Case> {};

TEST_P(RouterTopk, AgreesWithANaiveComputation) {
  const RouterTopkAttributes& attributes = GetParam().attributes;
  const Inputs inputs = random_inputs(GetParam());
  const auto top_k = static_cast<size_t>(attributes.top_k);
  const Selection actual = run_router_topk(inputs, attributes, {.backward = true});
  bool largest_first = true;  // slot 0 of every token holds its largest logit
  for (size_t token = 0; token < kDrawnTokens; ++token) {
    const auto row = inputs.logits.begin() + static_cast<int64_t>(token) * kDrawnExperts;
    const Naive naive{attributes, {row, row + kDrawnExperts}, inputs.bias};
    std::vector<int> chosen;
    if (GetParam().replay) {
      const auto given = inputs.selected.begin() + static_cast<int64_t>(token * top_k);
      chosen.assign(given, given + attributes.top_k);
    } else {
      chosen = naive.select();
    }
    const std::vector<double> weights = naive.weights(chosen);
    const std::vector<double> gradient =
        naive.gradient(chosen, actual.d_probabilities.data() + token * top_k);
    for (size_t slot = 0; slot < top_k; ++slot) {
      EXPECT_EQ(actual.indices[token * top_k + slot], chosen[slot])
          << "token " << token << " slot " << slot;
      // Double arithmetic over 36 terms; weights are at most the scaling factor, 2.5.
      EXPECT_NEAR(actual.probabilities[token * top_k + slot], weights[slot], 1e-13);
      largest_first = largest_first && naive.z[static_cast<size_t>(chosen[slot])] <=
                                           naive.z[static_cast<size_t>(chosen[0])];
    }
    for (size_t i = 0; i < kDrawnExperts; ++i) {
      EXPECT_NEAR(actual.d_logits[token * kDrawnExperts + i], gradient[i], 1e-12)
          << "token " << token << " expert " << i;
    }
  }
  if (GetParam().replay && top_k > 1) {
    EXPECT_FALSE(largest_first) << "the given order is that of a selection";
  }
}

constexpr auto kSigmoid = ScoreFunction::sigmoid;
constexpr auto kSqrtSoftplus = ScoreFunction::sqrtsoftplus;

INSTANTIATE_TEST_SUITE_P(
    Methods, RouterTopk,
    ::testing::Values(
        Case{"PostSoftmax", {.top_k = 5, .scaling_factor = 2.5}},
        Case{"PreSoftmax", {.top_k = 5, .pre_softmax = true, .scaling_factor = 2.5}},
        Case{"PreSoftmaxOne", {.top_k = 1, .pre_softmax = true}},
        Case{"Sigmoid", {.top_k = 5, .score_function = kSigmoid, .scaling_factor = 2.5}},
        Case{"SigmoidOne", {.top_k = 1, .score_function = kSigmoid, .scaling_factor = 2.5}},
        Case{"SigmoidBias", {.top_k = 5, .score_function = kSigmoid}, true},
        Case{"SigmoidOneBias", {.top_k = 1, .score_function = kSigmoid}, true},
        Case{"SqrtSoftplus", {.top_k = 5, .score_function = kSqrtSoftplus, .scaling_factor = 1.5}},
        Case{"SqrtSoftplusOne", {.top_k = 1, .score_function = kSqrtSoftplus}},
        Case{"SqrtSoftplusBias", {.top_k = 5, .score_function = kSqrtSoftplus}, true},
        Case{"GroupsPostSoftmax", {.top_k = 5, .num_groups = 6, .group_topk = 2}},
        Case{"GroupsPreSoftmax",
             {.top_k = 4, .pre_softmax = true, .num_groups = 4, .group_topk = 2}},
        Case{"GroupsOfMaxima",
             {.top_k = 3, .pre_softmax = true, .num_groups = 12, .group_topk = 3}},
        Case{"GroupsSigmoid",
             {.top_k = 6, .score_function = kSigmoid, .num_groups = 9, .group_topk = 3}},
        Case{"GroupsSigmoidBias",
             {.top_k = 8,
              .score_function = kSigmoid,
              .scaling_factor = 2.5,
              .num_groups = 6,
              .group_topk = 3},
             true},
        Case{"GroupsOfTwoScores",
             {.top_k = 5,
              .score_function = kSigmoid,
              .num_groups = 6,
              .group_topk = 5,
              .group_scores = 2},
             true},
        Case{"OneOfGroupsOfThreeScores",
             {.top_k = 1,
              .score_function = kSigmoid,
              .num_groups = 6,
              .group_topk = 1,
              .group_scores = 3},
             true},
        Case{
            "GroupsByTheirBest",
            {.top_k = 6, .pre_softmax = true, .num_groups = 6, .group_topk = 3, .group_scores = 1}},
        Case{"SigmoidNotNormalized",
             {.top_k = 5, .score_function = kSigmoid, .scaling_factor = 2.5, .normalize = false},
             true},
        Case{"GroupsOneOfOne", {.top_k = 7, .num_groups = 2, .group_topk = 1}},
        Case{"GroupsAll",
             {.top_k = 4, .score_function = kSqrtSoftplus, .num_groups = 4, .group_topk = 4},
             true},
        Case{"ReplayPostSoftmax", {.top_k = 5, .scaling_factor = 2.5}, false, true},
        Case{"ReplayPreSoftmax",
             {.top_k = 5, .pre_softmax = true, .scaling_factor = 2.5},
             false,
             true},
        Case{"ReplaySigmoid", {.top_k = 5, .score_function = kSigmoid}, false, true},
        Case{"ReplaySigmoidOne", {.top_k = 1, .score_function = kSigmoid}, false, true},
        Case{"ReplaySqrtSoftplus",
             {.top_k = 5, .score_function = kSqrtSoftplus, .scaling_factor = 1.5},
             false,
             true}),
    [](const auto& info) { return info.param.name; });

TEST(RouterTopkRules, TheLowerExpertWinsATie) {
  const Inputs inputs{.experts = 6,
                      .logits = {1, 3, 3, 0, 3, 0,  //
                                 2, 2, 2, 2, 2, 2}};
  for (const bool pre_softmax : {false, true}) {
    const auto actual = run_router_topk(inputs, {.top_k = 2, .pre_softmax = pre_softmax});
    EXPECT_EQ(actual.indices, (std::vector<double>{1, 2, 0, 1}));
  }
  for (const ScoreFunction function : {kSigmoid, kSqrtSoftplus}) {
    Inputs biased = inputs;
    biased.bias = {0, 0, 0, 0, 0, 0};
    const auto actual = run_router_topk(biased, {.top_k = 2, .score_function = function});
    EXPECT_EQ(actual.indices, (std::vector<double>{1, 2, 0, 1}));
  }
}

TEST(RouterTopkRules, TheLowerGroupWinsATie) {
  const auto actual = run_router_topk({.experts = 6,
                                       .logits = {0, 1, 5, 2, 3, 4,  //
                                                  1, 1, 1, 1, 1, 1}},
                                      {.top_k = 2, .num_groups = 3, .group_topk = 1});
  // Sums of two: 1, 7, 7; then 2, 2, 2.
  EXPECT_EQ(actual.indices, (std::vector<double>{2, 3, 0, 1}));
}

TEST(RouterTopkRules, BetterGroupsWithAWorseBestExpert) {
  // The largest logit is in the group with the smallest sum, so it is not selected.
  const Inputs inputs{.experts = 4, .logits = {3, -3, 2, 1}};
  const auto actual = run_router_topk(inputs, {.top_k = 2, .num_groups = 2, .group_topk = 1});
  EXPECT_EQ(actual.indices, (std::vector<double>{2, 3}));
  EXPECT_NEAR(actual.probabilities[0], 1 / (1 + std::exp(-1.0)), 1e-15);
}

TEST(RouterTopkRules, BiasSelectsButDoesNotWeigh) {
  const auto actual = run_router_topk({.experts = 3, .logits = {2, 1, 0}, .bias = {0, 0, 10}},
                                      {.top_k = 1, .score_function = ScoreFunction::sigmoid});
  EXPECT_EQ(actual.indices, (std::vector<double>{2}));
  EXPECT_NEAR(actual.probabilities[0], 0.5, 1e-15);
}

TEST(RouterTopkRules, SaturatedScoresAreToldApart) {
  // In f32 the sigmoids of all three are 1.
  const auto actual = run_router_topk({.experts = 3, .logits = {40, 60, 50}},
                                      {.top_k = 2, .score_function = ScoreFunction::sigmoid},
                                      {.dtype = DType::f32});
  EXPECT_EQ(actual.indices, (std::vector<double>{1, 2}));
}

TEST(RouterTopkRules, LargeLogitsDoNotOverflow) {
  const Inputs inputs{.experts = 3, .logits = {3000, 2999, -3000}};
  const auto post = run_router_topk(inputs, {.top_k = 2}, {.dtype = DType::f32});
  EXPECT_EQ(post.indices, (std::vector<double>{0, 1}));
  // Single precision: a few times 6e-8.
  EXPECT_NEAR(post.probabilities[0], 1 / (1 + std::exp(-1.0)), 5e-7);

  // The given experts leave out the largest logit.
  Inputs replayed = inputs;
  replayed.selected = {2, 1};
  for (const bool pre_softmax : {false, true}) {
    const auto given = run_router_topk(replayed, {.top_k = 2, .pre_softmax = pre_softmax},
                                       {.dtype = DType::f32, .backward = true});
    EXPECT_NEAR(given.probabilities[1], pre_softmax ? 1 / (1 + std::exp(1.0)) : 1, 5e-7);
    for (const double d : given.d_logits) EXPECT_TRUE(std::isfinite(d)) << d;
  }

  for (const ScoreFunction function : {kSigmoid, kSqrtSoftplus}) {
    const auto scores = run_router_topk(inputs, {.top_k = 3, .score_function = function},
                                        {.dtype = DType::f32, .backward = true});
    EXPECT_EQ(scores.indices, (std::vector<double>{0, 1, 2}));
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_TRUE(std::isfinite(scores.probabilities[i]));
      EXPECT_TRUE(std::isfinite(scores.d_logits[i])) << scores.d_logits[i];
    }
    EXPECT_EQ(scores.probabilities[2], 0);
  }
}

TEST(RouterTopkRules, NarrowProbabilitiesAreTheRoundedOnes) {
  for (const RouterTopkAttributes wide :
       {RouterTopkAttributes{.top_k = 4}, RouterTopkAttributes{.top_k = 4, .pre_softmax = true},
        RouterTopkAttributes{.top_k = 4, .score_function = kSigmoid, .scaling_factor = 2.5}}) {
    RouterTopkAttributes narrow = wide;
    narrow.probability_dtype = DType::f32;
    const Inputs inputs = random_inputs({"", wide});
    const auto expected = run_router_topk(inputs, wide, {.backward = true});
    const auto actual = run_router_topk(inputs, narrow, {.backward = true});
    EXPECT_EQ(actual.indices, expected.indices);
    for (size_t i = 0; i < expected.probabilities.size(); ++i) {
      EXPECT_EQ(actual.probabilities[i], static_cast<float>(expected.probabilities[i]));
    }
    for (size_t i = 0; i < expected.d_logits.size(); ++i) {
      // Of f32 gradients (under 4) and probabilities: a few times 6e-8.
      EXPECT_NEAR(actual.d_logits[i], expected.d_logits[i], 2e-6);
    }
  }
}

TEST(RouterTopkRules, F64LogitsDecideBeyondF32) {
  const auto actual = run_router_topk({.experts = 3, .logits = {1, 1 + 1e-12, 1 - 1e-12}},
                                      {.top_k = 2, .probability_dtype = DType::f32});
  EXPECT_EQ(actual.indices, (std::vector<double>{1, 0}));
}

TEST(RouterTopkRules, IndicesAreDistinctExpertsEvenWithoutNumbers) {
  const Inputs inputs{.experts = 4,
                      .logits = {kNan, kNan, kNan, kNan,           //
                                 1, kNan, 2, kNan,                 //
                                 -kInfinity, 5, kNan, -kInfinity,  //
                                 kNan, kInfinity, 1, -kInfinity}};
  const std::vector<double> expected{0, 1, 2,  //
                                     2, 0, 1,  //
                                     1, 0, 2,  //
                                     1, 2, 0};
  EXPECT_EQ(run_router_topk(inputs, {.top_k = 3}).indices, expected);
  EXPECT_EQ(run_router_topk(inputs, {.top_k = 3, .score_function = kSigmoid}).indices, expected);
}

TEST(RouterTopkRules, NanStaysWithinTheGroups) {
  const Inputs inputs{.experts = 6,
                      .logits = {kNan, kNan, kNan, kNan, kNan, kNan,  //
                                 1, 0, 3, kNan, 2, 2,                 //
                                 kNan, 1, kNan, kNan, 2, kNan}};
  for (const bool pre_softmax : {false, true}) {
    const auto actual = run_router_topk(
        inputs, {.top_k = 3, .pre_softmax = pre_softmax, .num_groups = 3, .group_topk = 2});
    // Groups are judged by their best expert; where those are NaN the lower group is kept.
    EXPECT_EQ(actual.indices, (std::vector<double>{0, 1, 2,  //
                                                   2, 4, 5,  //
                                                   4, 1, 0}))
        << pre_softmax;
  }
  Inputs biased = inputs;
  biased.bias = {0, kNan, 0, 0, 0, 0};
  const auto actual = run_router_topk(
      biased,
      {.top_k = 3, .score_function = ScoreFunction::sigmoid, .num_groups = 3, .group_topk = 2});
  EXPECT_EQ(actual.indices, (std::vector<double>{0, 1, 2,  //
                                                 2, 4, 5,  //
                                                 4, 0, 1}));
}

}  // namespace
}  // namespace troupe::testing
