#include "train/training_checkpoint.h"

#include <algorithm>
#include <array>
#include <exception>
#include <fmt/format.h>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <unistd.h>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "io/json.h"
#include "io/model_config_json.h"
#include "model/parameter_layout.h"
#include "ops/adamw/moment_blocks.h"
#include "train/options.h"

namespace troupe {
namespace {

using nlohmann::json;

constexpr int kMaxTrainingDepth = 32;

// The tensor that holds the bytes of the tokenizer's file. It goes with the weights wherever they
// go, under the same hashes.
constexpr const char* kTokenizerTensor = "tokenizer";

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

// What the optimizer keeps of a parameter, for each of its elements.
std::vector<StateId> optimizer_tensors(const Parameter& parameter) {
  std::vector<StateId> ids;
  for (const StateId id : {parameter.master, parameter.exp_avg, parameter.exp_avg_sq}) {
    if (id.valid()) ids.push_back(id);
  }
  return ids;
}

// What it keeps for each block of moments.
std::vector<StateId> scale_tensors(const Parameter& parameter) {
  std::vector<StateId> ids;
  for (const StateId id : {parameter.exp_avg_scale, parameter.exp_avg_sq_scale}) {
    if (id.valid()) ids.push_back(id);
  }
  return ids;
}

// The scales of the moments of a piece, of which the rank keeps vectors of `columns`.
SlicePiece scales_of(const SlicePiece& piece, int64_t columns) {
  const auto last = static_cast<size_t>(piece.shape.rank() - 1);
  SlicePiece scales = piece;
  scales.offset[last] /= kMomentBlock;
  scales.shape = moment_scales_shape(piece.shape);
  scales.first =
      piece.first / columns * moment_blocks(columns) + piece.first % columns / kMomentBlock;
  return scales;
}

// Tells which of a rank's boxes no lower rank holds, so that each is saved once: boxes of slices,
// or of shards of them.
class LowestHolder {
 public:
  LowestHolder(const ModelConfig& config, const ModelPart& part, bool of_shards)
      : config_(config), part_(part), of_shards_(of_shards) {
    // Of ranks at the same place in both meshes, the first stands for all; as far as shards go they
    // have the same, too.
    std::set<std::array<int32_t, 6>> places;
    for (int32_t rank = 0; rank <= part.rank; ++rank) {
      const DensePlace dense = part.layout().dense_place(rank);
      const ExpertPlace expert = part.layout().expert_place(rank);
      const std::array place = {dense.tp,
                                expert.etp,
                                expert.ep,
                                dense.pp,
                                shard_of_rank(rank, GradientClass::sliced).place,
                                shard_of_rank(rank, GradientClass::expert).place};
      if (!places.insert(place).second) continue;
      if (rank < part.rank) lower_.push_back(rank);
      first_of_place_ = rank == part.rank;
    }
  }

  bool is_lowest(const Parameter& parameter, const SlicePiece& piece) const {
    if (!first_of_place_) return false;
    return std::none_of(lower_.begin(), lower_.end(), [&](int32_t rank) {
      return holds(part_.partition(), part_.layout().dense_place(rank).pp, parameter.kind,
                   parameter.layer, config_) &&
             contains(rank, parameter, piece);
    });
  }

  // Of what every rank of the pipeline's place holds whole.
  bool is_lowest_of_place() const {
    return first_of_place_ && std::none_of(lower_.begin(), lower_.end(), [&](int32_t rank) {
             return part_.layout().dense_place(rank).pp == part_.dense().pp;
           });
  }

 private:
  Shard shard_of_rank(int32_t rank, GradientClass gradient) const {
    return of_shards_ ? ModelPart{part_.run, rank}.shard(gradient) : Shard{};
  }

