#include "io/hf_files.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

#include "io/file.h"

namespace troupe {
namespace {

constexpr uint64_t kMaxFileBytes = uint64_t{256} << 20;

constexpr std::string_view kTokenizerFiles[] = {"tokenizer.json",
                                                "tokenizer.model",
                                                "tokenizer_config.json",
                                                "special_tokens_map.json",
                                                "added_tokens.json",
                                                "vocab.json",
                                                "merges.txt",
                                                "chat_template.jinja",
                                                "chat_template.json"};
constexpr std::string_view kOtherFiles[] = {"generation_config.json"};

}  // namespace

bool is_hf_file(std::string_view name) {
  return is_hf_tokenizer_file(name) ||
         std::find(std::begin(kOtherFiles), std::end(kOtherFiles), name) != std::end(kOtherFiles);
}

bool is_hf_tokenizer_file(std::string_view name) {
  return std::find(std::begin(kTokenizerFiles), std::end(kTokenizerFiles), name) !=
         std::end(kTokenizerFiles);
}

std::vector<HfFile> read_hf_files(const std::string& folder) {
  std::vector<HfFile> files;
  const auto add = [&](std::string_view name) {
    const std::string path = join_path(folder, name);
    if (path_exists(path)) files.push_back({std::string(name), read_file(path, kMaxFileBytes)});
  };
  for (const std::string_view name : kTokenizerFiles) add(name);
  for (const std::string_view name : kOtherFiles) add(name);
  return files;
}

const HfFile* find_file(const std::vector<HfFile>& files, std::string_view name) {
  const auto found = std::find_if(files.begin(), files.end(),
                                  [&](const HfFile& file) { return file.name == name; });
  return found == files.end() ? nullptr : &*found;
}

void put_file(std::vector<HfFile>& files, HfFile file) {
  std::erase_if(files, [&](const HfFile& other) { return other.name == file.name; });
  files.push_back(std::move(file));
}

bool holds_weights(const std::string& folder) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    if (name.ends_with(".safetensors") || name == "model.safetensors.index.json") return true;
  }
  return false;
}

}  // namespace troupe
