#include "data/sampler.h"

#include <algorithm>
#include <fstream>
#include <gtest/gtest.h>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "data/data_test_support.h"

namespace troupe {
namespace {

constexpr int32_t kEod = 60000;

// Documents of assorted lengths (one of them empty) in which every token is a different id, so that
// a token tells its place; each ends with kEod when `with_eod`.
std::vector<std::vector<int32_t>> make_documents(int count, bool with_eod = false) {
  std::vector<std::vector<int32_t>> documents;
  int32_t next = 0;
  for (int i = 0; i < count; ++i) {
    std::vector<int32_t> document(static_cast<size_t>(i * 5 % 11));
    for (int32_t& token : document) token = next++;
    if (with_eod) document.push_back(kEod);
    documents.push_back(document);
  }
  return documents;
}

struct Sample {
  std::vector<int32_t> tokens, labels;
  std::vector<float> mask;

  explicit Sample(int64_t length)
      : tokens(static_cast<size_t>(length)), labels(tokens.size()), mask(tokens.size()) {}
  bool operator==(const Sample&) const = default;
};

Sample sample_of(const SampleSource& source, int64_t i) {
  Sample sample(source.options().sequence_length);
  source.get(i, sample.tokens, sample.labels, sample.mask);
  return sample;
}

class SamplerTest : public ::testing::Test {
 protected:
  void write(const std::vector<std::vector<int32_t>>& documents) {
    documents_ = documents;
    write_dataset(dir_ / "set", documents);
    dataset_ = std::make_shared<IndexedDataset>(dir_ / "set");
  }

  static SampleOptions options(int64_t length, uint64_t seed,
                               std::optional<int64_t> samples = std::nullopt) {
    SampleOptions options;
    options.sequence_length = length;
    options.num_samples = samples;
    options.seed = seed;
    options.vocab_size = kEod + 1;
    options.eod = kEod;
    return options;
  }

  SequenceRange all() const { return {0, dataset_->num_sequences()}; }

  SampleSource source(const SampleOptions& options) const {
    return SampleSource({{.dataset = dataset_, .sequences = all()}}, {}, options);
  }

