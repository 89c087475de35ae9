// Ids against those of the Python packages `tokenizers` and `sentencepiece`, token for token.
// tests/fixtures/make_tokenizer_references.py made them, and says how.
#include <algorithm>
#include <fstream>
#include <gtest/gtest.h>
#include <iterator>
#include <nlohmann/json.hpp>
#include <thread>

#include "data/data_test_support.h"
#include "data/make_tokenizer.h"
#include "data/utf8.h"

namespace troupe {
namespace {

constexpr size_t kSampleBytes = 8192;
constexpr size_t kLongBytes = 1'200'000;
constexpr size_t kPartBytes = 60'000;

// Knuth's MMIX linear congruential generator; the upper 31 bits.
class Lcg {
 public:
  uint32_t below(size_t bound) {
    state_ = state_ * 6364136223846793005 + 1442695040888963407;
    return static_cast<uint32_t>((state_ >> 33) % bound);
  }

 private:
  uint64_t state_ = 1;
};

// long_text() of make_tokenizer_references.py.
std::string long_text(const std::string& seed) {
  const std::vector<std::string> fillers = {" ", "\n", "\t", "\r\n"};
  Lcg random;
  std::string text = seed;
  while (text.size() < kLongBytes) {
    const size_t begin = random.below(seed.size());
    text += seed.substr(begin, 1 + random.below(400));
    switch (random.below(8)) {
      case 0: {
        const std::string& filler = fillers[random.below(4)];
        for (uint32_t count = random.below(40); count > 0; --count) text += filler;
        break;
      }
      case 1: {
        const auto byte = static_cast<char>(random.below(256));
        text.append(1 + random.below(3), byte);
        break;
      }
      case 2:
        append_utf8(0xa0 + random.below(0x2f00), text);
        break;
      case 3:
        text += std::to_string(random.below(size_t{1} << 31));
        break;
      default:
        break;
    }
  }
  text.resize(kLongBytes);
  return text;
}

// FNV-1a with 64 bits, over whole ids instead of bytes.
std::string hash_of(const std::vector<int32_t>& ids) {
  uint64_t value = 0xcbf29ce484222325;
  for (const int32_t id : ids) value = (value ^ static_cast<uint64_t>(id)) * 0x100000001b3;
  std::string hex(16, '0');
  for (size_t digit = 16; digit-- > 0; value >>= 4) hex[digit] = "0123456789abcdef"[value & 15];
  return hex;
}

std::string fixture(const std::string& name) {
  return std::string(TROUPE_FIXTURE_DIR) + "/tokenizers/" + name;
}

struct Reference {
  const char* name;
  const char* type;
  const char* eod = "";  // where a text can hold it
};

class TokenizerReference : public ::testing::TestWithParam<Reference> {
 protected:
  TokenizerReference()
      : tokenizer_(make_tokenizer(read_tokenizer_model(GetParam().type, fixture(GetParam().name)))),
        references_(nlohmann::json::parse(get_file(fixture(GetParam().name) + "/references.json"))),
        seed_(get_file(fixture("seed.bin"))) {}

  std::vector<int32_t> encode(std::string_view text) const {
    std::vector<int32_t> ids;
    tokenizer_->encode(text, ids);
    return ids;
  }

  // The tokens around a position, for a message.
  std::string around(const std::vector<int32_t>& ids, size_t at) const {
    std::string text;
    for (size_t i = at > 4 ? at - 4 : 0; i < std::min(ids.size(), at + 5); ++i) {
      const std::string piece(tokenizer_->piece(ids[i]));
      text += std::to_string(ids[i]) + " " + ::testing::PrintToString(piece) + ", ";
    }
    return text;
  }