  // Does the rank hold the box? Boxes of shards are cut alike on all ranks that hold some of the
  // same elements: these are at the same place of equally large slices.
  bool contains(int32_t rank, const Parameter& parameter, const SlicePiece& piece) const {
    const ParameterSlice slice =
        slice_of(parameter.kind, parameter.whole_shape, config_, part_.layout(), rank);
    return shard_of_rank(rank, slice.gradient) ==
               shard_of_rank(part_.rank, parameter.slice.gradient) &&
           contains(slice, piece);
  }

  static bool contains(const ParameterSlice& slice, const SlicePiece& piece) {
    for (size_t i = 0; i < slice.ranges.size(); ++i) {
      const int64_t begin = piece.offset[i];
      const int64_t end = begin + piece.shape[static_cast<int>(i)];
      const auto& ranges = slice.ranges[i];
      if (std::none_of(ranges.begin(), ranges.end(), [&](const IndexRange& range) {
            return range.begin <= begin && end <= range.end;
          })) {
        return false;
      }
    }
    return true;
  }

  const ModelConfig& config_;
  const ModelPart& part_;
  const bool of_shards_;
  std::vector<int32_t> lower_;
  bool first_of_place_ = false;
};

// Which boxes of a rank are wanted: of values, and of what the optimizer keeps.
struct Holders {
  LowestHolder values;
  LowestHolder optimizer;
};

// The boxes of this rank, in its memory: all of them, or those that it saves.
template <class Slice>
std::vector<Slice> slices_of(const ModelState& state, const StateStorage& storage,
                             const Holders* holders) {
  std::vector<Slice> slices;
  const auto add = [&](StateId id, const Shape& whole, const SlicePiece& piece) {
    const StateTensor& tensor = (*state.table)[id];
    Slice slice;
    slice.name = tensor.name;
    slice.role = to_checkpoint_role(tensor.role);
    slice.dtype = tensor.dtype;
    slice.global_shape = whole;
    slice.box = {piece.offset, piece.shape};
    slice.data = static_cast<std::byte*>(storage.view(id).data) +
                 static_cast<size_t>(piece.first) * size_of(tensor.dtype);
    slices.push_back(std::move(slice));
  };
  for (const Parameter& parameter : state.parameters) {
    for (const SlicePiece& piece : pieces_of(parameter.slice, parameter.held)) {
      if (holders != nullptr && !holders->values.is_lowest(parameter, piece)) continue;
      add(parameter.value, parameter.whole_shape, piece);
    }
    const std::vector<StateId> kept = optimizer_tensors(parameter);
    if (kept.empty()) continue;
    for (const SlicePiece& piece : pieces_of(parameter.slice, parameter.shard)) {
      if (holders != nullptr && !holders->optimizer.is_lowest(parameter, piece)) continue;
      for (const StateId id : kept) add(id, parameter.whole_shape, piece);
      for (const StateId id : scale_tensors(parameter)) {
        const int64_t columns = (*state.table)[parameter.exp_avg].shape.back();
        add(id, moment_scales_shape(parameter.whole_shape), scales_of(piece, columns));
      }
    }
  }
  if (holders != nullptr && !holders->values.is_lowest_of_place()) return slices;
  for (const StateId id : state.expert_biases) {
    if (!id.valid()) continue;
    const Shape& shape = (*state.table)[id].shape;
    add(id, shape, {.shape = shape});
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

std::string describe_run(const RunIdentity& identity, const TrainingPosition& position) {
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
  return training.dump();
}

// Every rank of the group has come here. Says whether any of them has failed.
bool any_failed(ProcessGroup* group, int32_t rank, bool failed) {
  if (group == nullptr) return failed;
  const std::vector<uint64_t> all = group->exchange(rank, failed ? 1 : 0);
  return std::any_of(all.begin(), all.end(), [](uint64_t each) { return each != 0; });
}

// Runs `body` and keeps what it throws, so that the rank still meets the others.
template <class Body>
std::exception_ptr failure_of(const Body& body) {
  try {
    body();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

// Ends a rank that goes on no further: with what it failed of, or with what another one did, which
// the meeting throws.
void stop(ProcessGroup* group, int32_t rank, const std::exception_ptr& failure) {
  if (failure != nullptr) std::rethrow_exception(failure);
  group->exchange(rank, 0);
  TROUPE_CHECK(false, "a rank that has failed goes on");
}

}  // namespace

CheckpointInfo save_training_checkpoint(const std::string& dir, const RunIdentity& identity,
                                        const TrainingPosition& position, const ModelState& state,
                                        const StateStorage& storage, ProcessGroup* group,
                                        const CheckpointOptions& options) {
  TROUPE_CHECK(state.table.get() == &storage.table(), "state and storage belong together");
  const int32_t rank = state.part.rank;
  const int32_t ranks = state.part.layout().world_size();
  TROUPE_CHECK((group == nullptr ? 1 : group->size()) == ranks, "all ranks save together");
  const bool first = rank == 0;

  uint64_t save_id = static_cast<uint64_t>(::getpid());
  if (group != nullptr) save_id = group->exchange(rank, save_id).front();
  const CheckpointWriter writer(dir, position.step, save_id, options);
  std::exception_ptr failure = failure_of([&] {
    if (first) writer.begin();
  });
  if (any_failed(group, rank, failure != nullptr)) stop(group, rank, failure);

  failure = failure_of([&] {
    const bool values_are_sharded = state.part.run->sharding == StateSharding::parameters;
    const Holders holders{.values = {identity.model, state.part, values_are_sharded},
                          .optimizer = {identity.model, state.part, /*of_shards=*/true}};
    std::vector<SliceToSave> slices = slices_of<SliceToSave>(state, storage, &holders);
    if (const std::string& file = identity.tokenizer.contents; first && !file.empty()) {
      auto slice = tokenizer_slice<SliceToSave>(static_cast<int64_t>(file.size()));
      slice.data = file.data();
      slices.push_back(std::move(slice));
    }
    writer.write(rank, slices);
  });
  bool failed = true;
  try {
    failed = any_failed(group, rank, failure != nullptr);
  } catch (...) {  // a rank is gone
    if (first) writer.abandon();
    throw;
  }
  if (failed) {
    if (first) writer.abandon();
    stop(group, rank, failure);
  }

  CheckpointInfo info;
  failure = failure_of([&] {
    if (first) {
      info = writer.commit(ranks, std::string(kVersion), describe_run(identity, position));
    }
  });
  if (any_failed(group, rank, failure != nullptr)) stop(group, rank, failure);
  return info;
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

void load_training_state(const Checkpoint& checkpoint, const ModelConfig& config,
                         const ModelState& state, const StateStorage& storage) {
  TROUPE_CHECK(state.table.get() == &storage.table(), "state and storage belong together");
  const std::vector<SliceToLoad> slices = slices_of<SliceToLoad>(state, storage, nullptr);
  std::vector<CheckpointRole> roles = {CheckpointRole::parameter, CheckpointRole::state};
  if (state.trained) roles.push_back(CheckpointRole::optimizer);
  // What else the checkpoint may hold: what other ranks load of the same model, and the tokenizer,
  // which belongs to the facts.
  std::vector<std::string> elsewhere = {kTokenizerTensor};
  RunLayout one = layout_of_one_rank(config.num_layers);
  one.exp_avg = state.part.run->exp_avg;
  one.exp_avg_sq = state.part.run->exp_avg_sq;
  const ModelState whole =
      declare_model_state(config, state.dtype, state.trained,
                          {.run = std::make_shared<const RunLayout>(std::move(one)), .rank = 0});
  for (int32_t i = 0; i < whole.table->size(); ++i) {
    elsewhere.push_back((*whole.table)[StateId{i}].name);
  }
  checkpoint.load(slices, roles, elsewhere);
}

}  // namespace troupe
