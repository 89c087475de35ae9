// The architectures of Hugging Face that Troupe reads and writes: what their config.json says, and
// what transformers takes for a field that is missing there.
//
// One entry for each architecture, which reads the fields of its own into a ModelConfig and writes
// them; everything that all have in common is done here once. Any thread.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <string_view>

#include "io/hf_fields.h"
#include "model/model_config.h"

namespace troupe {

inline constexpr std::string_view kQwen3NextArchitecture = "Qwen3NextForCausalLM";
inline constexpr std::string_view kQwen35MoeArchitecture = "Qwen3_5MoeForCausalLM";
inline constexpr std::string_view kDeepseekV32Architecture = "DeepseekV32ForCausalLM";
inline constexpr std::string_view kMiniMaxM2Architecture = "MiniMaxM2ForCausalLM";
inline constexpr std::string_view kLing2Architecture = "BailingMoeV2ForCausalLM";

// How the architecture names layers of multi-token prediction.
enum class HfMtpNames : uint8_t {
  none,       // it has none
  as_layers,  // as layers after the model's, with copies of embedding and head
  apart,      // mtp.*, of one layer
};

struct HfFamily {
  std::string_view architecture;  // "MixtralForCausalLM"
  const char* model_type;         // "mixtral"
  bool has_experts;
  // What the configuration class of the architecture in transformers (4.57, 5.23: the same) takes
  // for a field that the file lacks. Query groups that are null, or 0 here, are as many as query
  // heads.
  double rope_theta;
  double rms_norm_eps;
  int32_t num_key_value_heads;
  // Of each head: the part that turns. 0: only all of it is possible.
  double partial_rotary_factor;
  void (*read)(const HfFields& fields, ModelConfig& config);
  void (*write)(const ModelConfig& config, nlohmann::ordered_json& document);
  HfMtpNames mtp = HfMtpNames::none;
};

// In the order in which a name is looked for that fits a shape.
std::span<const HfFamily> hf_families();

// nullptr: it is none of them.
const HfFamily* find_hf_family(std::string_view architecture);

// Reads all fields into a configuration that has the name of the architecture; whether they fit
// together is not checked. What is not supported, or missing, is collected in `fields`.
void read_hf_family(const HfFamily& family, const HfFields& fields, ModelConfig& config);

// Refuses a configuration of another architecture: with what it has that Troupe lacks, and whatever
// else the file asks for and does not get.
[[noreturn]] void refuse_hf_architecture(const HfFields& fields, std::string_view architecture);

// The fields of the model in every spelling, whether or not they say all of the configuration.
nlohmann::ordered_json render_hf_config(const HfFamily& family, const ModelConfig& config);

}  // namespace troupe
