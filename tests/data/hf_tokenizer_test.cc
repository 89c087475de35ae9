// What a tokenizer.json says, and what is wrong with it. Ids of real files:
// tokenizer_reference_test.
#include "data/hf_tokenizer.h"

#include <functional>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "data/byte_tokenizer_json.h"
#include "data/data_test_support.h"
#include "data/hf_tokenizer_file.h"
#include "data/make_tokenizer.h"

namespace troupe {
namespace {

using nlohmann::json;

// The smallest file that works: the 256 bytes (ids 0 to 255, in the order of their characters), two
// merges, and the end of a document.
json small_file() {
  json vocab;
  int32_t id = 0;
  for (int byte = 0; byte < 256; ++byte) {
    const bool visible = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte != 0xad);
    if (!visible) continue;
    std::string name;
    if (byte < 0x80) {
      name = static_cast<char>(byte);
    } else {
      name = {static_cast<char>(0xc0 | byte >> 6), static_cast<char>(0x80 | (byte & 0x3f))};
    }
    vocab[name] = id++;
  }
  for (int next = 0x100; id < 256; ++next) {
    vocab[{static_cast<char>(0xc0 | next >> 6), static_cast<char>(0x80 | (next & 0x3f))}] = id++;
  }
  vocab["ab"] = 256;
  vocab["abc"] = 257;
  vocab["whole"] = 258;
  return {{"version", "1.0"},
          {"added_tokens", {{{"id", 259}, {"content", "<|endoftext|>"}, {"special", true}}}},
          {"normalizer", nullptr},
          {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}}},
          {"post_processor", nullptr},
          {"decoder", {{"type", "ByteLevel"}}},
          {"model",
           {{"type", "BPE"},
            {"vocab", vocab},
            {"merges", json::array({json::array({"a", "b"}), json::array({"ab", "c"})})},
            {"ignore_merges", false}}}};
}

std::unique_ptr<Tokenizer> make(const json& file, const std::string& eod = "") {
  return make_tokenizer({.type = "HuggingFaceTokenizer",
                         .path = "some/tokenizer.json",
                         .contents = file.dump(),
                         .eod = eod});
}

std::vector<int32_t> encode(const Tokenizer& tokenizer, std::string_view text) {
  std::vector<int32_t> ids;
  tokenizer.encode(text, ids);
  return ids;
}

using Ids = std::vector<int32_t>;

// The byte tokenizer as a file for others means the bytes themselves.
TEST(HfTokenizer, FileOfTheByteTokenizer) {
  const auto tokenizer = make(json::parse(byte_tokenizer_json()), "<|endoftext|>");
  for (int byte = 0; byte < 256; ++byte) {
    EXPECT_EQ(tokenizer->decode(Ids{byte}), std::string(1, static_cast<char>(byte))) << byte;
  }
  EXPECT_EQ(encode(*tokenizer, "a \n\u00ad"), (Ids{'a', ' ', '\n', 0xc2, 0xad}));
}

