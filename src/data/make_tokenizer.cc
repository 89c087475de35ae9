#include "data/make_tokenizer.h"

#include <array>
#include <cerrno>
#include <filesystem>
#include <fmt/format.h>
#include <fstream>
#include <system_error>

#include "base/error.h"
#include "data/hf_tokenizer.h"
#include "data/hf_tokenizer_file.h"
#include "data/megatron_tokenizers.h"
#include "data/sentencepiece_tokenizer.h"

namespace troupe {
namespace {

constexpr std::string_view kByte = "byte";

class ByteTokenizer final : public Tokenizer {
 public:
  ByteTokenizer() {
    for (size_t byte = 0; byte < bytes_.size(); ++byte) bytes_[byte] = static_cast<char>(byte);
  }
  std::string_view name() const override { return kByte; }
  int32_t vocab_size() const override { return kEod + 1; }
  int32_t eod() const override { return kEod; }

  void encode(std::string_view text, std::vector<int32_t>& ids) const override {
    const size_t begin = ids.size();
    ids.resize(begin + text.size());  // grows by a factor, which reserve() does not
    for (size_t i = 0; i < text.size(); ++i) {
      ids[begin + i] = static_cast<unsigned char>(text[i]);
    }
  }

 private:
  static constexpr int32_t kEod = 256;

  std::string_view known_piece(int32_t id) const override {
    if (id == kEod) return {};
    return {&bytes_[static_cast<size_t>(id)], 1};
  }

  std::array<char, 256> bytes_{};
};

// No tokenizer comes near this; a file that does is something else.
constexpr uint64_t kMaxFileBytes = uint64_t{256} << 20;

std::string read_whole_file(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) {
    throw_bad_request(fmt::format(
        "tokenizer file {} does not exist, or is no file (names of the Hugging Face hub "
        "are not looked up: download the files, and name their folder)",
        path));
  }
  const uintmax_t size = std::filesystem::file_size(path, error);
  if (!error && size > kMaxFileBytes) {
    throw_bad_request(fmt::format("{} has {} bytes; a tokenizer file has at most {}: name another",
                                  path, size, kMaxFileBytes));
  }
  std::ifstream in(path, std::ios::binary);
  std::string contents(static_cast<size_t>(error ? 0 : size), '\0');
  if (!in || error || !in.read(contents.data(), static_cast<std::streamsize>(contents.size()))) {
    throw_failed(fmt::format("cannot read {}: {}", path, std::generic_category().message(errno)));
  }
  return contents;
}

std::string file_of(const std::string& path, std::string_view type, std::string_view name) {
  if (path.empty()) {
    throw_bad_request(
        fmt::format("--tokenizer-type {} needs --tokenizer-model: a {} or the folder that holds it",
                    type, name));
  }
  std::error_code error;
  return std::filesystem::is_directory(path, error) ? (std::filesystem::path(path) / name).string()
                                                    : path;
}

void read_hf_files(const std::string& path, std::string_view type, TokenizerModel& model) {
  model.path = file_of(path, type, "tokenizer.json");
  model.contents = read_whole_file(model.path);
  const auto config = std::filesystem::path(model.path).replace_filename("tokenizer_config.json");
  std::error_code error;
  if (std::filesystem::exists(config, error)) {
    const std::string text = read_whole_file(config.string());
    model.eod = token_of_config(text, config.string(), "eos_token");
    model.pad = token_of_config(text, config.string(), "pad_token");
  }
}

// --vocab-file and --merge-file, or both in a folder.
void read_gpt2_files(const std::string& folder, const TokenizerDetails& details,
                     TokenizerModel& model) {
  const auto read = [&](const std::string& given, std::string_view flag, const char* name) {
    if (given.empty() && folder.empty()) {
      throw_bad_request(
          fmt::format("--tokenizer-type {} needs {}, or --tokenizer-model: the folder "
                      "that holds vocab.json and merges.txt",
                      kGpt2BpeTokenizer, flag));
    }
    const std::string path =
        given.empty() ? (std::filesystem::path(folder) / name).string() : given;
    return TokenizerFile{.path = path, .contents = read_whole_file(path)};
  };
  const TokenizerFile vocabulary = read(details.vocab_file, "--vocab-file", "vocab.json");
  const TokenizerFile merges = read(details.merge_file, "--merge-file", "merges.txt");
  model.type = kHuggingFaceTokenizer;
  model.path = vocabulary.path;
  model.contents = tokenizer_json_of_gpt2(vocabulary, merges);
  model.eod = "<|endoftext|>";
}

void read_tiktoken_file(const std::string& path, const TokenizerDetails& details,
                        TokenizerModel& model) {
  model.path = file_of(path, kTikTokenizer, "tokenizer.json");
  model.contents = tokenizer_json_of_tiktoken(
      {.path = model.path, .contents = read_whole_file(model.path)}, details);
  model.type = kHuggingFaceTokenizer;
  model.eod = "</s>";
  model.pad = "<pad>";
}

}  // namespace

TokenizerModel read_tokenizer_model(std::string_view type, const std::string& path,
                                    const TokenizerDetails& details) {
  TokenizerModel model;
  model.type = type;
  if (type == kByte) {
    if (!path.empty()) {
      throw_bad_request(
          fmt::format("the byte tokenizer takes no file, but '{}' was given; leave it out", path));
    }
  } else if (type == kNullTokenizer) {
    model.contents = null_tokenizer_contents(details);
  } else if (type == kHuggingFaceTokenizer) {
    read_hf_files(path, type, model);
  } else if (type == kGpt2BpeTokenizer) {
    read_gpt2_files(path, details, model);
  } else if (type == kTikTokenizer) {
    read_tiktoken_file(path, details, model);
  } else if (type == kSentencePieceTokenizer || type == kLlama2Tokenizer ||
             type == kGptSentencePieceTokenizer) {
    model.path = file_of(path, type, "tokenizer.model");
    model.contents = read_whole_file(model.path);
    model.type = kSentencePieceTokenizer;
  } else {
    throw_bad_request(
        fmt::format("unknown tokenizer type '{}'; known types: {}, {}, {}, {}, {}, {}, {}, {}",
                    type, kByte, kHuggingFaceTokenizer, kSentencePieceTokenizer, kLlama2Tokenizer,
                    kGptSentencePieceTokenizer, kGpt2BpeTokenizer, kTikTokenizer, kNullTokenizer));
  }
  return model;
}

std::unique_ptr<Tokenizer> make_tokenizer(const TokenizerModel& model) {
  if (model.type == kHuggingFaceTokenizer) return make_hf_tokenizer(model);
  if (model.type == kSentencePieceTokenizer) return make_sentencepiece_tokenizer(model);
  if (model.type == kNullTokenizer) return make_null_tokenizer(model);
  TROUPE_CHECK(model.type == kByte, "no tokenizer of type " + model.type);
  return std::make_unique<ByteTokenizer>();
}

}  // namespace troupe
