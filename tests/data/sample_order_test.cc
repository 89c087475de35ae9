// The order of samples and the mixing of data sets, against references that
// tests/fixtures/make_dataset_references.py computes with numpy.
#include "data/sample_order.h"

#include <algorithm>
#include <fstream>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <numeric>

#include "data/blend.h"
#include "data/data_test_support.h"
#include "data/numpy_random.h"

namespace troupe {
namespace {

using nlohmann::json;

const json& references() {
  static const json document = [] {
    std::ifstream file(TROUPE_FIXTURE_DIR "/dataset/references.json");
    return json::parse(file);
  }();
  return document;
}

std::vector<int64_t> values_of(const IndexArray& array) {
  std::vector<int64_t> values;
  for (int64_t i = 0; i < array.size(); ++i) values.push_back(array[i]);
  return values;
}

template <class T>
void expect_shuffle(const json& reference) {
  std::vector<T> values(reference["size"].get<size_t>());
  std::iota(values.begin(), values.end(), T{0});
  NumpyRandom random(reference["seed"].get<uint32_t>());
  random.shuffle(std::span<T>(values));
  EXPECT_EQ(std::vector<T>(values.begin(), values.begin() + 10),
            reference["first"].get<std::vector<T>>());
  uint64_t checksum = 0;
  for (const T value : values) checksum = checksum * 31 + value;
  EXPECT_EQ(std::to_string(checksum), reference["checksum"].get<std::string>());
}

TEST(NumpyRandom, ShufflesAsNumpyDoes) {
  for (const json& reference : references()["shuffles"]) {
    SCOPED_TRACE(reference.dump());
    expect_shuffle<uint32_t>(reference);
    expect_shuffle<uint64_t>(reference);
  }
}

TEST(NumpyRandom, DrawsAsNumpyDoesAlsoAbove32Bits) {
  for (const json& reference : references()["draws"]) {
    SCOPED_TRACE(reference.dump());
    NumpyRandom random(reference["seed"].get<uint32_t>());
    for (const json& value : reference["values"]) {
      EXPECT_EQ(random.at_most(reference["max"].get<uint64_t>()), value.get<uint64_t>());
    }
  }
}

TEST(NumpyRandom, ZeroTakesNoWord) {
  NumpyRandom one(3);
  NumpyRandom two(3);
  EXPECT_EQ(one.at_most(0), 0U);
  EXPECT_EQ(one.at_most(1000), two.at_most(1000));
}

TEST(SampleOrder, EqualsTheReferences) {
  ASSERT_GE(references()["orders"].size(), 14U);
  for (const json& reference : references()["orders"]) {
    SampleOrderOptions options;
    options.sequence_length = reference["sequence_length"];
    if (!reference["num_samples"].is_null()) options.num_samples = reference["num_samples"];
    options.seed = reference["seed"];
    options.keep_partial = reference["keep_partial"];
    SCOPED_TRACE(reference["num_samples"].dump() + " samples, seed " + reference["seed"].dump());
    const auto lengths = reference["lengths"].get<std::vector<int32_t>>();
    const SampleOrder order = build_sample_order(lengths, options);
    EXPECT_EQ(order.epochs, reference["epochs"].get<int64_t>());
    EXPECT_EQ(order.separate_last_epoch, reference["separate"].get<bool>());
    EXPECT_EQ(order.sequences, reference["sequences"].get<std::vector<uint32_t>>());
    EXPECT_EQ(values_of(order.shuffle), reference["shuffle"].get<std::vector<int64_t>>());
    std::vector<std::vector<int64_t>> starts;
    for (int64_t i = 0; i < order.num_samples(); ++i) {
      starts.push_back({order.start_place[i], order.start_offset[static_cast<size_t>(i)]});
    }
    EXPECT_EQ(starts, reference["starts"].get<std::vector<std::vector<int64_t>>>());
  }
}

// What the run's length decides is the number of epochs, and nothing else.
TEST(SampleOrder, WithinOneEpochTheNumberOfSamplesDoesNotMatter) {
  std::vector<int32_t> lengths(50, 7);
  SampleOrderOptions options{.sequence_length = 5, .num_samples = std::nullopt, .seed = 3};
  const SampleOrder whole = build_sample_order(lengths, options);
  for (const int64_t samples : {int64_t{1}, int64_t{30}, whole.num_samples()}) {
    options.num_samples = samples;
    const SampleOrder order = build_sample_order(lengths, options);
    EXPECT_EQ(order.sequences, whole.sequences);
    EXPECT_EQ(values_of(order.shuffle), values_of(whole.shuffle));
  }
  options.num_samples = whole.num_samples() + 1;
  EXPECT_EQ(build_sample_order(lengths, options).epochs, 2);
}

// An epoch of 100 tokens has 19 samples of 5 tokens and a label: the label of the 20th is in the
// next epoch. A last epoch of which less than 0.8 * 19 samples are needed is shuffled by itself.
TEST(SampleOrder, TheLastEpochIsCutWhereItsFirstLabelBegins) {
  const std::vector<int32_t> lengths = {30, 70};
  const auto order_of = [&](int64_t samples, uint32_t seed) {
    return build_sample_order(lengths,
                              {.sequence_length = 5, .num_samples = samples, .seed = seed});
  };
  for (uint32_t seed = 0; seed < 4; ++seed) {
    const SampleOrder order = order_of(19 + 6, seed);
    EXPECT_EQ(order.epochs, 2);
    EXPECT_TRUE(order.separate_last_epoch);
    const std::vector<int64_t> shuffle = values_of(order.shuffle);
    ASSERT_EQ(shuffle.size(), 39U);
    EXPECT_EQ(*std::max_element(shuffle.begin(), shuffle.begin() + 19), 18) << seed;
    EXPECT_EQ(*std::min_element(shuffle.begin() + 19, shuffle.end()), 19) << seed;
  }
  EXPECT_TRUE(order_of(19 + 14, 0).separate_last_epoch);
  EXPECT_FALSE(order_of(19 + 15, 0).separate_last_epoch);
}

TEST(SampleOrder, OrdersThatCannotBeHeldAreRefused) {
  const std::vector<int32_t> lengths = {4, 4};
  const SampleOrderOptions many{.sequence_length = 4, .num_samples = int64_t{1} << 50, .seed = 1};
  EXPECT_TRUE(
      contains(message_of(ExitStatus::does_not_fit, [&] { build_sample_order(lengths, many); }),
               "--train-iters"));
  const SampleOrderOptions uncountable{
      .sequence_length = 1 << 20, .num_samples = int64_t{1} << 50, .seed = 1};
  EXPECT_TRUE(contains(
      message_of(ExitStatus::bad_request, [&] { build_sample_order(lengths, uncountable); }),
      "more than can be counted"));
}

TEST(IndexArray, HoldsNumbersOfEitherWidth) {
  for (const int64_t bound : {int64_t{10}, int64_t{1} << 32, (int64_t{1} << 32) + 1}) {
    IndexArray array(3, bound);
    array.set(1, bound - 1);
    EXPECT_EQ(values_of(array), (std::vector<int64_t>{0, bound - 1, 0}));
    array.visit([](auto values) { std::iota(values.begin(), values.end(), 5); });
    EXPECT_EQ(values_of(array), (std::vector<int64_t>{5, 6, 7})) << bound;
  }
}

std::vector<int64_t> members_of(const BlendOrder& blend) {
  std::vector<int64_t> members;
  for (int64_t i = 0; i < blend.size(); ++i)
    members.push_back(static_cast<int64_t>(blend.member(i)));
  return members;
}

TEST(Blend, WeightsAreNormalisedAsNumpyAdds) {
  for (const json& reference : references()["sums"]) {
    EXPECT_EQ(normalize_weights(reference["weights"].get<std::vector<double>>()),
              reference["normalized"].get<std::vector<double>>());
  }
}

TEST(Blend, EqualsTheReferences) {
  for (const json& reference : references()["blends"]) {
    const auto weights = normalize_weights(reference["weights"].get<std::vector<double>>());
    const auto expected = reference["members"].get<std::vector<int64_t>>();
    const auto size = static_cast<int64_t>(expected.size());
    std::vector<int64_t> available;
    for (const double weight : weights) available.push_back(samples_to_request(size, weight));
    const BlendOrder blend(weights, available, size, false);
    EXPECT_EQ(members_of(blend), expected) << weights.size() << " data sets";
    // Each data set is read from its first sample on.
    std::vector<int64_t> taken(weights.size());
    for (int64_t i = 0; i < blend.size(); ++i) {
      ASSERT_EQ(blend.sample(i), taken[blend.member(i)]++) << i;
    }
  }
}

TEST(Blend, WithoutWeightsEachIsReadOnce) {
  for (const json& reference : references()["exhaustive"]) {
    const auto available = reference["available"].get<std::vector<int64_t>>();
    const auto weights = normalize_weights(std::vector<double>(available.begin(), available.end()));
    EXPECT_EQ(members_of(BlendOrder(weights, available, 1 << 20, true)),
              reference["members"].get<std::vector<int64_t>>());
  }
}

TEST(Blend, EndsWhereADataSetEnds) {
  const std::vector<double> weights = {0.5, 0.5};
  const std::vector<int64_t> available = {3, 100};
  // Taken in turns: the seventh would be the first one's fourth.
  EXPECT_EQ(BlendOrder(weights, available, 50, false).size(), 6);
  EXPECT_EQ(BlendOrder(weights, available, 4, false).size(), 4);
}

TEST(Blend, RequestsHaveASurplus) {
  for (const json& reference : references()["requests"]) {
    EXPECT_EQ(samples_to_request(reference["size"], reference["weight"]),
              reference["request"].get<int64_t>());
  }
}

TEST(DataPath, TakesMegatronsForms) {
  const auto parse = [](const std::vector<std::string>& words) {
    return parse_data_path(words, "--data-path");
  };
  using Names = std::vector<std::string>;
  using Weights = std::vector<double>;
  EXPECT_EQ(parse({"a"}).prefixes, Names{"a"});
  EXPECT_EQ(parse({"a"}).weights, Weights{});
  EXPECT_EQ(parse({"7"}).prefixes, Names{"7"}) << "one word is a prefix, whatever it is";
  EXPECT_EQ(parse({"a", "b", "c"}).prefixes, (Names{"a", "b", "c"}));
  EXPECT_EQ(parse({"a", "b"}).weights, Weights{});
  EXPECT_EQ(parse({"0.7", "a", "3e1", "b"}).prefixes, (Names{"a", "b"}));
  EXPECT_EQ(parse({"0.7", "a", "3e1", "b"}).weights, (Weights{0.7, 30}));
  EXPECT_EQ(parse({"1", "2"}).prefixes, Names{"2"});
}

TEST(DataPath, RefusesWrongWeights) {
  const auto refusal = [](const std::vector<std::string>& words) {
    return message_of(ExitStatus::bad_request, [&] { parse_data_path(words, "--data-path"); });
  };
  for (const char* weight : {"0", "-1", "nan", "inf", "1e999", "-0.0"}) {
    const std::string message = refusal({"0.5", "a", weight, "b"});
    EXPECT_TRUE(contains(message, std::string("the weight of b is ") + weight)) << message;
    EXPECT_TRUE(contains(message, "--data-path")) << message;
  }
  EXPECT_TRUE(contains(refusal({"0.7", "a", "b"}), "'0.7' is a number"));
  EXPECT_TRUE(contains(refusal({"0.7", "a", "b", "c"}), "'0.7' is a number"));
  EXPECT_TRUE(contains(refusal({"a", "0.7", "b", "0.3"}), "WEIGHT PREFIX"));
  EXPECT_TRUE(contains(refusal({"1e308", "a", "1e308", "b"}), "too large"));
}

TEST(DataPath, HasALargestNumberOfDataSets) {
  std::vector<std::string> words(32767, "a");
  EXPECT_EQ(parse_data_path(words, "--data-path").prefixes.size(), 32767U);
  words.emplace_back("a");
  EXPECT_EQ(message_of(ExitStatus::bad_request, [&] { parse_data_path(words, "--data-path"); }),
            "--data-path: 32768 data sets are more than 32767");
}

TEST(DataPath, ComesFromAFile) {
  const TempFolder dir;
  put_file(dir / "args", "0.7 a\n\t0.3   b\n");
  EXPECT_EQ(read_data_args(dir / "args"), (std::vector<std::string>{"0.7", "a", "0.3", "b"}));
  put_file(dir / "empty", " \n");
  EXPECT_TRUE(contains(message_of(ExitStatus::bad_request, [&] { read_data_args(dir / "empty"); }),
                       "is empty"));
  EXPECT_TRUE(contains(message_of(ExitStatus::bad_request, [&] { read_data_args(dir / "none"); }),
                       "cannot be opened"));
}

}  // namespace
}  // namespace troupe