  TempFolder dir_;
  std::vector<std::vector<int32_t>> documents_;
  std::shared_ptr<IndexedDataset> dataset_;
};

TEST(SplitSequences, Boundaries) {
  struct Case {
    const char* weights;
    int64_t sequences;
    std::array<int64_t, 3> ends;
  };
  const std::vector<Case> cases = {
      {"969,30,1", 1000, {969, 999, 1000}},
      {"969,30,1", 10, {10, 10, 10}},
      {"95,5,0", 1189, {1130, 1189, 1189}},
      {"1", 7, {7, 7, 7}},
      {"0,1", 7, {0, 7, 7}},
      {"0.5, 0.25 ,0.25", 8, {4, 6, 8}},
      {"1,1,0", 5, {2, 5, 5}},  // 2.5 is rounded to even
      {"3,1,0", 2, {2, 2, 2}},  // 1.5 is rounded to even
      {"1,1,1", 1, {0, 1, 1}},
      {"969,30,1", 0, {0, 0, 0}},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.weights);
    const auto ranges = split_sequences(c.weights, c.sequences);
    int64_t begin = 0;
    for (size_t j = 0; j < 3; ++j) {
      EXPECT_EQ(ranges[j].begin, begin);
      EXPECT_EQ(ranges[j].end, c.ends[j]);
      begin = c.ends[j];
    }
  }
}

TEST(SplitSequences, MalformedStringsAreRefused) {
  for (const char* weights : {"", ",", "1,", "a", "1;2", "1,2,3,4", "-1,2", "0,0", "nan", "inf,1",
                              "1e308,1e308", "1 2", "0x10"}) {
    SCOPED_TRACE(weights);
    const std::string message =
        message_of(ExitStatus::bad_request, [&] { split_sequences(weights, 10); });
    EXPECT_TRUE(contains(message, std::string("'") + weights + "'")) << message;
  }
}

// The samples of the references, token by token.
TEST_F(SamplerTest, FirstSamplesEqualTheReferences) {
  std::ifstream file(TROUPE_FIXTURE_DIR "/dataset/references.json");
  const nlohmann::json references = nlohmann::json::parse(file);
  int number = 0;
  for (const nlohmann::json& reference : references["orders"]) {
    SCOPED_TRACE(number);
    std::vector<std::vector<int32_t>> documents;
    std::vector<int32_t> first_of;
    int32_t next = 0;
    for (const int32_t length : reference["lengths"]) {
      first_of.push_back(next);
      std::vector<int32_t> document(static_cast<size_t>(length));
      for (int32_t& token : document) token = next++;
      documents.push_back(document);
    }
    const std::string prefix = dir_ / ("set" + std::to_string(number++));
    write_dataset(prefix, documents);
    dataset_ = std::make_shared<IndexedDataset>(prefix);
    SampleOptions wanted = options(reference["sequence_length"], reference["seed"]);
    if (!reference["num_samples"].is_null()) wanted.num_samples = reference["num_samples"];
    wanted.keep_partial = reference["keep_partial"];
    const SampleSource samples = source(wanted);
    ASSERT_EQ(samples.num_samples(), static_cast<int64_t>(reference["shuffle"].size()));

    const Sample sample = sample_of(samples, 0);
    std::vector<int32_t> expected;
    for (const nlohmann::json& place : reference["first_sample"]) {
      expected.push_back(first_of[place[0].get<size_t>()] + place[1].get<int32_t>());
    }
    const auto length = static_cast<std::ptrdiff_t>(sample.tokens.size());
    const auto read = static_cast<std::ptrdiff_t>(expected.size());
    expected.resize(sample.tokens.size() + 1);
    EXPECT_EQ(sample.tokens, std::vector<int32_t>(expected.begin(), expected.end() - 1));
    EXPECT_EQ(sample.labels, std::vector<int32_t>(expected.begin() + 1, expected.end()));
    EXPECT_EQ(std::count(sample.mask.begin(), sample.mask.end(), 1.0F), std::min(length, read - 1));
  }
}

// Independent of how the orders are drawn: within an epoch every input appears once, the samples
// chain up by their one shared token, and what is left out is a tail shorter than a sample.
TEST_F(SamplerTest, AnEpochCoversItsStreamOnce) {
  write(make_documents(40));
  constexpr int64_t kLength = 6;
  const SampleSource samples = source(options(kLength, 7));
  std::vector<int> seen(static_cast<size_t>(dataset_->num_tokens()));
  std::vector<int> first(seen.size());
  std::vector<int32_t> last_labels;
  for (int64_t i = 0; i < samples.num_samples(); ++i) {
    const Sample sample = sample_of(samples, i);
    for (const int32_t token : sample.tokens) ++seen[static_cast<size_t>(token)];
    first[static_cast<size_t>(sample.tokens.front())] = 1;
    last_labels.push_back(sample.labels.back());
    EXPECT_EQ(sample.mask, std::vector<float>(kLength, 1.0F));
  }
  int shared = 0;
  for (const int32_t token : last_labels) shared += first[static_cast<size_t>(token)];
  EXPECT_EQ(shared, samples.num_samples() - 1);
  EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), samples.num_samples() * kLength);
  const auto unused = std::count(seen.begin(), seen.end(), 0);
  EXPECT_EQ(unused, dataset_->num_tokens() - samples.num_samples() * kLength);
  EXPECT_LE(unused, kLength);
}

TEST_F(SamplerTest, SamplesAreAFunctionOfTheirNumber) {
  write(make_documents(30));
  const SampleSource one = source(options(5, 3, 100));
  const SampleSource two = source(options(5, 3, 100));
  ASSERT_GE(one.num_samples(), 100);
  for (int64_t i = one.num_samples() - 1; i >= 0; --i) {
    const int64_t other = i * 7 % one.num_samples();
    EXPECT_EQ(sample_of(one, other), sample_of(two, other)) << other;
  }
}

