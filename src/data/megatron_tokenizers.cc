#include "data/megatron_tokenizers.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/text.h"
#include "data/byte_alphabet.h"
#include "data/json_text.h"

namespace troupe {
namespace {

using nlohmann::json;

constexpr std::string_view kEndOfText = "<|endoftext|>";
constexpr std::string_view kBlanks = " \t\r\n";
constexpr int32_t kTiktokenVocabulary = 131072;
constexpr std::array<std::string_view, 7> kTiktokenSpecials = {"<unk>", "<s>",   "</s>", "<mask>",
                                                               "<pad>", "<cls>", "<sep>"};
// How Megatron's two patterns cut a text into words (--tiktoken-pattern).
constexpr std::string_view kTiktokenV1 =
    R"([^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+)";
constexpr std::string_view kTiktokenV2 =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+)"
    R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*)"
    R"(|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

json parse_json_file(const TokenizerFile& file) {
  std::string problem;
  std::optional<json> parsed = parse_json_text(file.contents, problem);
  if (!parsed) throw_failed(fmt::format("{}: {}", file.path, problem));
  return std::move(*parsed);
}

// The next line without its end; advances `text`.
std::string_view take_line(std::string_view& text) {
  const size_t end = std::min(text.find('\n'), text.size());
  std::string_view line = text.substr(0, end);
  text.remove_prefix(std::min(end + 1, text.size()));
  if (line.ends_with('\r')) line.remove_suffix(1);
  return line;
}

json special_token(std::string_view content, int64_t id) {
  return {{"id", id}, {"content", content}, {"special", true}, {"normalized", false}};
}

