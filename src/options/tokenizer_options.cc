#include "options/tokenizer_options.h"

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <string_view>
#include <system_error>

#include "data/make_tokenizer.h"

namespace troupe {
namespace {

// Part of the names that model families have on the Hugging Face hub, in lower case, and the length
// of their tokenizers. The first that a name contains counts.
struct Family {
  std::string_view part;
  std::string_view name;
  int32_t vocabulary;
};
constexpr Family kFamilies[] = {
    {"mixtral-8x22b-instruct-v0.3", "Mixtral 8x22B v0.3", 32768},
    {"mixtral", "Mixtral", 32000},
    {"mistral-7b-v0.1", "Mistral 7B", 32000},
    {"qwen3", "Qwen3", 151669},
    {"qwen2.5", "Qwen2.5", 151665},
    {"deepseek-r1-distill-qwen", "Qwen2.5", 151665},
    {"qwen2", "Qwen2", 151646},
    {"deepseek-v2", "DeepSeek-V2", 100002},
    {"deepseek-v3", "DeepSeek-V3", 128815},
    {"deepseek-r1", "DeepSeek-V3", 128815},
    {"kimi-k2", "Kimi-K2", 163840},
    {"llama-2", "Llama 2", 32000},
    {"llama-3", "Llama 3", 128256},
    {"llama3", "Llama 3", 128256},
    {"gpt-oss", "GPT-OSS", 200019},
    {"olmoe", "OLMoE", 50280},
    {"nemotron_2_256k", "Nemotron", 256000},
};

std::optional<AssumedVocabulary> vocabulary_of_hub_name(std::string name) {
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  for (const Family& family : kFamilies) {
    if (name.find(family.part) == std::string::npos) continue;
    return AssumedVocabulary{.size = family.vocabulary, .name = std::string(family.name)};
  }
  return std::nullopt;
}

bool exists(const std::string& path) {
  std::error_code error;
  return !path.empty() && std::filesystem::exists(path, error);
}

}  // namespace

TokenizerModel read_tokenizer_of(const Options& options) {
  return read_tokenizer_of(options, options.tokenizer_model);
}

TokenizerModel read_tokenizer_of(const Options& options, const std::string& path) {
  return read_tokenizer_model(options.tokenizer_type, path,
                              {.vocab_file = options.vocab_file,
                               .merge_file = options.merge_file,
                               .vocab_size = options.vocab_size,
                               .eod = options.null_tokenizer_eod_id,
                               .tiktoken_pattern = options.tiktoken_pattern,
                               .tiktoken_num_special_tokens = options.tiktoken_num_special_tokens});
}

bool sizes_the_tokenizer(const Options& options) {
  return options.tokenizer_type == "NullTokenizer" || options.tokenizer_type == "TikTokenizer";
}

std::optional<AssumedVocabulary> assumed_vocabulary(const Options& options) {
  const std::string& type = options.tokenizer_type;
  const bool runs = options.command == Command::train && !options.fake_process_group;
  const bool knows = options.vocab_size && !sizes_the_tokenizer(options);
  if (runs || !options.model.empty() || knows || !describes_shape(options) ||
      exists(options.tokenizer_model) || exists(options.vocab_file)) {
    return std::nullopt;
  }
  if (type == "Llama2Tokenizer") return AssumedVocabulary{.size = 32000, .name = "Llama 2"};
  if (type == "GPT2BPETokenizer") return AssumedVocabulary{.size = 50257, .name = "GPT-2"};
  if (type == "TikTokenizer") {
    return AssumedVocabulary{.size = options.vocab_size.value_or(131072), .name = "Megatron"};
  }
  if (type == "byte" || type == "NullTokenizer") return std::nullopt;
  return vocabulary_of_hub_name(options.tokenizer_model);
}

}  // namespace troupe
