#include <gtest/gtest.h>

#include "data/data_test_support.h"
#include "data/make_tokenizer.h"

namespace troupe {
namespace {

TEST(ByteTokenizer, EveryByteRoundTrips) {
  const auto tokenizer = make_tokenizer({});
  EXPECT_EQ(tokenizer->name(), "byte");
  EXPECT_EQ(tokenizer->vocab_size(), 257);
  EXPECT_EQ(tokenizer->eod(), 256);
  std::string bytes;
  for (int byte = 0; byte < 256; ++byte) bytes.push_back(static_cast<char>(byte));
  std::vector<int32_t> ids = {256};
  tokenizer->encode(bytes, ids);
  ASSERT_EQ(ids.size(), 257U);
  EXPECT_EQ(ids[0], 256);
  for (int32_t byte = 0; byte < 256; ++byte) EXPECT_EQ(ids[static_cast<size_t>(byte) + 1], byte);
  EXPECT_EQ(tokenizer->decode(ids), bytes);
}

TEST(ByteTokenizer, InvalidUtf8RoundTrips) {
  const auto tokenizer = make_tokenizer({});
  // A lone continuation byte, an overlong encoding, a surrogate, a cut character, a zero byte.
  const std::string text("\x80 \xc0\xaf \xed\xa0\x80 \xe2\x82 \0 end", 15);
  std::vector<int32_t> ids;
  tokenizer->encode(text, ids);
  EXPECT_EQ(tokenizer->decode(ids), text);
}

TEST(ByteTokenizer, ForeignIdsAreRefused) {
  const auto tokenizer = make_tokenizer({});
  for (const int32_t id : {-1, 257, 50256}) {
    const std::string message = message_of(ExitStatus::failed, [&] {
      tokenizer->decode(std::vector<int32_t>{65, id});
    });
    EXPECT_TRUE(contains(message, "token id " + std::to_string(id))) << message;
  }
}

TEST(ReadTokenizerModel, UnknownTypeListsTheKnown) {
  const std::string message =
      message_of(ExitStatus::bad_request, [] { read_tokenizer_model("bytes", ""); });
  EXPECT_TRUE(contains(message, "'bytes'")) << message;
  EXPECT_TRUE(contains(message, "known types: byte")) << message;
}

TEST(ReadTokenizerModel, ByteTakesNoFile) {
  const std::string message =
      message_of(ExitStatus::bad_request, [] { read_tokenizer_model("byte", "some.json"); });
  EXPECT_TRUE(contains(message, "some.json")) << message;
}

}  // namespace
}  // namespace troupe