json byte_level(bool cuts_words) {
  return {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", cuts_words}};
}

// ---- tiktoken ----

std::optional<std::string> decode_base64(std::string_view text) {
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  while (text.ends_with('=')) text.remove_suffix(1);
  std::string bytes;
  uint32_t bits = 0;
  int count = 0;
  for (const char c : text) {
    const size_t digit = kDigits.find(c);
    if (digit == std::string_view::npos) return std::nullopt;
    bits = bits << 6 | static_cast<uint32_t>(digit);
    count += 6;
    if (count < 8) continue;
    count -= 8;
    bytes += static_cast<char>(bits >> count & 0xff);
  }
  return bytes;
}

// The bytes of the tokens by their rank.
class TiktokenList {
 public:
  explicit TiktokenList(const TokenizerFile& file) : file_(file) {}

  std::vector<std::string> read() {
    const size_t first = file_.contents.find_first_not_of(kBlanks);
    if (first != std::string::npos && file_.contents[first] == '[') {
      read_json();
    } else {
      read_lines();
    }
    return std::move(tokens_);
  }

 private:
  [[noreturn]] void refuse(std::string_view problem) const {
    throw_failed(fmt::format(
        "{}: entry {}: {}. A tiktoken file is a JSON array of rank, token_bytes and token_str, or "
        "has a token in base64 and its rank on each line.",
        file_.path, tokens_.size(), problem));
  }

  void add(std::string_view base64, int64_t rank) {
    if (rank != static_cast<int64_t>(tokens_.size())) refuse("its rank is not its place");
    std::optional<std::string> bytes = decode_base64(base64);
    if (!bytes || bytes->empty()) refuse("its bytes are not base64");
    if (rank < 256 && *bytes != std::string(1, static_cast<char>(rank))) {
      refuse("the first 256 tokens are not the bytes in order");
    }
    if (!seen_.emplace(*bytes, rank).second) refuse("its bytes stand there before");
    tokens_.push_back(std::move(*bytes));
  }

  void read_json() {
    const json list = parse_json_file(file_);
    for (const json& entry : list) {
      const bool is_entry = entry.is_object() && entry.contains("rank") &&
                            entry["rank"].is_number_integer() && entry.contains("token_bytes") &&
                            entry["token_bytes"].is_string();
      if (!is_entry) refuse("it has no rank and no token_bytes");
      add(entry["token_bytes"].get_ref<const std::string&>(), entry["rank"].get<int64_t>());
    }
  }

  void read_lines() {
    std::string_view text = file_.contents;
    while (!text.empty()) {
      const std::string_view line = take_line(text);
      if (line.empty()) continue;
      const size_t space = std::min(line.find(' '), line.size());
      const std::string_view number = line.substr(std::min(space + 1, line.size()));
      int64_t rank = -1;
      const char* end = number.data() + number.size();
      const auto [stop, error] = std::from_chars(number.data(), end, rank);
      if (error != std::errc() || stop != end) refuse("it has no rank");
      add(line.substr(0, space), rank);
    }
  }

  const TokenizerFile& file_;
  std::vector<std::string> tokens_;
  std::unordered_map<std::string, int64_t> seen_;
};

// All pairs of tokens that make a token, by its rank: what tiktoken joins.
json merges_of(const std::vector<std::string>& tokens, const ByteAlphabet& alphabet) {
  std::unordered_map<std::string_view, size_t> rank_of;
  for (size_t rank = 0; rank < tokens.size(); ++rank) rank_of.emplace(tokens[rank], rank);
  json merges = json::array();
  for (const std::string_view token : tokens) {
    std::vector<std::pair<size_t, size_t>> splits;
    for (size_t at = 1; at < token.size(); ++at) {
      const auto left = rank_of.find(token.substr(0, at));
      const auto right = rank_of.find(token.substr(at));
      if (left == rank_of.end() || right == rank_of.end()) continue;
      splits.emplace_back(left->second, right->second);
    }
    std::sort(splits.begin(), splits.end());
    for (const auto& [left, right] : splits) {
      merges.push_back({alphabet.word(tokens[left]), alphabet.word(tokens[right])});
    }
  }
  return merges;
}

void check_tiktoken_sizes(const TokenizerFile& file, size_t tokens, int64_t specials,
                          int64_t vocabulary) {
  if (specials < static_cast<int64_t>(kTiktokenSpecials.size()) || specials >= vocabulary) {
    throw_bad_request(
        fmt::format("--tiktoken-num-special-tokens {}: there are at least {} special tokens, and "
                    "fewer than the "
                    "vocabulary of {} (--vocab-size).",
                    specials, kTiktokenSpecials.size(), vocabulary));
  }
  if (static_cast<int64_t>(tokens) < vocabulary - specials) {
    throw_bad_request(fmt::format(
        "--vocab-size {}: {} holds {} tokens, which with {} special ones "
        "(--tiktoken-num-special-tokens) make a vocabulary of {}.",
        vocabulary, file.path, tokens, specials, static_cast<int64_t>(tokens) + specials));
  }
}

// ---- No tokenizer ----

class NullTokenizer final : public Tokenizer {
 public:
  NullTokenizer(int32_t vocab_size, int32_t eod) : vocab_size_(vocab_size), eod_(eod) {
    offsets_.reserve(static_cast<size_t>(vocab_size) + 1);
    for (int32_t id = 0; id < vocab_size; ++id) {
      offsets_.push_back(pieces_.size());
      if (id != eod) pieces_ += fmt::format("{} ", id);
    }
    offsets_.push_back(pieces_.size());
  }

  std::string_view name() const override { return kNullTokenizer; }
  int32_t vocab_size() const override { return vocab_size_; }
  int32_t eod() const override { return eod_; }

  void encode(std::string_view text, std::vector<int32_t>& ids) const override {
    for (size_t at = text.find_first_not_of(kBlanks); at != std::string_view::npos;
         at = text.find_first_not_of(kBlanks, at)) {
      const size_t end = std::min(text.find_first_of(kBlanks, at), text.size());
      const std::string_view word = text.substr(at, end - at);
      int32_t id = -1;
      const auto [stop, error] = std::from_chars(word.data(), word.data() + word.size(), id);
      if (error != std::errc() || stop != word.data() + word.size() || id < 0 ||
          id >= vocab_size_) {
        throw_bad_request(
            fmt::format("--tokenizer-type NullTokenizer reads ids from 0 to {} in decimal, and the "
                        "text holds {}",
                        vocab_size_ - 1, quote_name(word)));
      }
      ids.push_back(id);
      at = end;
    }
  }

 private:
  std::string_view known_piece(int32_t id) const override {
    const auto at = static_cast<size_t>(id);
    return std::string_view(pieces_).substr(offsets_[at], offsets_[at + 1] - offsets_[at]);
  }

  int32_t vocab_size_;
  int32_t eod_;
  std::string pieces_;  // of all ids, joined
  std::vector<size_t> offsets_;
};

}  // namespace