TEST_F(SamplerTest, ConcurrentReadersAgree) {
  write(make_documents(30));
  const SampleSource samples = source(options(5, 3, 150));
  const int64_t count = samples.num_samples();
  std::vector<Sample> expected;
  for (int64_t i = 0; i < count; ++i) expected.push_back(sample_of(samples, i));
  std::vector<int> wrong(4);
  std::vector<std::thread> threads;
  for (int64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int64_t i = 0; i < count; ++i) {
        const int64_t drawn = (i * 7 + t * 13) % count;
        if (sample_of(samples, drawn) != expected[static_cast<size_t>(drawn)]) {
          ++wrong[static_cast<size_t>(t)];
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, std::vector<int>(4));
}

TEST_F(SamplerTest, SeedsDiffer) {
  write(make_documents(30));
  const SampleSource one = source(options(5, 1));
  const SampleSource two = source(options(5, 2));
  int64_t same = 0;
  for (int64_t i = 0; i < one.num_samples(); ++i) same += sample_of(one, i) == sample_of(two, i);
  EXPECT_LT(same, one.num_samples() / 2);
}

TEST_F(SamplerTest, SamplesStayInTheirRange) {
  write(make_documents(20));
  const SampleSource samples({{.dataset = dataset_, .sequences = {3, 9}}}, {}, options(4, 1, 40));
  const int32_t begin = documents_[3].front();
  const int32_t end = documents_[8].back();
  for (int64_t i = 0; i < samples.num_samples(); ++i) {
    const Sample sample = sample_of(samples, i);
    EXPECT_GE(*std::min_element(sample.tokens.begin(), sample.tokens.end()), begin);
    EXPECT_LE(*std::max_element(sample.labels.begin(), sample.labels.end()), end);
  }
}

TEST_F(SamplerTest, EndOfDocumentMask) {
  write(make_documents(20, true));
  SampleOptions wanted = options(8, 1);
  const SampleSource plain = source(wanted);
  wanted.eod_mask_loss = true;
  const SampleSource masked = source(wanted);
  int zeros = 0;
  for (int64_t i = 0; i < masked.num_samples(); ++i) {
    const Sample sample = sample_of(masked, i);
    EXPECT_EQ(sample.tokens, sample_of(plain, i).tokens);
    for (size_t t = 0; t < sample.tokens.size(); ++t) {
      EXPECT_EQ(sample.mask[t], sample.tokens[t] == kEod ? 0.0F : 1.0F);
      zeros += sample.mask[t] == 0.0F;
      EXPECT_EQ(sample_of(plain, i).mask[t], 1.0F);
    }
  }
  EXPECT_GT(zeros, 0);
}

TEST_F(SamplerTest, ThePartialSampleIsPaddedWithoutLoss) {
  write({{1, 2}, {}, {3, 4, 5, 6, 7}});
  SampleOptions wanted = options(4, 1);
  EXPECT_EQ(source(wanted).num_samples(), 1);
  wanted.keep_partial = true;
  const SampleSource samples = source(wanted);
  ASSERT_EQ(samples.num_samples(), 2);
  int partial = 0;
  std::map<int32_t, int> labels;
  for (int64_t i = 0; i < 2; ++i) {
    const Sample sample = sample_of(samples, i);
    for (size_t t = 0; t < 4; ++t) {
      if (sample.mask[t] != 0) ++labels[sample.labels[t]];
    }
    if (sample.mask.back() != 0) continue;
    ++partial;
    EXPECT_EQ(sample.mask, (std::vector<float>{1, 1, 0, 0}));
    EXPECT_EQ(sample.tokens[3], 0);
    EXPECT_GT(sample.tokens[2], 0) << "the last token of the data is an input without a label";
    EXPECT_EQ(sample.labels[2], 0);
    EXPECT_EQ(sample.labels[3], 0);
  }
  EXPECT_EQ(partial, 1);
  EXPECT_EQ(labels.size(), 6U) << "every token but the first is a label once";
}

// What a buffer held before is no end of a document.
TEST_F(SamplerTest, ThePaddingOfAPartialSampleStartsNoDocument) {
  write({{1, kEod, 3}});
  SampleOptions wanted = options(6, 1);
  wanted.eod = kEod;
  wanted.keep_partial = true;
  wanted.reset_attention_mask = true;
  const SampleSource samples = source(wanted);
  ASSERT_EQ(samples.num_samples(), 1);
  std::vector<int32_t> tokens(6, kEod), labels(6), starts(6);
  std::vector<float> mask(6);
  samples.get(0, tokens, labels, mask, {}, starts);
  EXPECT_EQ(tokens, (std::vector<int32_t>{1, kEod, 3, 0, 0, 0}));
  EXPECT_EQ(starts, (std::vector<int32_t>{0, 0, 2, 2, 2, 2}));
}

TEST_F(SamplerTest, AFewTokensMakeManySamplesButNotOneEpoch) {
  write({{1, 2}, {}, {3, 4, 5}});
  EXPECT_EQ(source(options(4, 1)).num_samples(), 1);
  EXPECT_GE(source(options(5, 1, 8)).num_samples(), 8);
  const std::string message = message_of(ExitStatus::bad_request, [&] { source(options(5, 1)); });
  EXPECT_TRUE(contains(message, "has 5 tokens")) << message;
  EXPECT_TRUE(contains(message, "takes 6")) << message;
  EXPECT_TRUE(contains(message, dir_ / "set")) << message;
}

TEST_F(SamplerTest, OneDocumentHasNoValidationSplit) {
  write({{1, 2, 3, 4, 5, 6, 7, 8}});
  SampleOptions wanted = options(2, 1);
  wanted.split = Split::validation;
  const SequenceRange range = split_sequences("969,30,1", dataset_->num_sequences())[1];
  for (const std::optional<int64_t> samples :
       {std::optional<int64_t>(), std::optional<int64_t>(3)}) {
    wanted.num_samples = samples;
    const std::string message = message_of(ExitStatus::bad_request, [&] {
      SampleSource({{.dataset = dataset_, .sequences = range}}, {}, wanted);
    });
    EXPECT_TRUE(contains(message, "the validation split")) << message;
    EXPECT_TRUE(contains(message, "0 tokens in 0 of the data set's 1 sequences")) << message;
    EXPECT_TRUE(contains(message, "split it at blank lines")) << message;
  }
}

TEST_F(SamplerTest, LengthAndSeedHaveTheirLimits) {
  write({{1, 2, 3}});
  for (const int64_t length : {0, -4}) {
    const std::string message =
        message_of(ExitStatus::bad_request, [&] { source(options(length, 1)); });
    EXPECT_TRUE(contains(message, "sequence length of " + std::to_string(length))) << message;
  }
  EXPECT_EQ(source(options(2, 0xffffffff)).num_samples(), 1);
  EXPECT_TRUE(
      contains(message_of(ExitStatus::bad_request, [&] { source(options(2, uint64_t{1} << 32)); }),
               "--seed 4294967296"));
}

TEST_F(SamplerTest, ForeignIdsAreReportedWithTheirPlace) {
  write({{1, 2, 3}, {4, 257, 6}});
  SampleOptions wanted = options(5, 1);
  wanted.vocab_size = 258;
  sample_of(source(wanted), 0);
  wanted.vocab_size = 257;
  const SampleSource samples = source(wanted);
  const std::string message = message_of(ExitStatus::bad_request, [&] { sample_of(samples, 0); });
  EXPECT_TRUE(contains(message, "token 1 of sequence 1 is 257")) << message;
  EXPECT_TRUE(contains(message, dir_ / "set.bin")) << message;
}

// Three data sets whose ids tell them apart.
class BlendedSamplerTest : public ::testing::Test {
 protected:
  BlendedSamplerTest() {
    for (int32_t set = 0; set < 3; ++set) {
      std::vector<std::vector<int32_t>> documents;
      for (int i = 0; i < 10 * (set + 1); ++i) {
        documents.emplace_back(static_cast<size_t>(9 + i % 3), 1000 * (set + 1) + i);
      }
      const std::string prefix = dir_ / ("set" + std::to_string(set));
      write_dataset(prefix, documents);
      const auto dataset = std::make_shared<IndexedDataset>(prefix);
      members_.push_back({.dataset = dataset, .sequences = {0, dataset->num_sequences()}});
    }
    options_.sequence_length = 4;
    options_.seed = 5;
    options_.vocab_size = 10000;
  }

  SampleSource source(const std::vector<double>& weights) const {
    return SampleSource(members_, weights, options_);
  }

  TempFolder dir_;
  std::vector<SourceMember> members_;
  SampleOptions options_;
};

TEST_F(BlendedSamplerTest, SamplesComeFromTheDataSetOfTheBlend) {
  options_.num_samples = 200;
  const SampleSource samples = source({1, 1, 2});
  ASSERT_EQ(samples.num_samples(), 200);
  const std::vector<double> shares = {0.25, 0.25, 0.5};
  const std::vector<int64_t> plenty(3, 1000);
  const BlendOrder blend(shares, plenty, 200, false);
  for (int64_t i = 0; i < 200; ++i) {
    const size_t member = blend.member(i);
    SampleOptions alone = options_;
    alone.num_samples = samples_to_request(200, shares[member]);
    const SampleSource single({members_[member]}, {}, alone);
    EXPECT_EQ(sample_of(samples, i), sample_of(single, blend.sample(i))) << i;
  }
  const auto uses = samples.use_of(200);
  ASSERT_EQ(uses.size(), 3U);
  EXPECT_EQ(uses[0].samples, 50);
  EXPECT_EQ(uses[2].samples, 100);
  EXPECT_EQ(uses[2].documents, 30);
  EXPECT_EQ(uses[0].tokens, members_[0].dataset->num_tokens());
  EXPECT_DOUBLE_EQ(uses[0].epochs, 200.0 / static_cast<double>(uses[0].tokens));
}

// Also a single data set with a weight has the surplus of a blend, as in Megatron.
TEST_F(BlendedSamplerTest, OneWeightIsABlend) {
  members_.resize(1);
  const int64_t tokens = members_[0].dataset->num_tokens();
  options_.num_samples = (tokens - 1) / 4;
  EXPECT_EQ(source({0.3}).num_samples(), *options_.num_samples);
  EXPECT_NE(sample_of(source({0.3}), 0), sample_of(source({}), 0)) << "two epochs against one";
}

TEST_F(BlendedSamplerTest, WithoutWeightsEverySampleIsReadOnce) {
  int64_t total = 0;
  for (const SourceMember& member : members_) total += (member.dataset->num_tokens() - 1) / 4;
  const SampleSource samples = source({});
  EXPECT_EQ(samples.num_samples(), total);
  const auto uses = samples.use_of(total);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(uses[i].samples, (members_[i].dataset->num_tokens() - 1) / 4);
  }
  options_.num_samples = total;
  EXPECT_EQ(source({}).num_samples(), total);
  options_.num_samples = total + 1;
  const std::string message = message_of(ExitStatus::bad_request, [&] { source({}); });
  EXPECT_TRUE(contains(message, "give each a weight")) << message;
}

