// Megatron's tokenizers without a tokenizer.json: ids against those of the package tiktoken
// (tests/fixtures/make_tiktoken_references.py), and of the tokenizer.json that means the same.
#include "data/megatron_tokenizers.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "data/data_test_support.h"
#include "data/make_tokenizer.h"
#include "data/utf8.h"
#include "support/errors.h"
#include "support/files.h"

namespace troupe {
namespace {

using namespace testing;
using nlohmann::json;

const std::string kTokenizers = TROUPE_FIXTURE_DIR "/tokenizers/";

std::vector<int32_t> ids_of(const Tokenizer& tokenizer, std::string_view text) {
  std::vector<int32_t> ids;
  tokenizer.encode(text, ids);
  return ids;
}

std::string refusal(const std::string& type, const std::string& path,
                    const TokenizerDetails& details = {}) {
  return message_of(ExitStatus::bad_request, [&] { read_tokenizer_model(type, path, details); });
}

// The begin of the seed text in valid UTF-8, as many characters as the references are of.
std::string sample() {
  std::string storage;
  const std::string text(replace_invalid_utf8(get_file(kTokenizers + "seed.bin"), storage));
  size_t at = 0;
  for (int i = 0; i < 6000; ++i) next_code_point(text, at);
  return text.substr(0, at);
}

TokenizerDetails small_tiktoken(const char* pattern) {
  return {.vocab_size = 900, .tiktoken_pattern = pattern, .tiktoken_num_special_tokens = 20};
}

TEST(TikTokenizer, IdsAreTiktokens) {
  const json references = json::parse(get_file(kTokenizers + "tiktoken/references.json"));
  const std::string text = sample();
  for (const char* pattern : {"v1", "v2"}) {
    const TokenizerModel model =
        read_tokenizer_model("TikTokenizer", kTokenizers + "tiktoken", small_tiktoken(pattern));
    EXPECT_EQ(model.pad, "<pad>");
    const auto tokenizer = make_tokenizer(model);
    EXPECT_EQ(tokenizer->vocab_size(), 900);
    EXPECT_EQ(tokenizer->eod(), 2) << "</s>";
    const std::vector<int32_t> ids = ids_of(*tokenizer, text);
    EXPECT_EQ(ids, references.at(pattern).get<std::vector<int32_t>>()) << pattern;
    EXPECT_EQ(ids_of(*tokenizer, "<mask>x<SPECIAL_19>"), (std::vector<int32_t>{3, 20 + 'x', 19}));
    std::string without_ends = text;  // </s> stands for no text
    without_ends.erase(without_ends.find("</s>"), 4);
    EXPECT_EQ(tokenizer->decode(ids), without_ends) << pattern;
  }
}

// With the ends of lines of either system, the last of which may be missing.
TEST(TikTokenizer, LinesMeanTheSameAsJson) {
  const TempFolder folder;
  for (const std::string end : {"\n", "\r\n"}) {
    std::string lines;
    for (const json& entry : json::parse(get_file(kTokenizers + "tiktoken/tokenizer.json"))) {
      lines += (lines.empty() ? "" : end) + entry.at("token_bytes").get<std::string>() + " " +
               std::to_string(entry.at("rank").get<int>());
    }
    put_file(folder / "list.tiktoken", lines);
    EXPECT_EQ(read_tokenizer_model("TikTokenizer", folder / "list.tiktoken", small_tiktoken("v2"))
                  .contents,
              read_tokenizer_model("TikTokenizer", kTokenizers + "tiktoken", small_tiktoken("v2"))
                  .contents);
  }
}

TEST(TikTokenizer, WrongFilesAndSizesAreRefused) {
  const TempFolder folder;
  const auto broken = [&](const std::string& text) {
    put_file(folder / "t.json", text);
    return message_of(ExitStatus::failed, [&] {
      read_tokenizer_model("TikTokenizer", folder / "t.json", small_tiktoken("v2"));
    });
  };
  EXPECT_NE(broken("[{\"rank\": 1, \"token_bytes\": \"AA==\"}]").find("entry 0: its rank"),
            std::string::npos);
  EXPECT_NE(broken("[{\"rank\": 0, \"token_bytes\": \"AQ==\"}]").find("not the bytes in order"),
            std::string::npos);
  EXPECT_NE(broken("[1]").find("entry 0: it has no rank"), std::string::npos);
  EXPECT_NE(broken("AA== x").find("entry 0: it has no rank"), std::string::npos);
  EXPECT_NE(broken("AA== 0x").find("entry 0: it has no rank"), std::string::npos);
  EXPECT_NE(broken("A!== 0").find("not base64"), std::string::npos);
  EXPECT_EQ(refusal("TikTokenizer", kTokenizers + "tiktoken", {}).find("--vocab-size 131072: "), 0U)
      << "as many as Megatron takes are not there";
  EXPECT_EQ(refusal("TikTokenizer", kTokenizers + "tiktoken",
                    {.vocab_size = 900, .tiktoken_num_special_tokens = 3})
                .find("--tiktoken-num-special-tokens 3: there are at least 7"),
            0U);
}

// A text in the list that is also the name of a special token would have two ids.
TEST(TikTokenizer, ASpecialTokenInTheListIsRefused) {
  const TempFolder folder;
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string lines;
  for (size_t byte = 0; byte < 256; ++byte) {
    lines += {kDigits[byte >> 2], kDigits[(byte & 3) << 4], '=', '='};
    lines += " " + std::to_string(byte) + "\n";
  }
  const TokenizerDetails details{.vocab_size = 264, .tiktoken_num_special_tokens = 7};
  const std::string path = folder / "list";
  const auto refused = [&] {
    return message_of(ExitStatus::failed,
                      [&] { read_tokenizer_model("TikTokenizer", path, details); });
  };
  put_file(path, lines + "PHM+ 256\n");
  EXPECT_EQ(refused(), path + ": it holds <s>, which is a special token");
  put_file(path, lines + "QQ== 256\n");
  EXPECT_NE(refused().find("entry 256: its bytes stand there before"), std::string::npos);
  put_file(path, lines + "QUI= 256\n");
  const auto tokenizer = make_tokenizer(read_tokenizer_model("TikTokenizer", path, details));
  EXPECT_EQ(ids_of(*tokenizer, "ABA"), (std::vector<int32_t>{7 + 256, 7 + 'A'}));
}

TEST(Gpt2BpeTokenizer, AVocabularyWithoutTheEndOfTextIsRefused) {
  const TempFolder folder;
  put_file(folder / "merges.txt", "a b\n");
  for (const char* vocabulary :
       {"[]", R"({"a": 0})", R"({"a": 0, "<|endoftext|>": "1"})", R"({"<|endoftext|>": 1.5})"}) {
    put_file(folder / "vocab.json", vocabulary);
    EXPECT_EQ(message_of(ExitStatus::failed,
                         [&] { read_tokenizer_model("GPT2BPETokenizer", folder.path()); }),
              (folder / "vocab.json") +
                  ": not a vocabulary of GPT-2's kind: a JSON object of tokens and ids, "
                  "<|endoftext|> among them");
  }
}

TEST(Gpt2BpeTokenizer, TwoFilesMeanTheSameAsTheTokenizerJson) {
  const TempFolder folder;
  const json whole = json::parse(get_file(kTokenizers + "gpt2/tokenizer.json"));
  json vocabulary = whole.at("model").at("vocab");
  for (const json& added : whole.at("added_tokens")) {
    if (added.at("content") == "<|endoftext|>") vocabulary["<|endoftext|>"] = added.at("id");
  }
  std::string merges = "#version: 0.2\n";
  for (const json& merge : whole.at("model").at("merges")) {
    merges += merge.is_string()
                  ? merge.get<std::string>() + "\n"
                  : merge[0].get<std::string>() + " " + merge[1].get<std::string>() + "\n";
  }
  put_file(folder / "vocab.json", vocabulary.dump());
  put_file(folder / "merges.txt", merges);
  const auto expected =
      make_tokenizer(read_tokenizer_model("HuggingFaceTokenizer", kTokenizers + "gpt2"));
  const auto in_folder = make_tokenizer(read_tokenizer_model("GPT2BPETokenizer", folder.path()));
  const TokenizerModel of_files = read_tokenizer_model(
      "GPT2BPETokenizer", "",
      {.vocab_file = folder / "vocab.json", .merge_file = folder / "merges.txt"});
  EXPECT_EQ(of_files.path, folder / "vocab.json") << "beside it lie the other files of a tokenizer";
  const auto named = make_tokenizer(of_files);
  const std::string text = get_file(kTokenizers + "seed.bin").substr(0, 20'000);
  EXPECT_EQ(in_folder->eod(), expected->eod());
  EXPECT_EQ(ids_of(*in_folder, text), ids_of(*expected, text));
  EXPECT_EQ(ids_of(*named, text), ids_of(*expected, text));
  EXPECT_EQ(refusal("GPT2BPETokenizer", "").find("--tokenizer-type GPT2BPETokenizer needs --vocab"),
            0U);
}

TEST(NullTokenizer, ReadsIdsInDecimal) {
  const auto tokenizer =
      make_tokenizer(read_tokenizer_model("NullTokenizer", "", {.vocab_size = 100}));
  EXPECT_EQ(tokenizer->vocab_size(), 100);
  EXPECT_EQ(tokenizer->eod(), 99);
  EXPECT_EQ(ids_of(*tokenizer, " 3 14\n15 99 "), (std::vector<int32_t>{3, 14, 15, 99}));
  EXPECT_EQ(tokenizer->decode(std::vector<int32_t>{3, 14, 99, 15}), "3 14 15 ");
  for (const char* text : {"x", "100", "-1", "1,2", "99999999999"}) {
    EXPECT_NE(message_of(ExitStatus::bad_request, [&] { ids_of(*tokenizer, text); }), "") << text;
  }
  const TokenizerModel other =
      read_tokenizer_model("NullTokenizer", "", {.vocab_size = 100, .eod = 7});
  EXPECT_EQ(make_tokenizer(other)->eod(), 7);
  EXPECT_EQ(make_tokenizer(other)->decode(std::vector<int32_t>{0, 7, 98, 99}), "0 98 99 ");
  EXPECT_FALSE(
      other.same_as(read_tokenizer_model("NullTokenizer", "", {.vocab_size = 100, .eod = 8})));
  EXPECT_EQ(refusal("NullTokenizer", "").find("--tokenizer-type NullTokenizer needs --vocab-size"),
            0U);
  EXPECT_EQ(read_tokenizer_model("NullTokenizer", "unknown/tokenizer", {.vocab_size = 9}).contents,
            "9 8");
  EXPECT_EQ(
      refusal("NullTokenizer", "", {.vocab_size = 9, .eod = 9}).find("--null-tokenizer-eod-id 9: "),
      0U);
  EXPECT_NE(message_of(ExitStatus::failed,
                       [] {
                         make_tokenizer(
                             {.type = "NullTokenizer", .path = "x", .contents = "12", .eod = ""});
                       }),
            "");
}

}  // namespace
}  // namespace troupe
