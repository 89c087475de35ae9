// What each architecture's config.json says, field by field, as texts in tests/golden that hold all
// of it: what is written for a model, what is read from the least that is accepted, and what every
// other value of a field does.
#include "io/hf_families.h"

#include <algorithm>
#include <filesystem>
#include <gtest/gtest.h>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "io/hf_config.h"
#include "io/io_test_support.h"
#include "io/model_config_json.h"
#include "program/golden.h"

namespace troupe {
namespace {

using namespace io_test;
using nlohmann::json;
using nlohmann::ordered_json;

// A configuration of the fixtures, by the name of its folder.
struct NamedDocument {
  std::string name;
  ordered_json document;
};

std::vector<NamedDocument> fixture_documents() {
  std::vector<NamedDocument> found;
  for (const auto& entry : std::filesystem::directory_iterator(TROUPE_FIXTURE_DIR "/hf")) {
    found.push_back({entry.path().filename().string(),
                     ordered_json::parse(get_file(entry.path().string() + "/config.json"))});
  }
  std::sort(found.begin(), found.end(),
            [](const auto& a, const auto& b) { return a.name < b.name; });
  return found;
}

// The first of each architecture.
std::vector<NamedDocument> family_documents() {
  std::vector<NamedDocument> first;
  std::vector<ordered_json> seen;
  for (NamedDocument& each : fixture_documents()) {
    const ordered_json& architecture = each.document["architectures"];
    if (std::find(seen.begin(), seen.end(), architecture) != seen.end()) continue;
    seen.push_back(architecture);
    first.push_back(std::move(each));
  }
  return first;
}

// What a configuration has otherwise than another, as one line.
std::string difference(const ModelConfig& config, const ModelConfig& other) {
  const auto fields = ordered_json::parse(write_model_config(config));
  const auto others = ordered_json::parse(write_model_config(other));
  ordered_json different = ordered_json::object();
  for (const auto& [name, value] : fields.items()) {
    if (others.at(name) != value) different[name] = value;
  }
  return different.dump();
}

ModelConfig parse_document(const ordered_json& document) {
  return parse_hf_config(document.dump(), "config.json");
}

TEST(HfFamilies, EveryArchitectureHasAFixture) {
  EXPECT_EQ(family_documents().size(), hf_families().size());
}

TEST(HfFamilies, WhatIsWrittenOfAModel) {
  std::string text;
  for (const auto& [name, document] : fixture_documents()) {
    ModelConfig config = parse_document(document);
    text += name + "\n" + ordered_json::parse(write_hf_config(config)).dump() + "\n";
    config.mtp_num_layers = 1;
    if (why_no_hf_form(config).empty()) {
      text += "with a layer of multi-token prediction\n" +
              ordered_json::parse(write_hf_config(config)).dump() + "\n";
    }
  }
  testing::expect_golden(text, "hf_written.txt");
}

TEST(HfFamilies, WhatIsReadOfTheLeast) {
  std::string text;
  for (const auto& [name, document] : fixture_documents()) {
    text += name + "\nall: " + difference(parse_document(document), ModelConfig()) + "\n";
    ordered_json least = document;
    for (const auto& [field, value] : document.items()) {
      ordered_json without = least;
      without.erase(field);
      try {
        parse_document(without);
        least = std::move(without);
      } catch (const UserError&) {
      }
    }
    text += "least: " + least.dump() +
            "\nof it: " + difference(parse_document(least), ModelConfig()) + "\n";
  }
  testing::expect_golden(text, "hf_read.txt");
}

// Other values of a field, of all kinds.
std::vector<ordered_json> other_values(const ordered_json& value) {
  std::vector<ordered_json> others = {nullptr, "other", true, false, -1, 0, 1, 2.5};
  if (value.is_number_integer()) {
    others.insert(others.end(), {value.get<int64_t>() - 1, value.get<int64_t>() + 1, 2147483648});
  }
  if (value.is_array()) {
    ordered_json changed = value;
    if (changed.empty()) {
      changed.push_back(0);
    } else {
      changed.back() = "other";
    }
    ordered_json longer = value;
    longer.push_back(value.empty() ? ordered_json(1) : value.front());
    others.insert(others.end(), {ordered_json::array(), changed, longer});
  }
  std::erase(others, value);
  return others;
}

// What a document is read as, or why it is refused; empty where it says what it did unchanged.
std::string outcome_of(const ordered_json& document, const ModelConfig& unchanged) {
  try {
    const ModelConfig config = parse_document(document);
    return config == unchanged ? "" : difference(config, unchanged);
  } catch (const UserError& error) {
    return error.what();
  }
}

// What becomes of the values of fields: by field, by outcome and models, the values.
class FieldOutcomes {
 public:
  void add(const std::string& field, const ordered_json& value, const std::string& outcome,
           const std::string& model) {
    std::string& models = found_[field][{outcome, value.dump()}];
    models += (models.empty() ? "" : ", ") + model;
  }