// As evaluation reads: each data set once, until one is spent.
TEST_F(BlendedSamplerTest, OnePassKeepsTheWeights) {
  const SampleSource samples = source({1, 1, 1});
  const int64_t smallest = (members_[0].dataset->num_tokens() - 1) / 4;
  EXPECT_EQ(samples.num_samples(), 3 * smallest);
}

// An order made for fewer samples goes on beyond them, unchanged, as far as it holds any.
TEST_F(BlendedSamplerTest, MoreMayBeReadThanWereAskedFor) {
  options_.num_samples = 50;
  const SampleSource asked = source({1, 1, 2});
  options_.num_read = 70;
  const SampleSource read = source({1, 1, 2});
  EXPECT_EQ(read.num_samples(), 70);
  for (int64_t i = 0; i < 50; ++i) EXPECT_EQ(sample_of(read, i), sample_of(asked, i)) << i;
  options_.num_read = 100000;
  const int64_t held = source({1, 1, 2}).num_samples();
  EXPECT_GE(held, 70);
  EXPECT_LT(held, 100000);
}

TEST_F(BlendedSamplerTest, AnEmptySplitOfOneDataSetIsNamed) {
  members_[1].sequences = {4, 4};
  options_.num_samples = 10;
  const std::string message = message_of(ExitStatus::bad_request, [&] { source({1, 1, 1}); });
  EXPECT_TRUE(contains(message, dir_ / "set1")) << message;
}

