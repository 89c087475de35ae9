// Generation: the rules of sampling one token, and texts from a small model.
#include "train/generation.h"

#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <vector>

#include "train/train_test_support.h"

namespace troupe {
namespace {

using namespace testing;

// Probabilities 1/2, 1/8, 1/4, 1/8 at temperature 1.
const std::vector<double> kLogits = {std::log(4.0), 0.0, std::log(2.0), 0.0};

// The tokens of evenly spaced draws: how often each comes up is its probability, exactly.
std::vector<int> histogram(const std::vector<double>& logits, const GenerationOptions& options,
                           int draws = 4096) {
  std::vector<int> counts(logits.size());
  for (int i = 0; i < draws; ++i) {
    ++counts[static_cast<size_t>(sample_token(logits, options, (i + 0.5) / draws))];
  }
  return counts;
}

TEST(TextContext, IsNoMoreThanTheTextAndAMultipleOfTheRanks) {
  struct Case {
    int64_t text;
    int32_t sequence, tp, context;
  };
  for (const Case& each :
       {Case{1, 64, 1, 1}, Case{63, 64, 1, 63}, Case{64, 64, 1, 64}, Case{65, 64, 1, 64},
        Case{1, 64, 2, 2}, Case{8, 64, 2, 8}, Case{9, 64, 4, 12}, Case{100, 10, 4, 8},
        Case{7, 10, 4, 8}, Case{5, 2, 3, 3}, Case{int64_t{1} << 40, 64, 2, 64}}) {
    EXPECT_EQ(context_of_text(each.text, each.sequence, each.tp), each.context)
        << each.text << " tokens, " << each.sequence << " positions, TP " << each.tp;
  }
}

TEST(SampleToken, FollowsTheDistribution) {
  EXPECT_EQ(histogram(kLogits, {}), (std::vector<int>{2048, 512, 1024, 512}));
}

TEST(SampleToken, TakesTheMostLikelyFirst) {
  // Cumulative: token 0 up to 1/2, token 2 up to 3/4, tokens 1 and 3 (equal: lower id first).
  EXPECT_EQ(sample_token(kLogits, {}, 0.0), 0);
  EXPECT_EQ(sample_token(kLogits, {}, 0.49), 0);
  EXPECT_EQ(sample_token(kLogits, {}, 0.51), 2);
  EXPECT_EQ(sample_token(kLogits, {}, 0.74), 2);
  EXPECT_EQ(sample_token(kLogits, {}, 0.76), 1);
  EXPECT_EQ(sample_token(kLogits, {}, 0.87), 1);
  EXPECT_EQ(sample_token(kLogits, {}, 0.88), 3);
  EXPECT_EQ(sample_token(kLogits, {}, std::nextafter(1.0, 0.0)), 3);
}

TEST(SampleToken, TemperatureZeroIsTheMostLikely) {
  for (const double draw : {0.0, 0.5, 0.999}) {
    EXPECT_EQ(sample_token(kLogits, {.temperature = 0}, draw), 0);
    EXPECT_EQ(sample_token({1, 3, 3, 2}, {.temperature = 0}, draw), 1) << "ties: the lower id";
  }
}

TEST(SampleToken, TemperatureDividesTheLogits) {
  // At 1/2 the probabilities are squared: 16 : 1 : 4 : 1.
  EXPECT_EQ(histogram(kLogits, {.temperature = 0.5}, 2200),
            (std::vector<int>{1600, 100, 400, 100}));
  // At 2 their roots are taken: 2 : 1 : sqrt(2) : 1.
  const double sum = 4 + std::sqrt(2.0);
  const std::vector<int> counts = histogram(kLogits, {.temperature = 2}, 100000);
  EXPECT_NEAR(counts[0], 100000 * 2 / sum, 1);  // at each border one draw may fall either way
  EXPECT_NEAR(counts[2], 100000 * std::sqrt(2.0) / sum, 1);
}

TEST(SampleToken, TinyTemperatureIsTheMostLikely) {
  EXPECT_EQ(histogram(kLogits, {.temperature = 1e-300}), (std::vector<int>{4096, 0, 0, 0}));
}

TEST(SampleToken, TopK) {
  EXPECT_EQ(histogram(kLogits, {.top_k = 1}), (std::vector<int>{4096, 0, 0, 0}));
  EXPECT_EQ(histogram(kLogits, {.top_k = 2}, 300), (std::vector<int>{200, 0, 100, 0}));
  EXPECT_EQ(histogram(kLogits, {.top_k = 3}, 700), (std::vector<int>{400, 100, 200, 0}));
  EXPECT_EQ(histogram(kLogits, {.top_k = 0}), histogram(kLogits, {.top_k = 4}));
  EXPECT_EQ(histogram(kLogits, {.top_k = 1000}), histogram(kLogits, {}));
}

TEST(SampleToken, TopP) {
  // The shortest list of most likely tokens that reaches the probability.
  EXPECT_EQ(histogram(kLogits, {.top_p = 1e-9}), (std::vector<int>{4096, 0, 0, 0}));
  EXPECT_EQ(histogram(kLogits, {.top_p = 0.4}), (std::vector<int>{4096, 0, 0, 0}));
  EXPECT_EQ(histogram(kLogits, {.top_p = 0.6}, 300), (std::vector<int>{200, 0, 100, 0}));
  EXPECT_EQ(histogram(kLogits, {.top_p = 0.8}, 700), (std::vector<int>{400, 100, 200, 0}));
  EXPECT_EQ(histogram(kLogits, {.top_p = 1}), histogram(kLogits, {}));
  EXPECT_EQ(histogram(kLogits, {.top_p = 0}), histogram(kLogits, {}));
}

TEST(SampleToken, TopPCountsWithinTopK) {
  // Of the two most likely, 2/3 and 1/3: the first alone reaches 0.6, but not 0.7.
  EXPECT_EQ(histogram(kLogits, {.top_k = 2, .top_p = 0.6}), (std::vector<int>{4096, 0, 0, 0}));
  EXPECT_EQ(histogram(kLogits, {.top_k = 2, .top_p = 0.7}, 300),
            (std::vector<int>{200, 0, 100, 0}));
}

TEST(SampleToken, LargeLogitsDoNotOverflow) {
  EXPECT_EQ(histogram({10000 + std::log(3.0), 10000}, {}), (std::vector<int>{3072, 1024}));
  EXPECT_EQ(histogram({-10000 + std::log(3.0), -10000}, {}), (std::vector<int>{3072, 1024}));
}

class Generation : public ::testing::Test {
 protected:
  Generation() {
    session.declare(config, DType::f32, /*trained=*/false,
                    std::make_shared<const RunLayout>(layout_of_one_rank(config.num_layers)));
    session.allocate();
    initialize_parameters(session.state(), session.storage(), 3, session.pool());
  }
  std::vector<int32_t> run(const std::vector<int32_t>& prompt, const GenerationOptions& options) {
    return run(prompt, options, [](int32_t) { return true; });
  }
  std::vector<int32_t> run(const std::vector<int32_t>& prompt, const GenerationOptions& options,
                           const std::function<bool(int32_t)>& emit) {
    return generate(plan_generation(config, session, options.context), session, prompt, options,
                    emit);
  }
  static ModelConfig large_weights() {
    ModelConfig config = trained_model();
    config.init_method_std = 0.3;  // clear preferences
    return config;
  }

