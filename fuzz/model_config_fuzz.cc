// The description of the model in a checkpoint. What is accepted comes back from its own text.
#include "harness.h"
#include "io/hf_config.h"
#include "io/model_config_json.h"

namespace troupe::fuzz {

void parse(std::string_view input) {
  const ModelConfig config = parse_model_config(input, "index.json");
  config.validate();
  const std::string text = write_model_config(config);
  if (!(parse_model_config(text, "written") == config)) {
    report_finding("written back, the model is another one: " + text);
  }
}

std::vector<std::string> seeds() {
  std::vector<std::string> texts;
  for (const char* model : {"llama_dense", "mixtral", "qwen3_moe_mixed_layers"}) {
    const std::string path = std::string("tests/fixtures/hf/") + model + "/config.json";
    texts.push_back(write_model_config(parse_hf_config(read_source_file(path), path)));
  }
  return texts;
}

}  // namespace troupe::fuzz