// As in Megatron: no loss where the label is padding, and 0 in place of padding.
TEST_F(SamplerTest, PaddingHasNoLossAndBecomesZero) {
  write({{5, 9, 7, 9, 9, 8, kEod, 6, 9}});
  SampleOptions wanted = options(4, 1);
  wanted.eod_mask_loss = true;
  const SampleSource plain = source(wanted);
  wanted.pad = 9;
  const SampleSource padded = source(wanted);
  ASSERT_EQ(padded.num_samples(), 2);
  for (int64_t i = 0; i < 2; ++i) {
    const Sample before = sample_of(plain, i);
    const Sample after = sample_of(padded, i);
    for (size_t at = 0; at < 4; ++at) {
      EXPECT_EQ(after.tokens[at], before.tokens[at] == 9 ? 0 : before.tokens[at]);
      EXPECT_EQ(after.labels[at], before.labels[at] == 9 ? 0 : before.labels[at]);
      const bool counts = before.labels[at] != 9 && before.tokens[at] != kEod;
      EXPECT_EQ(after.mask[at], counts ? 1.0F : 0.0F) << i << " " << at;
    }
  }
}

std::vector<int32_t> starts_of(const SampleSource& source, int64_t i) {
  Sample sample(source.options().sequence_length);
  std::vector<int32_t> starts(sample.tokens.size(), -1);
  source.get(i, sample.tokens, sample.labels, sample.mask, {}, starts);
  return starts;
}

