#include "train/loaded_model.h"

#include <algorithm>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <utility>
#include <variant>
#include <vector>

#include "base/error.h"
#include "data/hf_tokenizer.h"
#include "data/make_tokenizer.h"
#include "data/sentencepiece_tokenizer.h"
#include "io/hf_config.h"
#include "io/hf_weights.h"
#include "io/json.h"
#include "options/schedule_options.h"
#include "options/tokenizer_options.h"

namespace troupe {
namespace {

SavedModel describe_checkpoint(const std::string& path) {
  const StoredRun stored = read_stored_run(Checkpoint::open(path));
  return {.config = stored.identity.model,
          .compute_dtype = stored.identity.compute_dtype,
          .path = path,
          .from_checkpoint = true,
          .identity = stored.identity,
          .position = stored.position};
}

}  // namespace

SavedModel find_model(const std::string& path, DType hf_dtype, std::optional<int64_t> step) {
  if (path_exists(join_path(path, "config.json"))) {
    SavedModel model;
    model.config = read_hf_config(join_path(path, "config.json"));
    model.compute_dtype = hf_dtype;
    model.path = path;
    return model;
  }
  std::vector<std::string> incomplete;
  if (const auto checkpoint = find_checkpoint(path, step, &incomplete)) {
    SavedModel model = describe_checkpoint(*checkpoint);
    if (!step) model.passed_over = passed_over(path, *checkpoint, incomplete);
    return model;
  }
  if (!incomplete.empty()) {
    throw_failed(fmt::format("{}: none of its checkpoints is complete, the last because of: {}",
                             path, incomplete.back()));
  }
  throw_bad_request(fmt::format(
      "{}: no model found. Looked for config.json (a Hugging Face model), index.json (a "
      "checkpoint) and checkpoints/ with a complete checkpoint (a training run).",
      path));
}

namespace {

// The open weights of a model on disk.
class SavedWeights {
 public:
  explicit SavedWeights(const SavedModel& model) : source_(open(model)) {}

  void load(const ModelState& state, const StateStorage& storage,
            const WorkReport& report = {}) const {
    std::visit([&](const auto& source) { source.load(state, storage, report); }, source_);
  }

 private:
  using Source = std::variant<HfWeights, CheckpointWeights>;
  static Source open(const SavedModel& model) {
    if (!model.from_checkpoint) return HfWeights(model.path, model.config);
    return CheckpointWeights(Checkpoint::open(model.path), model.compute_dtype, model.config);
  }

