// config.json. What is accepted can be sized, and written again it is the same model or refused.
#include "harness.h"
#include "io/hf_config.h"
#include "model/model.h"

namespace troupe::fuzz {

void parse(std::string_view input) {
  const ModelConfig config = parse_hf_config(input, "config.json");
  const Model model(config);
  if (model.parameter_count() < model.active_parameter_count()) {
    report_finding("more active parameters than parameters");
  }
  if (!(model.training_flops(config.max_position_embeddings) > 0)) {
    report_finding("a model that costs nothing");
  }
  const std::string written = write_hf_config(config);
  if (Model(parse_hf_config(written, "written")).parameter_count() != model.parameter_count()) {
    report_finding("written back, the configuration is of another size");
  }
}

std::vector<std::string> seeds() {
  std::vector<std::string> texts;
  for (const char* model : {"llama_dense", "mixtral", "mixtral_window_tied", "qwen3_dense",
                            "qwen3_moe", "qwen3_moe_first_dense", "qwen3_moe_mixed_layers"}) {
    texts.push_back(read_source_file(std::string("tests/fixtures/hf/") + model + "/config.json"));
  }
  return texts;
}

}  // namespace troupe::fuzz