// What other libraries read in it beside the ids: nothing is normalised, joined, filled or added.
TEST(HfTokenizer, FieldsOfTheByteTokenizer) {
  json file = json::parse(byte_tokenizer_json());
  EXPECT_EQ(file["model"]["vocab"].size(), 257U);
  EXPECT_EQ(file["model"]["vocab"]["<|endoftext|>"], 256);
  file["model"].erase("vocab");
  EXPECT_EQ(file, json::parse(R"({
    "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
    "post_processor": null,
    "added_tokens": [{"id": 256, "content": "<|endoftext|>", "single_word": false,
                      "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                      "use_regex": true},
    "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                "use_regex": true},
    "model": {"type": "BPE", "dropout": null, "unk_token": null,
              "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
              "byte_fallback": false, "ignore_merges": false, "merges": []}})"));
  EXPECT_EQ(json::parse(byte_tokenizer_config_json()), json::parse(R"({
    "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": false,
    "eos_token": "<|endoftext|>"})"));
}

TEST(HfTokenizer, SmallestFile) {
  const auto tokenizer = make(small_file());
  EXPECT_EQ(tokenizer->name(), "HuggingFaceTokenizer");
  EXPECT_EQ(tokenizer->vocab_size(), 260);
  EXPECT_EQ(tokenizer->eod(), 259);
  // "c" is the 67th visible character of ASCII: '!' has id 0.
  EXPECT_EQ(encode(*tokenizer, "abcabc"), (Ids{257, 257}));
  EXPECT_EQ(encode(*tokenizer, "cab"), (Ids{'c' - '!', 256}));
  EXPECT_EQ(encode(*tokenizer, "ab<|endoftext|>c"), (Ids{256, 259, 'c' - '!'}));
  EXPECT_EQ(encode(*tokenizer, ""), Ids{});
  EXPECT_EQ(tokenizer->decode(Ids{256, 259, 257}), "ababc");
  EXPECT_EQ(tokenizer->piece(257), "abc");
  for (const int32_t id : {-1, 260}) {
    EXPECT_TRUE(contains(message_of(ExitStatus::failed, [&] { tokenizer->piece(id); }),
                         "token id " + std::to_string(id)));
  }
}

TEST(HfTokenizer, MergesAsStringsAreTheSame) {
  json file = small_file();
  file["model"]["merges"] = {"#version: 0.2", "a b", "ab c"};
  EXPECT_EQ(encode(*make(file), "abcab"), (Ids{257, 256}));
}

TEST(HfTokenizer, IgnoreMergesTakesWholeWords) {
  json file = small_file();
  EXPECT_EQ(encode(*make(file), "whole").size(), 5U);
  file["model"]["ignore_merges"] = true;
  EXPECT_EQ(encode(*make(file), "whole"), Ids{258});
  EXPECT_EQ(encode(*make(file), "wholes").size(), 6U);
}

TEST(HfTokenizer, AWordOfManyBytesIsNoProblem) {
  const auto tokenizer = make(small_file());
  const std::string word(1'000'000, 'a');
  EXPECT_EQ(encode(*tokenizer, word), Ids(word.size(), 'a' - '!'));
  const std::string spaces(1'000'000, ' ');
  EXPECT_EQ(tokenizer->decode(encode(*tokenizer, spaces)), spaces);
}

// All of it, of whatever kind, on the sides where the token says so and on no other.
TEST(HfTokenizer, AnAddedTokenMayTakeTheWhiteSpaceAroundIt) {
  const std::string before = "ab \t\u00a0\u3000 ";
  const std::string after = " \u3000\u00a0\n c";
  for (const bool left : {false, true}) {
    for (const bool right : {false, true}) {
      json file = small_file();
      file["added_tokens"].push_back(
          {{"id", 260}, {"content", "<mask>"}, {"lstrip", left}, {"rstrip", right}});
      const auto tokenizer = make(file);
      Ids expected = encode(*tokenizer, left ? "ab" : before);
      expected.push_back(260);
      const Ids rest = encode(*tokenizer, right ? "c" : after);
      expected.insert(expected.end(), rest.begin(), rest.end());
      EXPECT_EQ(encode(*tokenizer, before + "<mask>" + after), expected) << left << right;
    }
  }
}

TEST(HfTokenizer, TheEndOfADocumentIsNamedByTheConfiguration) {
  json file = small_file();
  file["added_tokens"].push_back({{"id", 260}, {"content", "<|im_end|>"}, {"special", true}});
  EXPECT_EQ(make(file, "<|im_end|>")->eod(), 260);
  EXPECT_EQ(make(file)->eod(), 259);
  EXPECT_EQ(token_of_config(R"({"eos_token": "</s>"})", "c", "eos_token"), "</s>");
  EXPECT_EQ(
      token_of_config(R"({"eos_token": {"content": "</s>", "lstrip": false}})", "c", "eos_token"),
      "</s>");
  EXPECT_EQ(token_of_config(R"({"eos_token": null})", "c", "eos_token"), "");
  EXPECT_EQ(token_of_config("{}", "c", "eos_token"), "");
}

// The token of tokenizer_config.json, unless it also ends documents or the file does not have it.
TEST(HfTokenizer, KnowsItsPadding) {
  const std::string path = TROUPE_FIXTURE_DIR "/tokenizers/qwen";
  TokenizerModel model = read_tokenizer_model(kHuggingFaceTokenizer, path);
  EXPECT_EQ(make_tokenizer(model)->pad(), -1);
  model.eod = "<|im_end|>";
  model.pad = "<|endoftext|>";
  const auto tokenizer = make_tokenizer(model);
  ASSERT_GE(tokenizer->pad(), 0);
  EXPECT_EQ(tokenizer->pad(),
            make_tokenizer(read_tokenizer_model(kHuggingFaceTokenizer, path))->eod());
  model.eod = "<|endoftext|>";
  EXPECT_EQ(make_tokenizer(model)->pad(), -1) << "it ends documents";
  model.pad = "<|absent|>";
  EXPECT_EQ(make_tokenizer(model)->pad(), -1);
}

TEST(HfTokenizer, FolderWithConfiguration) {
  const TempFolder dir;
  json file = small_file();
  file["added_tokens"].push_back({{"id", 260}, {"content", "<|im_end|>"}, {"special", true}});
  put_file(dir / "tokenizer.json", file.dump());
  const auto eod = [&](const std::string& path) {
    return make_tokenizer(read_tokenizer_model("HuggingFaceTokenizer", path))->eod();
  };
  EXPECT_EQ(eod(dir / ""), 259);
  put_file(dir / "tokenizer_config.json", R"({"eos_token": "<|im_end|>"})");
  EXPECT_EQ(eod(dir / ""), 260);
  EXPECT_EQ(eod(dir / "tokenizer.json"), 260);
  put_file(dir / "tokenizer_config.json", R"({"eos_token": "<none>"})");
  EXPECT_TRUE(contains(message_of(ExitStatus::failed, [&] { eod(dir / ""); }), "<none>"));
  put_file(dir / "tokenizer_config.json", R"({"eos_token": 3})");
  EXPECT_TRUE(contains(message_of(ExitStatus::failed, [&] { eod(dir / ""); }),
                       "tokenizer_config.json: eos_token is number, not a string"));
}

struct Wrong {
  ExitStatus status;
  std::string message;
  std::function<void(json&)> change;
};

TEST(HfTokenizer, TheLargestIdIsAccepted) {
  const TempFolder dir;
  json file = small_file();
  const auto largest_of = [&](int64_t id) {
    file["model"]["vocab"]["largest"] = id;
    file["added_tokens"].push_back({{"id", id}, {"content", "largest"}});
    put_file(dir / "tokenizer.json", file.dump());
    return make_tokenizer(read_tokenizer_model("HuggingFaceTokenizer", dir / ""))->vocab_size();
  };
  EXPECT_EQ(largest_of((1 << 24) - 1), 1 << 24);
  EXPECT_TRUE(contains(message_of(ExitStatus::failed, [&] { largest_of(1 << 24); }),
                       "is 16777216; ids are from 0 to 16777215"));
}

TEST(HfTokenizer, WhatIsWrongOrNotSupportedIsNamedWithItsPlace) {
  constexpr ExitStatus kBroken = ExitStatus::failed;
  constexpr ExitStatus kUnsupported = ExitStatus::bad_request;
  const std::vector<Wrong> cases = {
      {kBroken, "has no \"model\"", [](json& f) { f.erase("model"); }},
      {kBroken, "model is array, not an object", [](json& f) { f["model"] = json::array(); }},
      {kUnsupported, "model.type is \"WordPiece\"; only BPE",
       [](json& f) { f["model"]["type"] = "WordPiece"; }},
      {kUnsupported, "model.continuing_subword_prefix",
       [](json& f) { f["model"]["continuing_subword_prefix"] = "##"; }},
      {kUnsupported, "model.end_of_word_suffix",
       [](json& f) { f["model"]["end_of_word_suffix"] = "</w>"; }},
      {kUnsupported, "model.dropout", [](json& f) { f["model"]["dropout"] = 0.1; }},
      {kUnsupported, "for the byte 0x61", [](json& f) { f["model"]["vocab"].erase("a"); }},
      {kBroken, "model.vocab[\"whole\"] has id 256, which \"ab\" has too",
       [](json& f) { f["model"]["vocab"]["whole"] = 256; }},
      {kBroken, "model.vocab[\"ab\"] is -1; ids are from 0 to",
       [](json& f) { f["model"]["vocab"]["ab"] = -1; }},
      {kBroken, "model.vocab[\"ab\"] is 4000000000; ids are from 0 to",
       [](json& f) { f["model"]["vocab"]["ab"] = 4000000000; }},
      {kBroken, "model.vocab[\"ab\"] is not a whole number",
       [](json& f) { f["model"]["vocab"]["ab"] = "1"; }},
      {kBroken, "model.merges[1] names the token \"nothing\"",
       [](json& f) {
         f["model"]["merges"][1] = {"nothing", "c"};
       }},
      {kBroken, "model.merges[1] names the token \"cab\"",
       [](json& f) {
         f["model"]["merges"][1] = {"c", "ab"};
       }},
      {kBroken, "model.merges[0] is \"ab\", not two tokens",
       [](json& f) { f["model"]["merges"][0] = "ab"; }},
      {kBroken, "model.merges[0] is \"a b c\", not two tokens",
       [](json& f) { f["model"]["merges"][0] = "a b c"; }},
      {kBroken, "model.merges[0] is \"a  b\", not two tokens",
       [](json& f) { f["model"]["merges"][0] = "a  b"; }},
      {kBroken, "model.merges[0] is not a merge", [](json& f) { f["model"]["merges"][0] = 7; }},
      {kBroken, "model.merges[0] is not a merge",
       [](json& f) {
         f["model"]["merges"][0] = {"a", "b", "c"};
       }},
      {kBroken, "model.ignore_merges is string, not true or false",
       [](json& f) { f["model"]["ignore_merges"] = "yes"; }},
      {kUnsupported, "normalizer.type is \"Lowercase\"",
       [](json& f) {
         f["normalizer"] = {{"type", "Lowercase"}};
       }},
      {kUnsupported, "normalizer.normalizers[1].type is \"NFKC\"",
       [](json& f) {
         f["normalizer"] = {{"type", "Sequence"},
                            {"normalizers", {{{"type", "NFC"}}, {{"type", "NFKC"}}}}};
       }},
      {kUnsupported, "normalizer.type is \"" + std::string(100, 'x') + "\"; only NFC",
       [](json& f) {
         f["normalizer"] = {{"type", std::string(200, 'x')}};
       }},
      {kUnsupported, "pre_tokenizer is not given", [](json& f) { f["pre_tokenizer"] = nullptr; }},
      {kUnsupported, "pre_tokenizer.type is \"Metaspace\"",
       [](json& f) {
         f["pre_tokenizer"] = {{"type", "Metaspace"}};
       }},
      {kUnsupported, "pre_tokenizer.pretokenizers[0].type is \"ByteLevel\"",
       [](json& f) {
         f["pre_tokenizer"] = {
             {"type", "Sequence"},
             {"pretokenizers", {{{"type", "ByteLevel"}}, {{"type", "ByteLevel"}}}}};
       }},
      {kUnsupported, "pre_tokenizer.pretokenizers[0].type is \"Whitespace\"",
       [](json& f) {
         f["pre_tokenizer"] = {
             {"type", "Sequence"},
             {"pretokenizers", {{{"type", "Whitespace"}}, {{"type", "ByteLevel"}}}}};
       }},
      {kUnsupported, "decoder.type", [](json& f) { f["decoder"]["type"] = "Metaspace"; }},
      {kBroken, "added_tokens[0].id is -3", [](json& f) { f["added_tokens"][0]["id"] = -3; }},
      {kBroken, "added_tokens[0].id is 257, which \"abc\" has too",
       [](json& f) { f["added_tokens"][0]["id"] = 257; }},
      {kBroken, "added_tokens[0].id is 259, but \"ab\" has id 256",
       [](json& f) { f["added_tokens"][0]["content"] = "ab"; }},
      {kBroken, "added_tokens[1].content is \"<|endoftext|>\", which",
       [](json& f) {
         f["added_tokens"].push_back({{"id", 260}, {"content", "<|endoftext|>"}});
       }},
      {kBroken, "added_tokens[1].content is null, not a string",
       [](json& f) {
         f["added_tokens"].push_back({{"id", 260}, {"content", nullptr}});
       }},
      {kUnsupported, "added_tokens[0].single_word",
       [](json& f) { f["added_tokens"][0]["single_word"] = true; }},
      {kUnsupported, "none of the usual tokens that end a document",
       [](json& f) { f["added_tokens"].clear(); }},
  };
  for (const Wrong& wrong : cases) {
    json file = small_file();
    wrong.change(file);
    const std::string message = message_of(wrong.status, [&] { make(file); });
    EXPECT_TRUE(contains(message, wrong.message)) << message << "\n  lacks: " << wrong.message;
    EXPECT_TRUE(message.starts_with("some/tokenizer.json: ")) << message;
  }
}

// A pattern that matches no character cuts where it matches, and the next match is looked for one
// character on.
TEST(HfTokenizer, AnEmptyMatchCuts) {
  const auto with = [](const std::string& expression) {
    json file = small_file();
    const json split = {
        {"type", "Split"}, {"pattern", {{"Regex", expression}}}, {"behavior", "Isolated"}};
    const json bytes = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}};
    file["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {split, bytes}}};
    return make(file);
  };
  const Ids letters{'a' - '!', 'b' - '!', 'c' - '!'};
  EXPECT_EQ(encode(*with("(?=z)"), "abcab"), (Ids{257, 256}));
  EXPECT_EQ(encode(*with("(?=b)"), "abc"), letters);
  EXPECT_EQ(encode(*with("(?=c)"), "abcab"), (Ids{256, letters[2], 256}));
  EXPECT_EQ(encode(*with("(?=c)|$"), "abcab"), (Ids{256, letters[2], 256}));
}

TEST(HfTokenizer, SplitsThatAreNotSupportedAreNamed) {
  const auto message = [](const json& split) {
    json file = small_file();
    file["pre_tokenizer"] = {{"type", "Sequence"},
                             {"pretokenizers", {split, {{"type", "ByteLevel"}}}}};
    return message_of(ExitStatus::bad_request, [&] { make(file); });
  };
  const auto regex = [&](const std::string& expression) {
    return message(
        {{"type", "Split"}, {"pattern", {{"Regex", expression}}}, {"behavior", "Isolated"}});
  };
  EXPECT_TRUE(contains(
      message({{"type", "Split"}, {"pattern", {{"String", "x"}}}, {"behavior", "MergedWithNext"}}),
      "pre_tokenizer.pretokenizers[0].behavior is \"MergedWithNext\""));
  struct Case {
    const char* expression;
    const char* message;
  };
  const std::vector<Case> cases = {
      {"(unclosed", "is wrong at byte 9"},
      {"a\\", "a backslash at its end"},
      {"\\w+", "has \\w at byte 0"},
      {"x\\h", "has \\h at byte 1"},
      {"[a&&b]", "an intersection"},
      {"[a[b]]", "a class inside a class"},
      {"[[:alpha:]]", "a class inside a class"},
      {"(?m:a.b)", "a special group"},
      {"\\p{N}{1,3}+", "a plus after {}"},
      {"\\p{Nonsense}", "is wrong at byte"},
  };
  for (const Case& c : cases) {
    const std::string text = regex(c.expression);
    EXPECT_TRUE(contains(text, "pre_tokenizer.pretokenizers[0].pattern.Regex")) << text;
    EXPECT_TRUE(contains(text, c.message)) << text;
  }
}

TEST(HfTokenizer, SequencesWithoutEndAreRefused) {
  json nested = {{"type", "ByteLevel"}};
  for (int i = 0; i < 1000; ++i) nested = {{"type", "Sequence"}, {"pretokenizers", {nested}}};
  json file = small_file();
  file["pre_tokenizer"] = nested;
  EXPECT_TRUE(contains(message_of(ExitStatus::bad_request, [&] { make(file); }), "8 deep"));
}

TEST(HfTokenizer, SequencesMayBeNested8Deep) {
  json file = small_file();
  const auto nest = [&] {
    file["normalizer"] = {{"type", "Sequence"}, {"normalizers", {file["normalizer"]}}};
    file["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {file["pre_tokenizer"]}}};
  };
  file["normalizer"] = {{"type", "NFC"}};
  for (int i = 0; i < 8; ++i) nest();
  EXPECT_EQ(encode(*make(file), "abcab"), (Ids{257, 256}));
  nest();
  EXPECT_TRUE(
      contains(message_of(ExitStatus::bad_request, [&] { make(file); }), "more than 8 deep"));
}

TEST(HfTokenizer, TextThatIsNoJson) {
  const auto message = [](const std::string& contents) {
    return message_of(ExitStatus::failed, [&] {
      make_tokenizer(
          {.type = "HuggingFaceTokenizer", .path = "p", .contents = contents, .eod = ""});
    });
  };
  EXPECT_TRUE(contains(message(""), "p: not valid JSON"));
  const std::string whole = small_file().dump();
  EXPECT_TRUE(contains(message(whole.substr(0, whole.size() / 2)), "p: not valid JSON"));
  EXPECT_TRUE(contains(message("[]"), "is not a JSON object"));
  EXPECT_TRUE(contains(message("{\"model\": \"\xff\"}"), "p: not valid JSON"));
}

TEST(ReadTokenizerModel, WrongPaths) {
  const TempFolder dir;
  for (const char* type : {"HuggingFaceTokenizer", "SentencePieceTokenizer"}) {
    const auto message = [&](const std::string& path) {
      return message_of(ExitStatus::bad_request, [&] { read_tokenizer_model(type, path); });
    };
    EXPECT_TRUE(contains(message(""), "needs --tokenizer-model"));
    EXPECT_TRUE(contains(message(dir / "none.json"), "none.json does not exist"));
    EXPECT_TRUE(contains(message(dir / ""), "/tokenizer."));
  }
  // A file with a hole: as large as the limit and a byte, and nearly nothing on disk.
  put_file(dir / "huge.json", "");
  std::filesystem::resize_file(dir / "huge.json", (uint64_t{256} << 20) + 1);
  EXPECT_TRUE(
      contains(message_of(ExitStatus::bad_request,
                          [&] { read_tokenizer_model("HuggingFaceTokenizer", dir / "huge.json"); }),
               "has 268435457 bytes"));
}

TEST(SentencePieceTokenizer, FilesThatAreNoModels) {
  const std::string good =
      get_file(std::string(TROUPE_FIXTURE_DIR) + "/tokenizers/unigram/tokenizer.model");
  for (const std::string& contents :
       {std::string("no model"), good.substr(0, good.size() / 2), std::string()}) {
    const std::string message = message_of(ExitStatus::failed, [&] {
      make_tokenizer(
          {.type = "SentencePieceTokenizer", .path = "p", .contents = contents, .eod = ""});
    });
    EXPECT_TRUE(contains(message, "p: not a SentencePiece model")) << message;
  }
}

TEST(SentencePieceTokenizer, PiecesJoinAsTextGoesOn) {
  const std::string path = std::string(TROUPE_FIXTURE_DIR) + "/tokenizers/bpe_byte_fallback";
  const auto tokenizer = make_tokenizer(read_tokenizer_model("SentencePieceTokenizer", path));
  const std::string text = "the words \xe9\xbf\x8f go on";  // a character that is left to bytes
  const Ids ids = encode(*tokenizer, text);
  std::string joined;
  for (const int32_t id : ids) joined += tokenizer->piece(id);
  EXPECT_EQ(joined, " " + text);
  EXPECT_EQ(tokenizer->decode(ids), text);
  EXPECT_EQ(tokenizer->piece(tokenizer->eod()), "");
  EXPECT_TRUE(contains(message_of(ExitStatus::failed, [&] { tokenizer->decode(Ids{1'000'000}); }),
                       "token id 1000000"));
}

}  // namespace
}  // namespace troupe