  Source source_;
};

// A state of one tensor: elements `range` of the tensor `id` of a state on one rank, which is a
// parameter or the bias of a router.
ModelState part_of(const ModelState& state, StateId id, const IndexRange& range) {
  ModelState part;
  part.model = state.model;
  part.part = state.part;
  part.dtype = state.dtype;
  part.expert_biases.resize(state.expert_biases.size());
  StateTensor tensor = (*state.table)[id];
  tensor.shape = Shape{range.end - range.begin};
  auto table = std::make_shared<StateTable>();
  const StateId own = table->add(tensor);
  part.table = std::move(table);
  const auto same_value = [&](const Parameter& parameter) { return parameter.value == id; };
  const auto found = std::find_if(state.parameters.begin(), state.parameters.end(), same_value);
  if (found == state.parameters.end()) {
    const auto bias = std::find(state.expert_biases.begin(), state.expert_biases.end(), id);
    TROUPE_CHECK(bias != state.expert_biases.end(), "neither a parameter nor a router's bias");
    part.expert_biases[static_cast<size_t>(bias - state.expert_biases.begin())] = own;
    return part;
  }
  Parameter& parameter = part.parameters.emplace_back(*found);
  parameter.held = parameter.shard = range;
  parameter.value = own;
  return part;
}

}  // namespace

ElementReader element_reader(const SavedModel& model, const ModelState& state) {
  TROUPE_CHECK(!state.trained, "weights alone are read");
  struct Reader {
    explicit Reader(const SavedModel& model) : weights(model) {}
    SavedWeights weights;
    std::optional<StateStorage> storage;
  };
  const auto reader = std::make_shared<Reader>(model);
  return [reader, &state](StateId id, const IndexRange& range) {
    reader->storage.reset();
    const ModelState part = part_of(state, id, range);
    const StateStorage& storage = reader->storage.emplace(part.table);
    reader->weights.load(part, storage);
    return static_cast<const std::byte*>(storage.view(StateId{0}).data);
  };
}

void load_saved_model(const SavedModel& model, const ModelState& state, const StateStorage& storage,
                      const WorkReport& report) {
  SavedWeights(model).load(state, storage, report);
  storage.to_device();
}

namespace {

// What a Hugging Face folder holds; unset: no tokenizer.
std::optional<TokenizerModel> tokenizer_of_folder(const std::string& folder) {
  const bool has_model = path_exists(join_path(folder, "tokenizer.model"));
  if (path_exists(join_path(folder, "tokenizer.json"))) {
    try {
      TokenizerModel model = read_tokenizer_model(kHuggingFaceTokenizer, folder);
      make_tokenizer(model);
      return model;
    } catch (const UserError&) {  // of a kind that Troupe does not read
      if (!has_model) throw;
    }
  }
  if (!has_model) return std::nullopt;
  return read_tokenizer_model(kSentencePieceTokenizer, folder);
}

}  // namespace

TokenizerModel tokenizer_of(const SavedModel& model, const Options& options, std::string& note) {
  if (model.from_checkpoint) {
    if (!options.tokenizer_model.empty()) {
      throw_bad_request(
          fmt::format("--tokenizer-model {}: the checkpoint in {} has its own tokenizer ({}); "
                      "leave the flag out.",
                      options.tokenizer_model, options.load, model.identity.tokenizer.type));
    }
    return model.identity.tokenizer;
  }
  if (!was_given(options, "tokenizer-type") && options.tokenizer_model.empty()) {
    if (const auto own = tokenizer_of_folder(options.load)) return *own;
    note = fmt::format(
        "{} holds no tokenizer (tokenizer.json, tokenizer.model): texts are read and "
        "written as bytes. --tokenizer-type and --tokenizer-model name another.",
        options.load);
  }
  const bool has_files =
      options.tokenizer_type != "byte" && options.tokenizer_type != "NullTokenizer";
  const bool from_folder = has_files && options.tokenizer_model.empty();
  Options asked = options;
  if (options.tokenizer_type == "NullTokenizer") asked.vocab_size = model.config.vocab_size;
  return read_tokenizer_of(asked, from_folder ? options.load : options.tokenizer_model);
}

namespace {

constexpr int kMaxOptionsDepth = 8;

// Of the options under which the model was saved, those of these names, on top of defaults.
Options saved_options(const SavedModel& model, std::initializer_list<const char*> names) {
  const std::string& path = model.path;
  const nlohmann::json all = parse_json(model.identity.options_json, path, kMaxOptionsDepth);
  nlohmann::json chosen = {{"command", "train"}};
  for (const char* name : names) {
    if (all.is_object() && all.contains(name)) chosen[name] = all.at(name);
  }
  Options options;
  from_json(options, chosen.dump(), path);
  return options;
}

}  // namespace

Options evaluation_options(const SavedModel& model, const Options& options) {
  Options result = options;
  if (!result.seq_length) result.seq_length = model.sequence();
  if (!model.from_checkpoint) return result;
  const Options saved = saved_options(
      model,
      {"micro-batch-size", "eval-micro-batch-size", "eval-iters", "split", "eod-mask-loss",
       "reset-attention-mask", "keep-partial-validation-sample", "loss-chunk-tokens",
       "moe-dispatch-fwd-dtype", "fp4-format", "fp8-format", "fp8-recipe", "fp8-modules",
       "fp8-amax-history-len", "fp8-amax-compute-algo", "fp8-margin", "first-last-layers-bf16",
       "num-layers-at-start-in-bf16", "num-layers-at-end-in-bf16"});
  const auto take = [&](const char* name, auto member) {
    if (!was_given(options, name)) result.*member = saved.*member;
  };
  take("micro-batch-size", &Options::micro_batch_size);
  if (!was_given(options, "micro-batch-size") && saved.eval_micro_batch_size) {
    result.micro_batch_size = *saved.eval_micro_batch_size;
  }
  if (saved.eval_iters > 0) take("eval-iters", &Options::eval_iters);
  take("split", &Options::split);
  take("eod-mask-loss", &Options::eod_mask_loss);
  take("reset-attention-mask", &Options::reset_attention_mask);
  take("keep-partial-validation-sample", &Options::keep_partial_validation_sample);
  take("loss-chunk-tokens", &Options::loss_chunk_tokens);
  take("moe-dispatch-fwd-dtype", &Options::moe_dispatch_fwd_dtype);
  // Another recipe, all of it.
  if (was_given(options, "fp8-format") || was_given(options, "fp4-format")) return result;
  take("fp4-format", &Options::fp4_format);
  take("fp8-format", &Options::fp8_format);
  take("fp8-recipe", &Options::fp8_recipe);
  take("fp8-modules", &Options::fp8_modules);
  take("fp8-amax-history-len", &Options::fp8_amax_history_len);
  take("fp8-amax-compute-algo", &Options::fp8_amax_compute_algo);
  take("fp8-margin", &Options::fp8_margin);
  take("first-last-layers-bf16", &Options::first_last_layers_bf16);
  take("num-layers-at-start-in-bf16", &Options::num_layers_at_start_in_bf16);
  take("num-layers-at-end-in-bf16", &Options::num_layers_at_end_in_bf16);
  return result;
}

int64_t evaluation_samples(const SavedModel& model, const Options& options) {
  if (!model.from_checkpoint) return options.eval_iters * options.micro_batch_size;
  const Options saved =
      saved_options(model, {"ranks", "tensor-model-parallel-size", "context-parallel-size",
                            "pipeline-model-parallel-size", "micro-batch-size", "global-batch-size",
                            "rampup-batch-size", "step-batch-size-schedule"});
  return options.eval_iters * make_batch_sizes(saved, model.sequence()).largest();
}

}  // namespace troupe