  std::string text() const {
    std::string text;
    for (const auto& [field, outcomes] : found_) {
      std::map<std::pair<std::string, std::string>, std::string> values;
      for (const auto& [outcome_and_value, models] : outcomes) {
        std::string& alike = values[{outcome_and_value.first, models}];
        alike += (alike.empty() ? "" : " | ") + outcome_and_value.second;
      }
      for (const auto& [outcome_and_models, alike] : values) {
        text += field + " = " + alike + "\n  " + outcome_and_models.first + "\n    " +
                outcome_and_models.second + "\n";
      }
    }
    return text;
  }

 private:
  std::map<std::string, std::map<std::pair<std::string, std::string>, std::string>> found_;
};

TEST(HfFamilies, WhatEveryFieldDoes) {
  FieldOutcomes outcomes;
  for (const auto& [model, fixture] : family_documents()) {
    const ModelConfig unchanged = parse_document(fixture);
    ordered_json document = ordered_json::parse(write_hf_config(unchanged));
    document.update(fixture);
    for (const auto& [field, value] : document.items()) {
      if (value.is_object() || field == "architectures") continue;
      for (const ordered_json& other : other_values(value)) {
        ordered_json changed = document;
        changed[field] = other;
        const std::string outcome = outcome_of(changed, unchanged);
        if (!outcome.empty()) outcomes.add(field, other, outcome, model);
      }
    }
  }
  testing::expect_golden(outcomes.text(), "hf_fields.txt");
}

TEST(HfFamilies, WhatEveryFieldOfAnglesDoes) {
  FieldOutcomes outcomes;
  for (const auto& [model, fixture] : fixture_documents()) {
    const ModelConfig unchanged = parse_document(fixture);
    if (unchanged.rope_scaling_type == RopeScalingKind::none && model != "glm4moe") continue;
    ordered_json document = ordered_json::parse(write_hf_config(unchanged));
    document.erase("rope_scaling");
    document.erase("rope_theta");
    const ModelConfig base = parse_document(document);
    EXPECT_EQ(base, unchanged) << model;
    ordered_json rope = document["rope_parameters"];
    for (const char* name : {"mscale", "mscale_all_dim", "attention_factor"}) {
      if (!rope.contains(name)) rope[name] = nullptr;
    }
    for (const auto& [field, value] : rope.items()) {
      for (const ordered_json& other : other_values(value)) {
        ordered_json changed = document;
        changed["rope_parameters"][field] = other;
        const std::string outcome = outcome_of(changed, base);
        if (!outcome.empty()) outcomes.add(field, other, outcome, model);
      }
    }
  }
  testing::expect_golden(outcomes.text(), "hf_rope_fields.txt");
}

ordered_json document_of(const std::string& fixture) {
  return ordered_json::parse(get_file(TROUPE_FIXTURE_DIR "/hf/" + fixture + "/config.json"));
}

TEST(HfFamilies, DeepSeeksBalanceWithinSequencesUnlessTheFileSaysOtherwise) {
  for (const char* fixture : {"deepseek_v2", "deepseek_v3", "deepseek_v32"}) {
    ordered_json document = document_of(fixture);
    document["aux_loss_alpha"] = 0.25;
    document.erase("seq_aux");
    ModelConfig config = parse_document(document);
    EXPECT_EQ(config.moe_seq_aux_loss_coeff, 0.25) << fixture;
    EXPECT_EQ(config.moe_aux_loss_coeff, 0) << fixture;
    document["seq_aux"] = false;
    config = parse_document(document);
    EXPECT_EQ(config.moe_seq_aux_loss_coeff, 0) << fixture;
    EXPECT_EQ(config.moe_aux_loss_coeff, 0.25) << fixture;
  }
}

TEST(HfFamilies, TheFactorOfYarnsAnglesComesBack) {
  ModelConfig config = parse_document(document_of("qwen3_moe_yarn"));
  config.rope_attention_factor = 1.5;
  const std::string text = write_hf_config(config);
  EXPECT_EQ(json::parse(text)["rope_parameters"]["attention_factor"], 1.5);
  EXPECT_EQ(parse_hf_config(text, "config.json"), config);
}

// What is not zero is written as it is, however small.
TEST(HfFamilies, SizesOfOneAreWritten) {
  for (const char* fixture : {"deepseek_v2", "glm4moe", "qwen3_moe_mixed_layers"}) {
    ModelConfig config = parse_document(document_of(fixture));
    ASSERT_NE(config.ffn_hidden_size, 0) << fixture;
    config.ffn_hidden_size = 1;
    EXPECT_EQ(json::parse(write_hf_config(config))["intermediate_size"], 1) << fixture;
  }
  ModelConfig window = parse_document(document_of("qwen3_moe"));
  window.sliding_window = 1;
  const json document = json::parse(write_hf_config(window));
  EXPECT_EQ(document["sliding_window"], 1);
  EXPECT_EQ(document["use_sliding_window"], true);
  ModelConfig latent = parse_document(document_of("deepseek_v3"));
  latent.q_lora_rank = 1;
  EXPECT_EQ(json::parse(write_hf_config(latent))["q_lora_rank"], 1);
}

}  // namespace
}  // namespace troupe
