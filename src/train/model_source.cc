#include "train/model_source.h"

#include <filesystem>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "data/byte_tokenizer_json.h"
#include "data/hf_tokenizer.h"
#include "data/make_tokenizer.h"
#include "data/sentencepiece_tokenizer.h"
#include "io/file.h"
#include "io/hf_config.h"
#include "io/json.h"
#include "train/loaded_model.h"
#include "train/training_checkpoint.h"

namespace troupe {
namespace {

constexpr const char* kConfigFile = "config.json";
constexpr const char* kGenerationFile = "generation_config.json";
constexpr int kMaxTokenizerConfigDepth = 32;

// The name under which Hugging Face looks for the tokenizer's own file; empty for bytes.
std::string_view file_name_of(const TokenizerModel& tokenizer) {
  if (tokenizer.type == kHuggingFaceTokenizer) return "tokenizer.json";
  if (tokenizer.type == kSentencePieceTokenizer) return "tokenizer.model";
  return "";
}

// Of the folder that holds this config.json.
ModelSource source_at(const std::string& config_path, bool has_weights) {
  return {.config_json = read_file(config_path, kMaxHfConfigBytes),
          .has_weights = has_weights,
          .keeps_token_ids = true,
          .files = read_hf_files(parent_path(config_path))};
}

ModelSource source_of_weights(const std::string& pretrained,
                              const std::optional<std::string>& finetuned) {
  const std::string config = join_path(pretrained, kConfigFile);
  if (!finetuned && !pretrained.empty() && path_exists(config)) {
    return source_at(config, /*has_weights=*/true);
  }
  auto path = finetuned;
  if (!path && !pretrained.empty()) path = find_checkpoint(pretrained);
  return path ? whole_source(read_stored_run(Checkpoint::open(*path)).identity) : ModelSource{};
}

// The token that tokenizer_config.json names, as an id; unset where it does not say.
std::optional<int32_t> token_of_config(const std::vector<HfFile>& files, const char* name,
                                       const Tokenizer& tokenizer) {
  const HfFile* file = find_file(files, "tokenizer_config.json");
  if (file == nullptr) return std::nullopt;
  const nlohmann::json config = parse_json(file->contents, file->name, kMaxTokenizerConfigDepth);
  const auto found = config.is_object() ? config.find(name) : config.end();
  if (found == config.end()) return std::nullopt;
  const nlohmann::json text =
      found->is_object() ? found->value("content", nlohmann::json()) : *found;
  if (!text.is_string()) return std::nullopt;
  std::vector<int32_t> ids;
  tokenizer.encode(text.get<std::string>(), ids);
  return ids.size() == 1 ? std::optional(ids.front()) : std::nullopt;
}

std::string generation_config(const HfTokenIds& tokens) {
  const auto id = [](const std::optional<int32_t>& token) {
    return token ? nlohmann::ordered_json(*token) : nlohmann::ordered_json();
  };
  const nlohmann::ordered_json document = {{"_from_model_config", true},
                                           {"bos_token_id", id(tokens.bos)},
                                           {"eos_token_id", id(tokens.eos)}};
  return document.dump(2) + "\n";
}

std::string hf_name_of(FileDType dtype) {
  switch (dtype) {
    case FileDType::f64:
      return "float64";
    case FileDType::bf16:
      return "bfloat16";
    case FileDType::f16:
      return "float16";
    default:
      return "float32";
  }
}

}  // namespace

ModelSource whole_source(const RunIdentity& identity) {
  ModelSource source = identity.source;
  const std::string_view name = file_name_of(identity.tokenizer);
  if (!name.empty()) {
    put_file(source.files, {std::string(name), identity.tokenizer.contents});
  }
  return source;
}

ModelSource source_of_run(const RunSpec& spec, const std::optional<std::string>& finetuned) {
  const TokenizerModel& tokenizer = spec.tokenizer;
  ModelSource source = source_of_weights(spec.load.pretrained, finetuned);
  if (source.config_json.empty()) {  // a shape, whatever else its folder holds
    source = spec.config_path.empty() ? ModelSource{}
                                      : source_at(spec.config_path, /*has_weights=*/false);
  }
  const std::string_view name = file_name_of(tokenizer);
  const HfFile* own = find_file(source.files, name);
  if (name.empty() && source.has_weights) return source;  // bytes are no reason to drop the text's
  if (own != nullptr && own->contents == tokenizer.contents) {
    std::erase_if(source.files, [&](const HfFile& file) { return file.name == name; });
    return source;
  }
  source.keeps_token_ids = false;
  std::erase_if(source.files, [](const HfFile& file) { return is_hf_tokenizer_file(file.name); });
  if (name.empty()) return source;
  for (HfFile& file : read_hf_files(parent_path(tokenizer.path))) {
    if (is_hf_tokenizer_file(file.name) && file.name != name)
      put_file(source.files, std::move(file));
  }
  return source;
}

HfExport export_of(const SavedModel& model, const std::optional<HfWeightType>& type) {
  HfConfigSource config;
  HfExport result;
  const bool asked = type && type->dtype;
  result.dtype = asked ? *type->dtype : to_file_dtype(model.compute_dtype);
  if (type) result.quantization = type->quantization;
  if (!model.from_checkpoint) {
    if (!asked) {
      result.dtype = hf_folder_main_dtype(model.path);
      result.dtypes_from = model.path;
    }
    const HfQuantization stored = hf_folder_quantization(model.path);
    if (!type) result.quantization = stored;
    const bool requantised = result.quantization != stored;
    if (!requantised && stored != HfQuantization::none) result.scales_from = model.path;
    ModelSource source = source_at(join_path(model.path, kConfigFile), /*has_weights=*/true);
    config = {.text = std::move(source.config_json), .where = model.path, .has_weights = true};
    // What a quantised folder's says is the type to compute in.
    const bool keeps_codes = !type && stored != HfQuantization::none;
    if (!keeps_codes) config.dtype = hf_name_of(*result.dtype);
    if (requantised) {
      config.quantization_config = hf_quantization_config(model.config, result.quantization);
    }
    result.files = std::move(source.files);
    result.config_json = write_hf_config(model.config, config);
    return result;
  }
  ModelSource source = whole_source(model.identity);
  const bool has_tokenizer = find_file(source.files, "tokenizer.json") != nullptr ||
                             find_file(source.files, "tokenizer.model") != nullptr;
  if (!has_tokenizer && model.identity.tokenizer.type == "byte") {
    put_file(source.files, {"tokenizer.json", byte_tokenizer_json()});
    put_file(source.files, {"tokenizer_config.json", byte_tokenizer_config_json()});
  }
  config = {.text = source.config_json, .where = model.path, .has_weights = source.has_weights};
  config.dtype = hf_name_of(*result.dtype);
  config.quantization_config = hf_quantization_config(model.config, result.quantization);
  if (!source.keeps_token_ids) {
    const auto tokenizer = make_tokenizer(model.identity.tokenizer);
    config.tokens = {.bos = token_of_config(source.files, "bos_token", *tokenizer),
                     .eos = tokenizer->eod()};
    put_file(source.files, {kGenerationFile, generation_config(*config.tokens)});
  }
  result.config_json = write_hf_config(model.config, config);
  result.files = std::move(source.files);
  return result;
}

void require_whole(const HfPredictionLayers& layers, const std::string& folder) {
  if (layers.missing.empty()) return;
  throw_bad_request(fmt::format(
      "{}: the tensor {} is missing, while others of its layers of multi-token prediction are "
      "there. Fetch the folder again, or leave these layers out with --mtp-num-layers 0.",
      folder, layers.missing));
}

void require_clear_weights(const RunSpec& spec) {
  const std::string& model = spec.model_name;
  std::error_code error;
  if (!spec.load.pretrained.empty() || model.empty() ||
      !std::filesystem::is_directory(model, error) || !holds_weights(model)) {
    return;
  }
  throw_bad_request(fmt::format(
      "--model {0}: the folder holds weights, and nothing says whether the run starts "
      "from them. Give --pretrained-checkpoint {0}, too, to start from them, or --model "
      "{1} for the shape alone, with random weights.",
      model, join_path(model, kConfigFile)));
}

}  // namespace troupe
