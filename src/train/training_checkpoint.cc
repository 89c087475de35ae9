#include "train/training_checkpoint.h"

#include <fmt/format.h>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/text.h"
#include "io/json.h"
#include "io/model_config_json.h"
#include "train/options.h"

namespace troupe {
namespace {

using nlohmann::json;

constexpr int kMaxTrainingDepth = 32;

// The tensor that holds the bytes of the tokenizer's file. It goes with the weights wherever they
// go, under the same hashes.
constexpr const char* kTokenizerTensor = "tokenizer";

bool is_saved(Role role) {
  return role == Role::parameter || role == Role::optimizer || role == Role::router_state;
}

CheckpointRole to_checkpoint_role(Role role) {
  switch (role) {
    case Role::parameter:
      return CheckpointRole::parameter;
    case Role::optimizer:
      return CheckpointRole::optimizer;
    default:
      return CheckpointRole::state;
  }
}

// One slice per saved state tensor: this rank holds all of each.
template <class Slice>
std::vector<Slice> whole_slices(const StateStorage& storage) {
  std::vector<Slice> slices;
  const StateTable& table = storage.table();
  for (int32_t i = 0; i < table.size(); ++i) {
    const StateTensor& tensor = table[StateId{i}];
    if (!is_saved(tensor.role)) continue;
    Slice slice;
    slice.name = tensor.name;
    slice.role = to_checkpoint_role(tensor.role);
    slice.dtype = tensor.dtype;
    slice.global_shape = tensor.shape;
    slice.box.shape = tensor.shape;
    slice.data = storage.view(StateId{i}).data;
    slices.push_back(std::move(slice));
  }
  return slices;
}

template <class Slice>
Slice tokenizer_slice(int64_t bytes) {
  Slice slice;
  slice.name = kTokenizerTensor;
  slice.role = CheckpointRole::state;
  slice.dtype = DType::u8;
  slice.global_shape = Shape{bytes};
  slice.box.shape = slice.global_shape;
  return slice;
}

TokenizerModel read_tokenizer(const Checkpoint& checkpoint, const json& training) {
  TokenizerModel model;
  model.type = training.at("tokenizer_type").get<std::string>();
  model.eod = training.value("tokenizer_eod", "");
  model.path = checkpoint.path();
  std::vector<std::string> others;
  for (const StoredTensor& tensor : checkpoint.tensors()) {
    if (tensor.name != kTokenizerTensor) {
      others.push_back(tensor.name);
    } else if (tensor.shape.rank() == 1) {
      model.contents.resize(static_cast<size_t>(tensor.shape.elements()));
    }
  }
  if (!model.contents.empty()) {
    auto slice = tokenizer_slice<SliceToLoad>(static_cast<int64_t>(model.contents.size()));
    slice.data = model.contents.data();
    checkpoint.load({&slice, 1}, std::vector{CheckpointRole::state}, others);
  }
  return model;
}

}  // namespace

CheckpointInfo save_training_checkpoint(const std::string& dir, const RunIdentity& identity,
                                        const TrainingPosition& position, const ModelState& state,
                                        const StateStorage& storage) {
  TROUPE_CHECK(state.table.get() == &storage.table(), "state and storage belong together");
  json training = {
      {"position",
       {{"step", position.step},
        {"updates", position.updates},
        {"consumed_samples", position.consumed_samples},
        {"scheduled_samples", position.scheduled_samples},
        {"skipped_in_row", position.skipped_in_row}}},
      {"model", json::parse(write_model_config(identity.model))},
      {"compute_dtype", name_of(identity.compute_dtype)},
      {"seed", identity.seed},
      {"seq_length", identity.sequence},
      {"split", identity.split},
      {"tokenizer_type", identity.tokenizer.type},
      {"tokenizer_eod", identity.tokenizer.eod},
      {"ordered_samples", identity.ordered_samples},
      {"data", identity.data},
      {"schedules", json::parse(to_json(identity.schedules))},
      {"options", json::parse(identity.options_json)},
  };
  if (position.best_step > 0) {
    training["best"] = {{"step", position.best_step}, {"loss", position.best_loss}};
  }
  CheckpointContent content;
  content.step = position.step;
  content.troupe_version = std::string(kVersion);
  content.training = training.dump();
  content.slices = whole_slices<SliceToSave>(storage);
  if (const std::string& file = identity.tokenizer.contents; !file.empty()) {
    auto slice = tokenizer_slice<SliceToSave>(static_cast<int64_t>(file.size()));
    slice.data = file.data();
    content.slices.push_back(std::move(slice));
  }
  return save_checkpoint(dir, content);
}

StoredRun read_stored_run(const Checkpoint& checkpoint) {
  const std::string where = join_path(checkpoint.path(), "index.json");
  const json training = parse_json(checkpoint.training(), where, kMaxTrainingDepth);
  StoredRun run;
  try {
    const json& position = training.at("position");
    const auto count = [&](const json& object, const char* name) {
      return integer_field(object, name, 0, kMostSamples, where);
    };
    run.position.step = count(position, "step");
    run.position.updates = count(position, "updates");
    run.position.consumed_samples = count(position, "consumed_samples");
    run.position.scheduled_samples = count(position, "scheduled_samples");
    run.position.skipped_in_row = count(position, "skipped_in_row");
    if (training.contains("best")) {
      const json& best = training.at("best");
      run.position.best_step = count(best, "step");
      run.position.best_loss = best.at("loss").get<double>();
    }
    run.identity.model = parse_model_config(training.at("model").dump(), where);
    const auto dtype = training.at("compute_dtype").get<std::string>();
    bool known = false;
    for (const DType candidate : {DType::f64, DType::f32, DType::bf16}) {
      if (dtype == name_of(candidate)) {
        run.identity.compute_dtype = candidate;
        known = true;
      }
    }
    if (!known) {
      throw_failed(fmt::format("{}: unknown compute dtype {}.", where, quote_name(dtype)));
    }
    if (!training.at("seed").is_number_unsigned()) {
      throw_failed(where + ": the field \"seed\" must be a whole number of 64 bits");
    }
    run.identity.seed = training.at("seed").get<uint64_t>();
    run.identity.sequence = static_cast<int32_t>(
        integer_field(training, "seq_length", 1, std::numeric_limits<int32_t>::max(), where));
    run.identity.split = training.at("split").get<std::string>();
    run.identity.tokenizer = read_tokenizer(checkpoint, training);
    run.identity.ordered_samples =
        integer_field(training, "ordered_samples", 1, kMostSamples, where);
    run.identity.data = training.at("data").get<std::string>();
    run.identity.schedules = parse_schedules(training.at("schedules").dump(), where);
    run.identity.options_json = training.at("options").dump();
  } catch (const json::exception& error) {
    throw_failed(fmt::format("{}: the description of the training run is broken ({}).", where,
                             error.what()));
  }
  return run;
}

void require_same_run(const StoredRun& stored, const RunIdentity& wanted, const std::string& path) {
  const auto refuse = [&](const std::string& what, const std::string& was, const std::string& is) {
    throw_bad_request(fmt::format(
        "{} was saved with {} {}, this run has {}. Give the same value to go on with that run, or "
        "--finetune to start a new one from its weights.",
        path, what, was, is));
  };
  if (!(stored.identity.model == wanted.model)) {
    throw_bad_request(
        fmt::format("{} holds another model than --model describes. The saved one:\n{}", path,
                    write_model_config(stored.identity.model)));
  }
  if (stored.identity.compute_dtype != wanted.compute_dtype) {
    refuse("--compute-dtype", std::string(name_of(stored.identity.compute_dtype)),
           std::string(name_of(wanted.compute_dtype)));
  }
  if (stored.identity.seed != wanted.seed) {
    refuse("--seed", std::to_string(stored.identity.seed), std::to_string(wanted.seed));
  }
  if (stored.identity.sequence != wanted.sequence) {
    refuse("--seq-length", std::to_string(stored.identity.sequence),
           std::to_string(wanted.sequence));
  }
  if (stored.identity.tokenizer.type != wanted.tokenizer.type) {
    refuse("--tokenizer-type", stored.identity.tokenizer.type, wanted.tokenizer.type);
  }
  if (!stored.identity.tokenizer.same_as(wanted.tokenizer)) {
    refuse("--tokenizer-model", "a file of other contents (or another eos_token)",
           wanted.tokenizer.path);
  }
  if (stored.identity.split != wanted.split) {
    refuse("--split", stored.identity.split, wanted.split);
  }
}

void require_same_schedules(const StoredRun& stored, const Schedules& wanted,
                            const std::string& path) {
  const std::string difference = schedule_difference(stored.identity.schedules, wanted);
  if (difference.empty()) return;
  throw_bad_request(fmt::format(
      "{} was saved under {}. To go on, give the same value, --override-opt_param-scheduler (take "
      "this run's schedules) or --use-checkpoint-opt_param-scheduler (keep the saved ones).",
      path, difference));
}

std::optional<std::string> find_checkpoint(const std::string& path, std::optional<int64_t> step,
                                           std::vector<std::string>* incomplete) {
  if (path_exists(join_path(path, "index.json"))) {
    if (step) {
      throw_bad_request(fmt::format(
          "{} is one checkpoint; --ckpt-step chooses among those of a run's folder.", path));
    }
    return path;
  }
  const std::vector<CheckpointInfo> found = list_checkpoints(path, incomplete);
  if (!step) return found.empty() ? std::nullopt : std::optional(found.back().path);
  for (const CheckpointInfo& checkpoint : found) {
    if (checkpoint.step == *step) return checkpoint.path;
  }
  throw_bad_request(
      fmt::format("--ckpt-step {}: {} holds no complete checkpoint of this step.{}", *step, path,
                  found.empty() ? "" : fmt::format(" The newest is {}.", found.back().step)));
}

void load_training_state(const Checkpoint& checkpoint, const ModelState& state,
                         const StateStorage& storage) {
  TROUPE_CHECK(state.table.get() == &storage.table(), "state and storage belong together");
  const std::vector<SliceToLoad> slices = whole_slices<SliceToLoad>(storage);
  const bool trained = state.parameters.front().exp_avg.valid();
  std::vector<CheckpointRole> roles = {CheckpointRole::parameter, CheckpointRole::state};
  if (trained) roles.push_back(CheckpointRole::optimizer);
  // The tokenizer belongs to the facts.
  checkpoint.load(slices, roles, std::vector<std::string>{kTokenizerTensor});
}

}  // namespace troupe