std::string tokenizer_json_of_gpt2(const TokenizerFile& vocabulary, const TokenizerFile& merges) {
  const json vocab = parse_json_file(vocabulary);
  if (!vocab.is_object() || !vocab.contains(kEndOfText) ||
      !vocab[std::string(kEndOfText)].is_number_integer()) {
    throw_failed(
        fmt::format("{}: not a vocabulary of GPT-2's kind: a JSON object of tokens and "
                    "ids, {} among them",
                    vocabulary.path, kEndOfText));
  }
  json list = json::array();
  std::string_view text = merges.contents;
  while (!text.empty()) {
    const std::string_view line = take_line(text);
    if (!line.empty() && !line.starts_with("#version")) list.push_back(line);
  }
  const json document = {
      {"added_tokens", {special_token(kEndOfText, vocab[std::string(kEndOfText)].get<int64_t>())}},
      {"pre_tokenizer", byte_level(/*cuts_words=*/true)},
      {"decoder", byte_level(/*cuts_words=*/true)},
      {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", list}}}};
  return document.dump(-1, ' ', false, json::error_handler_t::replace);
}

std::string tokenizer_json_of_tiktoken(const TokenizerFile& file, const TokenizerDetails& details) {
  std::string_view pattern = kTiktokenV2;
  if (details.tiktoken_pattern == "v1") pattern = kTiktokenV1;
  std::vector<std::string> tokens = TiktokenList(file).read();
  const int64_t specials = details.tiktoken_num_special_tokens;
  const int64_t vocabulary = details.vocab_size.value_or(kTiktokenVocabulary);
  check_tiktoken_sizes(file, tokens.size(), specials, vocabulary);
  tokens.resize(static_cast<size_t>(vocabulary - specials));

  const ByteAlphabet alphabet;
  json vocab = json::object();
  for (size_t rank = 0; rank < tokens.size(); ++rank) {
    vocab[alphabet.word(tokens[rank])] = static_cast<int64_t>(rank) + specials;
  }
  // They stand in the vocabulary, too: Hugging Face's library gives other ids to those that do not.
  json added = json::array();
  for (int64_t id = 0; id < specials; ++id) {
    const bool is_named = id < static_cast<int64_t>(kTiktokenSpecials.size());
    const std::string name = is_named ? std::string(kTiktokenSpecials[static_cast<size_t>(id)])
                                      : fmt::format("<SPECIAL_{}>", id);
    added.push_back(special_token(name, id));
    if (!vocab.emplace(name, id).second) {
      throw_failed(fmt::format("{}: it holds {}, which is a special token", file.path, name));
    }
  }
  const json document = {{"added_tokens", added},
                         {"pre_tokenizer",
                          {{"type", "Sequence"},
                           {"pretokenizers",
                            {{{"type", "Split"},
                              {"pattern", {{"Regex", pattern}}},
                              {"behavior", "Isolated"},
                              {"invert", false}},
                             byte_level(/*cuts_words=*/false)}}}},
                         {"decoder", byte_level(/*cuts_words=*/false)},
                         {"model",
                          {{"type", "BPE"},
                           {"ignore_merges", true},
                           {"vocab", vocab},
                           {"merges", merges_of(tokens, alphabet)}}}};
  return document.dump();
}

std::string null_tokenizer_contents(const TokenizerDetails& details) {
  if (!details.vocab_size) {
    throw_bad_request("--tokenizer-type NullTokenizer needs --vocab-size: how many ids there are");
  }
  const int32_t eod = details.eod.value_or(*details.vocab_size - 1);
  if (eod < 0 || eod >= *details.vocab_size) {
    throw_bad_request(fmt::format("--null-tokenizer-eod-id {}: ids are from 0 to {} (--vocab-size)",
                                  eod, *details.vocab_size - 1));
  }
  return fmt::format("{} {}", *details.vocab_size, eod);
}

std::unique_ptr<Tokenizer> make_null_tokenizer(const TokenizerModel& model) {
  const std::string& text = model.contents;
  const char* end = text.data() + text.size();
  int32_t vocab_size = 0;
  int32_t eod = -1;
  const auto [space, error] = std::from_chars(text.data(), end, vocab_size);
  const bool has_space = error == std::errc() && space != end;
  const auto [stop, other] = std::from_chars(has_space ? space + 1 : end, end, eod);
  if (other != std::errc() || stop != end || eod < 0 || eod >= vocab_size) {
    throw_failed(fmt::format("{}: its NullTokenizer is damaged", model.path));
  }
  return std::make_unique<NullTokenizer>(vocab_size, eod);
}

}  // namespace troupe
