// The files that a Hugging Face model folder holds beside config.json and the weights, and that
// readers need: the tokenizer's, chat templates, generation_config.json. They travel with the
// weights as they are; nothing here looks inside. Callable from any thread.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace troupe {

struct HfFile {
  std::string name;      // within the folder
  std::string contents;  // bytes
};

// One of the names that read_hf_files knows.
bool is_hf_file(std::string_view name);

// One of them that describes a tokenizer; the others do not depend on it.
bool is_hf_tokenizer_file(std::string_view name);

// The known files that the folder holds, in a fixed order. One that cannot be read, or that has
// more than 256 MiB, is refused (UserError) with its path.
std::vector<HfFile> read_hf_files(const std::string& folder);

// Null when there is none of that name.
const HfFile* find_file(const std::vector<HfFile>& files, std::string_view name);

// Replaces the file of that name, or adds it.
void put_file(std::vector<HfFile>& files, HfFile file);

// Does a model folder hold weights: model.safetensors, one of its shards, or an index of them?
bool holds_weights(const std::string& folder);

}  // namespace troupe