// The id that ends a document belongs to it; the token after it is in another one.
TEST_F(SamplerTest, KnowsWhereDocumentsBegin) {
  write(make_documents(20, true));
  SampleOptions wanted = options(8, 1);
  const SampleSource plain = source(wanted);
  wanted.reset_attention_mask = true;
  const SampleSource cut = source(wanted);
  int documents = 0;
  for (int64_t i = 0; i < cut.num_samples(); ++i) {
    const Sample sample = sample_of(cut, i);
    EXPECT_EQ(sample, sample_of(plain, i));
    EXPECT_EQ(starts_of(plain, i), std::vector<int32_t>(8, 0));
    const std::vector<int32_t> starts = starts_of(cut, i);
    EXPECT_EQ(starts[0], 0);
    for (size_t t = 1; t < sample.tokens.size(); ++t) {
      const bool begins = sample.tokens[t - 1] == kEod;
      EXPECT_EQ(starts[t], begins ? static_cast<int32_t>(t) : starts[t - 1]) << i << " " << t;
      documents += begins;
    }
  }
  EXPECT_GT(documents, 0);
}

// As a token, padding becomes 0, and so does what is beyond the end of the data; even where 0 ends
// documents neither does.
TEST_F(SamplerTest, PaddingEndsNoDocument) {
  write({{5, 9, 0, 9, 9, 8, 3}});
  SampleOptions wanted = options(4, 1);
  wanted.eod = 0;
  wanted.pad = 9;
  wanted.keep_partial = true;
  wanted.reset_attention_mask = true;
  const SampleSource samples = source(wanted);
  ASSERT_EQ(samples.num_samples(), 2);
  const bool swapped = sample_of(samples, 0).tokens[0] != 5;
  EXPECT_EQ(starts_of(samples, swapped ? 1 : 0), (std::vector<int32_t>{0, 0, 0, 3}));
  EXPECT_EQ(starts_of(samples, swapped ? 0 : 1), (std::vector<int32_t>{0, 0, 0, 0}));
}

std::vector<int32_t> valid_of(const SampleSource& source, int64_t i) {
  Sample sample(source.options().sequence_length);
  std::vector<int32_t> valid(sample.tokens.size(), -1);
  source.get(i, sample.tokens, sample.labels, sample.mask, valid);
  return valid;
}

TEST_F(SamplerTest, KnowsWhichInputsArePadding) {
  write({{5, 9, 0, 9, 9, 8, kEod, 6, 9}});
  SampleOptions wanted = options(4, 1);
  const SampleSource plain = source(wanted);
  wanted.pad = 9;
  const SampleSource padded = source(wanted);
  ASSERT_EQ(padded.num_samples(), 2);
  for (int64_t i = 0; i < 2; ++i) {
    const Sample before = sample_of(plain, i);
    EXPECT_EQ(valid_of(plain, i), std::vector<int32_t>(4, 1));
    const std::vector<int32_t> valid = valid_of(padded, i);
    for (size_t at = 0; at < 4; ++at) {
      EXPECT_EQ(valid[at], before.tokens[at] == 9 ? 0 : 1) << i << " " << at;
    }
  }
}

TEST_F(SamplerTest, WhatIsBeyondThePartialSampleIsPadding) {
  write({{5, 9, 7, 3, 8, 6}});
  SampleOptions wanted = options(4, 1);
  wanted.num_samples.reset();
  wanted.keep_partial = true;
  wanted.pad = 9;
  const SampleSource partial = source(wanted);
  ASSERT_EQ(partial.num_samples(), 2);
  // Of the second sample 8 and 6 are there, one of which has a label.
  std::vector<std::vector<int32_t>> found = {valid_of(partial, 0), valid_of(partial, 1)};
  std::sort(found.begin(), found.end());
  EXPECT_EQ(found[0], (std::vector<int32_t>{1, 0, 1, 1}));
  EXPECT_EQ(found[1], (std::vector<int32_t>{1, 1, 0, 0}));
}

}  // namespace
}  // namespace troupe
