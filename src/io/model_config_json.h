// The whole ModelConfig as JSON: how checkpoints describe their model. Unlike a Hugging Face
// config.json (hf_config.h) it can say everything that a ModelConfig can.
#pragma once

#include <string>
#include <string_view>

#include "model/model_config.h"

namespace troupe {

// The text of a JSON object with every field of `config` under its own name.
std::string write_model_config(const ModelConfig& config);

// Reads such a text back and validates it. A text that is broken, lacks a field or has an unknown
// one is a UserError (exit status 1) naming `where`.
ModelConfig parse_model_config(std::string_view text, const std::string& where);

}  // namespace troupe
