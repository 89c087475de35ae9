// Dropout: which elements are kept, and what becomes of them. The mask is compared with its
// definition written out from base/random.h, element by element; its statistics with those of
// independent draws. The random numbers are fixed, so a pass is a pass for good.
#include "ops/elementwise/dropout/dropout.h"

#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <vector>

#include "ops/cpu/dropout_mask.h"
#include "ops/value_test_support.h"

namespace troupe::testing {
namespace {

using Numbers = std::vector<double>;

// Several chunks of the kernel and a remainder of one element.
constexpr int64_t kElements = 100001;

Numbers drop(const Numbers& x, int64_t step, const DropoutAttributes& attributes,
             DType dtype = DType::f64, int threads = 1) {
  return run_sample(
      [&](SampleBuilder& sample) {
        const ValueId input = sample.values("x", {static_cast<int64_t>(x.size())}, x, {});
        const ValueId at = sample.integers64("step", {1}, {step});
        sample.result(dropout(sample.builder(), input, at, attributes, "y"));
      },
      dtype, threads)[0];
}

std::vector<bool> kept(int64_t step, const DropoutAttributes& attributes, int threads = 1) {
  std::vector<bool> mask;
  for (const double y : drop(Numbers(kElements, 1.0), step, attributes, DType::f64, threads)) {
    mask.push_back(y != 0);
  }
  return mask;
}

int64_t count_equal(const std::vector<bool>& a, const std::vector<bool>& b) {
  int64_t equal = 0;
  for (size_t i = 0; i < a.size(); ++i) equal += a[i] == b[i] ? 1 : 0;
  return equal;
}

TEST(Dropout, KeepsWhatItsDefinitionSays) {
  constexpr DropoutAttributes kAttributes{.seed = 11, .substream = 5, .probability = 0.3};
  constexpr int64_t kStep = (int64_t{1} << 40) + 3;
  const auto key = random_words(11, RandomStream::dropout, 5, static_cast<uint64_t>(kStep));
  const uint64_t step_seed = (static_cast<uint64_t>(key[1]) << 32) | key[0];
  const Numbers x = normal_numbers(kElements, 0);
  const Numbers y = drop(x, kStep, kAttributes);
  for (uint64_t i = 0; i < kElements; ++i) {
    const uint32_t word = random_words(step_seed, RandomStream::dropout, 5, i / 4)[i % 4];
    // Two roundings: 1 / (1 - p) and the product.
    const double expected = word < std::floor(0.3 * 0x1.0p32) ? 0.0 : x[i] / 0.7;
    ASSERT_NEAR(y[i], expected, 4e-16 * std::abs(expected)) << i;
  }
}

// A mask of n independent elements keeps n (1 - p) of them, give or take five standard deviations
// of sqrt(n p (1 - p)). Neighbours at any small distance agree with probability p^2 + (1 - p)^2.
TEST(Dropout, KeepsTheRightShareIndependently) {
  for (const double p : {0.01, 0.1, 0.5, 0.9}) {
    const auto mask = kept(1, {.seed = 3, .substream = 0, .probability = p});
    const auto deviations = [](double count, double share) {
      return 5 * std::sqrt(count * share * (1 - share));
    };
    double total = 0;
    for (const bool keep : mask) total += keep ? 1 : 0;
    EXPECT_NEAR(total, kElements * (1 - p), deviations(kElements, p)) << p;
    const double agree = p * p + (1 - p) * (1 - p);
    for (const size_t distance : {1, 2, 3, 4, 64, 16384}) {
      int64_t equal = 0;
      for (size_t i = 0; i + distance < mask.size(); ++i) {
        equal += mask[i] == mask[i + distance] ? 1 : 0;
      }
      const double pairs = static_cast<double>(mask.size() - distance);
      // Pairs that share an element are not independent, so the variance of the count is up to
      // three times that of independent pairs: 9 deviations for 5.
      EXPECT_NEAR(static_cast<double>(equal), pairs * agree, 9.0 / 5 * deviations(pairs, agree))
          << p << " at distance " << distance;
    }
  }
}

TEST(Dropout, EveryArgumentChangesTheMask) {
  const DropoutAttributes attributes{.seed = 3, .substream = 8, .probability = 0.5};
  const auto mask = kept(6, attributes);
  EXPECT_EQ(kept(6, attributes), mask) << "the same step";
  const auto expect_independent = [&](const std::vector<bool>& other, const char* what) {
    // Independent masks agree in half of their elements; five standard deviations.
    EXPECT_NEAR(static_cast<double>(count_equal(mask, other)), kElements / 2.0,
                5 * std::sqrt(kElements / 4.0))
        << what;
  };
  expect_independent(kept(7, attributes), "the next step");
  expect_independent(kept(6 + (int64_t{1} << 32), attributes), "a step 2^32 later");
  expect_independent(kept(6, {.seed = 4, .substream = 8, .probability = 0.5}), "another seed");
  expect_independent(kept(6, {.seed = 3, .substream = 9, .probability = 0.5}), "another substream");
}

TEST(Dropout, ThreadsChangeNothing) {
  const DropoutAttributes attributes{.seed = 3, .substream = 0, .probability = 0.2};
  EXPECT_EQ(kept(1, attributes, 1), kept(1, attributes, 3));
}

TEST(Dropout, RoundsOnceToTheDType) {
  const DropoutAttributes attributes{.seed = 3, .substream = 0, .probability = 0.1};
  Numbers x = normal_numbers(999, 1);
  for (double& value : x) value = static_cast<float>(bf16(value));
  const Numbers reference = drop(x, 1, attributes);
  const Numbers single = drop(x, 1, attributes, DType::f32);
  const Numbers rounded = drop(x, 1, attributes, DType::bf16);
  for (size_t i = 0; i < x.size(); ++i) {
    // The scale and the product each rounded to f32, by 2^-24 at most; in bf16, with its eight
    // digits, half an ulp on top: 2^-8 at most.
    EXPECT_NEAR(single[i], reference[i], 1.001 * std::ldexp(std::abs(reference[i]), -23)) << i;
    EXPECT_NEAR(rounded[i], reference[i], 1.001 * std::ldexp(std::abs(reference[i]), -8)) << i;
  }
}

// Also when what is dropped is not a number.
TEST(Dropout, DroppedElementsAreZero) {
  const DropoutAttributes attributes{.seed = 3, .substream = 0, .probability = 0.5};
  const auto mask = kept(1, attributes);
  const Numbers y =
      drop(Numbers(kElements, std::numeric_limits<double>::quiet_NaN()), 1, attributes);
  for (size_t i = 0; i < y.size(); ++i) {
    ASSERT_EQ(std::isnan(y[i]), mask[i]) << i;
    ASSERT_TRUE(mask[i] || y[i] == 0) << i;
  }
}

TEST(Dropout, TheGradientDrawsTheSameMask) {
  constexpr int64_t kCount = 5000;
  SampleRun run({"",
                 [](SampleBuilder& sample) {
                   const ValueId x = sample.values("x", {kCount}, Numbers(kCount, 1.0), {});
                   const ValueId step = sample.integers64("step", {1}, {12});
                   sample.result(dropout(sample.builder(), x, step,
                                         {.seed = 1, .substream = 2, .probability = 0.4}, "y"));
                 }},
                {.dtype = DType::f64});
  run.run();
  const Numbers y = run.results()[0];
  const Numbers dx = run.gradients()[0];
  ASSERT_EQ(dx.size(), y.size());
  // The gradient that enters is random and nowhere zero.
  for (size_t i = 0; i < y.size(); ++i) ASSERT_EQ(dx[i] != 0, y[i] != 0) << i;
}

TEST(Dropout, WithProbabilityZeroEmitsNothing) {
  Program program(std::make_shared<const StateTable>());
  Builder builder(program);
  const ValueId x = builder.input("x", DType::f32, {3, 4});
  EXPECT_EQ(dropout(builder, x, ValueId{}, {.seed = 1, .substream = 0, .probability = 0}, "y"), x);
  EXPECT_EQ(program.op_count(), 0);
}

// Whatever range is drawn, an element has the same word.
TEST(DropoutMask, DoesNotDependOnTheRange) {
  const DropoutMask mask(5, 6, 7, 0.5);
  std::vector<uint32_t> all(300);
  mask.draw(0, 300, all.data());
  for (const uint64_t first : {0, 1, 2, 3, 4, 5, 63, 66}) {
    for (const int64_t count : {0, 1, 2, 3, 4, 5, 7, 64, 65, 130}) {
      std::vector<uint32_t> words(static_cast<size_t>(count) + 1, 42);
      mask.draw(first, count, words.data());
      for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
        ASSERT_EQ(words[i], all[first + i]) << first << ", " << count << ", " << i;
      }
      ASSERT_EQ(words.back(), 42U) << "written beyond the range: " << first << ", " << count;
    }
  }
}

}  // namespace
}  // namespace troupe::testing