  std::unique_ptr<Tokenizer> tokenizer_;
  nlohmann::json references_;
  std::string seed_;
};

TEST_P(TokenizerReference, SampleHasTheSameIds) {
  const auto expected = references_.at("sample_ids").get<std::vector<int32_t>>();
  const std::vector<int32_t> ids = encode(std::string_view(seed_).substr(0, kSampleBytes));
  const size_t both = std::min(ids.size(), expected.size());
  for (size_t i = 0; i < both; ++i) {
    ASSERT_EQ(ids[i], expected[i]) << "token " << i << "\nhere:      " << around(ids, i)
                                   << "\nreference: " << around(expected, i);
  }
  EXPECT_EQ(ids.size(), expected.size());
}

TEST_P(TokenizerReference, LongTextHasTheSameIds) {
  const std::string text = long_text(seed_);
  const auto hashes = references_.at("part_hashes").get<std::vector<std::string>>();
  ASSERT_EQ(hashes.size(), kLongBytes / kPartBytes);
  size_t tokens = 0;
  for (size_t part = 0; part < hashes.size(); ++part) {
    const std::vector<int32_t> ids =
        encode(std::string_view(text).substr(part * kPartBytes, kPartBytes));
    EXPECT_EQ(hash_of(ids), hashes[part])
        << "other ids in part " << part << ", which has " << ids.size() << " here";
    tokens += ids.size();
  }
  EXPECT_EQ(tokens, references_.at("long_tokens").get<size_t>());
}

TEST_P(TokenizerReference, SampleDecodesToTheSameText) {
  const auto ids = references_.at("sample_ids").get<std::vector<int32_t>>();
  auto expected = references_.at("sample_decoded").get<std::string>();
  // The end of a document stands for no text here; the reference was told to write it out.
  const std::string eod = GetParam().eod;
  for (size_t at = 0; !eod.empty() && (at = expected.find(eod, at)) != std::string::npos;) {
    expected.erase(at, eod.size());
  }
  std::string storage;
  EXPECT_EQ(replace_invalid_utf8(tokenizer_->decode(ids), storage), expected);
}

TEST_P(TokenizerReference, ThreadsDoNotDisturbEachOther) {
  const std::string text = long_text(seed_).substr(0, 200'000);
  const std::vector<int32_t> expected = encode(text);
  std::vector<std::vector<int32_t>> ids(3);
  std::vector<std::thread> threads;
  for (auto& own : ids) {
    threads.emplace_back([&] {
      for (int repeat = 0; repeat < 3; ++repeat) {
        own.clear();
        tokenizer_->encode(text, own);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& own : ids) EXPECT_TRUE(own == expected);
}

INSTANTIATE_TEST_SUITE_P(
    Models, TokenizerReference,
    ::testing::Values(Reference{"gpt2", "HuggingFaceTokenizer", "<|endoftext|>"},
                      Reference{"llama3", "HuggingFaceTokenizer", "<|end_of_text|>"},
                      Reference{"qwen", "HuggingFaceTokenizer", "<|endoftext|>"},
                      Reference{"deepseek", "HuggingFaceTokenizer"},
                      Reference{"unusual", "HuggingFaceTokenizer", "</s>"},
                      Reference{"unigram", "SentencePieceTokenizer"},
                      Reference{"unigram_byte_fallback", "SentencePieceTokenizer"},
                      Reference{"bpe", "SentencePieceTokenizer"},
                      Reference{"bpe_byte_fallback", "SentencePieceTokenizer"}),
    [](const auto& info) { return std::string(info.param.name); });

// Tokenizers that keep every character give valid text back, byte for byte.
class TokenizerRoundTrip : public ::testing::TestWithParam<Reference> {};

TEST_P(TokenizerRoundTrip, ValidTextComesBack) {
  const auto tokenizer =
      make_tokenizer(read_tokenizer_model(GetParam().type, fixture(GetParam().name)));
  std::string storage;
  std::string valid(replace_invalid_utf8(long_text(get_file(fixture("seed.bin"))), storage));
  // No text that stands for the end of a document, which decodes to nothing.
  for (char& c : valid) {
    if (c == '|') c = '!';
  }
  std::vector<int32_t> ids;
  tokenizer->encode(valid, ids);
  EXPECT_TRUE(tokenizer->decode(ids) == valid);
}

INSTANTIATE_TEST_SUITE_P(
    Models, TokenizerRoundTrip,
    ::testing::Values(Reference{"gpt2", "HuggingFaceTokenizer"},
                      Reference{"llama3", "HuggingFaceTokenizer"},
                      Reference{"deepseek", "HuggingFaceTokenizer"},
                      Reference{"unigram_byte_fallback", "SentencePieceTokenizer"},
                      Reference{"bpe_byte_fallback", "SentencePieceTokenizer"}),
    [](const auto& info) { return std::string(info.param.name); });

// Qwen's normalizer changes text; what it has changed once stays.
TEST(TokenizerRoundTripNfc, NormalizedTextComesBack) {
  const auto tokenizer =
      make_tokenizer(read_tokenizer_model("HuggingFaceTokenizer", fixture("qwen")));
  std::vector<int32_t> ids;
  tokenizer->encode(long_text(get_file(fixture("seed.bin"))), ids);
  const std::string once = tokenizer->decode(ids);
  ids.clear();
  tokenizer->encode(once, ids);
  EXPECT_TRUE(tokenizer->decode(ids) == once);
}

}  // namespace
}  // namespace troupe
