// Hugging Face model configurations (config.json), in and out.
//
// Both dialects are read: that of transformers 5 (rope_parameters, num_local_experts, dtype) and
// the older one of most files on the hub (rope_theta, rope_scaling, num_experts, torch_dtype).
// Architectures: those of io/hf_families.h.
//
// A file that is not such a configuration, or that asks for something Troupe does not compute, is
// refused (UserError, bad request) with the name of the field; nothing is ignored silently that
// would change the numbers. Any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "model/model_config.h"

namespace troupe {

inline constexpr uint64_t kMaxHfConfigBytes = 1 << 20;

// `where` names the source in messages.
ModelConfig parse_hf_config(std::string_view json_text, const std::string& where);
ModelConfig read_hf_config(const std::string& path);

// Layers of multi-token prediction that a folder's config.json announces, 0 where it says nothing.
// What is read of it has none all the same: whether they are trained is the run's choice.
int32_t hf_announced_prediction_layers(const std::string& config_path);

// Those that its folder may have: as many, or one where the architecture's files say nothing.
int32_t hf_prediction_layers(const std::string& config_path);

// Is it the configuration of a model that also sees? Then what is read of it is its text model, and
// what sees is left out.
bool hf_also_sees(const std::string& config_path);

// Ids of tokens that a config.json names; unset ones are written as null.
struct HfTokenIds {
  std::optional<int32_t> bos = {};
  std::optional<int32_t> eos = {};
};

// What config.json says beyond the model.
struct HfConfigSource {
  std::string text = {};  // of the config.json that the model began with, which parses; empty: none
  std::string where = {};  // it was read, for messages
  // The weights came with it: whatever the model has not changed stays as it is, also the spelling.
  // Otherwise the model is one of our own, and every field is written in all spellings.
  bool has_weights = false;
  std::optional<HfTokenIds> tokens = {};  // unset: as the text says
  std::string dtype = {};                 // "float32", ...; empty: as the text says
  // JSON text; empty: the model is not quantised; unset: as the text says.
  std::optional<std::string> quantization_config = {};
};

// The configuration as config.json text. Where parse_hf_config would not give the same model back,
// because the architecture cannot say what the configuration asks for, it is a bad request that
// names the fields. (What only acts in training, such as dropout, the z-loss or expert capacity,
// has no place there and no meaning for the weights.) A text that needs no change is returned as it
// is, to the byte.
std::string write_hf_config(const ModelConfig& config, const HfConfigSource& source = {});

// Why write_hf_config refuses the configuration, in one sentence; empty when it does not.
std::string why_no_hf_form(const ModelConfig& config);

// The architecture under whose name a model of this shape can be written: the configuration's own,
// if it fits, or the first that does; empty when none does.
std::string fitting_hf_architecture(const ModelConfig& config);

}  // namespace troupe
