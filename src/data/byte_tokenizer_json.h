// The byte tokenizer as Hugging Face files, so that other programs read the texts of a model that
// was trained on bytes: the same ids for valid UTF-8, and "<|endoftext|>" for the end of a document
// (where a text spells that out, it is the end). Pure functions; any thread.
#pragma once

#include <string>

namespace troupe {

std::string byte_tokenizer_json();         // tokenizer.json
std::string byte_tokenizer_config_json();  // tokenizer_config.json

}  // namespace troupe