  ModelConfig config = large_weights();
  RankSession session{{.threads = 2}, /*rank=*/0, /*group=*/nullptr};
};

TEST_F(Generation, GivesAsManyTokensAsAsked) {
  const std::vector<int32_t> text =
      run({1, 2}, {.context = 8, .new_tokens = 20, .seed = 5, .vocabulary = 90});
  ASSERT_EQ(text.size(), 20U);
  for (const int32_t token : text) {
    EXPECT_GE(token, 0);
    EXPECT_LT(token, 90) << "an id that the tokenizer does not have";
  }
}

TEST_F(Generation, SameSeedSameText) {
  const GenerationOptions options{.context = 8, .new_tokens = 20, .seed = 5, .vocabulary = 96};
  GenerationOptions other = options;
  other.seed = 6;
  EXPECT_EQ(run({1, 2}, options), run({1, 2}, options));
  EXPECT_NE(run({1, 2}, options), run({1, 2}, other));
}

// The padding after a short text must not influence it: attention is causal.
TEST_F(Generation, ContextLongerThanTheTextDoesNotMatter) {
  GenerationOptions options{.context = 8, .new_tokens = 5, .temperature = 0, .vocabulary = 96};
  const std::vector<int32_t> text = run({1, 2, 3}, options);
  options.context = 64;
  EXPECT_EQ(run({1, 2, 3}, options), text);
}

TEST_F(Generation, OldTokensAreForgotten) {
  const GenerationOptions options{
      .context = 3, .new_tokens = 6, .temperature = 0, .vocabulary = 96};
  EXPECT_EQ(run({50, 60, 70, 1, 2, 3}, options), run({1, 2, 3}, options));
}

TEST_F(Generation, EndsAtTheEndOfTheDocument) {
  GenerationOptions options{.context = 8, .new_tokens = 10, .temperature = 0, .vocabulary = 96};
  const std::vector<int32_t> text = run({1, 2}, options);
  options.eod = text[3];
  const auto first = std::find(text.begin(), text.end(), options.eod);
  EXPECT_EQ(run({1, 2}, options), (std::vector<int32_t>(text.begin(), first)));
}

TEST_F(Generation, StopsWhenToldTo) {
  std::vector<int32_t> seen;
  const std::vector<int32_t> text =
      run({1}, {.context = 8, .new_tokens = 10, .vocabulary = 96}, [&](int32_t token) {
        seen.push_back(token);
        return seen.size() < 4;
      });
  EXPECT_EQ(text.size(), 4U);
  EXPECT_EQ(text, seen);
}

}  // namespace
}  // namespace troupe
