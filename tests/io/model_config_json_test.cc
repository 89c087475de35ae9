// The description of a model in a checkpoint: it comes back as it was, and what cannot be one is
// refused with its file and field.
#include "io/model_config_json.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <string>

#include "io/hf_config.h"
#include "io/io_test_support.h"

namespace troupe {
namespace {

using namespace io_test;
using nlohmann::json;

ModelConfig stored_model() {
  const std::string path = TROUPE_FIXTURE_DIR "/hf/deepseek_v32/config.json";
  return parse_hf_config(get_file(path), path);
}

std::string refusal_of(const json& document) {
  return message_of(ExitStatus::failed,
                    [&] { parse_model_config(document.dump(), "run/model.json"); });
}

TEST(ModelConfigJson, ComesBack) {
  const ModelConfig config = stored_model();
  EXPECT_EQ(parse_model_config(write_model_config(config), "run/model.json"), config);
}

TEST(ModelConfigJson, WhatIsNoModelIsRefused) {
  const json stored = json::parse(write_model_config(stored_model()));
  const std::string where = "run/model.json: ";
  EXPECT_EQ(refusal_of(json::array({stored})),
            where + "the description of the model is not a JSON object.");
  EXPECT_EQ(message_of(ExitStatus::failed, [] { parse_model_config("{", "run/model.json"); }),
            where + "is not valid JSON at byte 2");
  json unknown = stored;
  unknown["experts_of_tomorrow"] = 1;
  EXPECT_EQ(refusal_of(unknown),
            where + "the description of the model has fields that this version does not know.");
  json layers = stored;
  layers["moe_layers"].push_back(true);
  EXPECT_EQ(refusal_of(layers), where + "\"moe_layers\" does not name every layer.");
}

// Those of the first version are in every file.
TEST(ModelConfigJson, AFieldIsThereAndOfItsKind) {
  const json stored = json::parse(write_model_config(stored_model()));
  struct Case {
    const char* name;
    json value;
  };
  const Case wrong[] = {{"tie_embeddings", 1},
                        {"norm_epsilon", "1e-6"},
                        {"norm_epsilon", true},
                        {"moe_layers", true},
                        {"moe_layers", json::array({true, 1})},
                        {"moe_router_score_function", 1},
                        {"moe_router_score_function", "tanh"}};
  for (const Case& each : wrong) {
    json document = stored;
    ASSERT_TRUE(document.contains(each.name)) << each.name;
    document[each.name] = each.value;
    EXPECT_EQ(refusal_of(document), std::string("run/model.json: the field \"") + each.name +
                                        "\" has a value of the wrong type");
  }
  for (const json& size : {json(1.5), json("48"), json(int64_t{1} << 31), json(true)}) {
    json document = stored;
    document["hidden_size"] = size;
    EXPECT_EQ(
        refusal_of(document),
        "run/model.json: the field \"hidden_size\" must be a whole number from -2147483648 to "
        "2147483647");
  }
  for (const char* name : {"tie_embeddings", "norm_epsilon", "hidden_size", "moe_layers"}) {
    json document = stored;
    document.erase(name);
    EXPECT_EQ(refusal_of(document),
              std::string("run/model.json: the field \"") + name + "\" is missing");
  }
}

}  // namespace
}  // namespace troupe
