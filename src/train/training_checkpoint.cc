#include "train/training_checkpoint.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <fmt/format.h>
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <unistd.h>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "io/convert_dtype.h"
#include "io/hash.h"
#include "io/json.h"
#include "io/model_config_json.h"
#include "model/parameter_layout.h"
#include "ops/optimizer/adamw/moment_blocks.h"
#include "ops/precision/amax_history/amax_history.h"
#include "options/options.h"

namespace troupe {
namespace {

using nlohmann::json;

constexpr int kMaxTrainingDepth = 32;

// The tensor that holds the bytes of the tokenizer's file. It goes with the weights wherever they
// go, under the same hashes.
constexpr const char* kTokenizerTensor = "tokenizer";
// The same for the source's files: this and the file's name.
constexpr std::string_view kFilePrefix = "files/";

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
  if (parameter.master.valid()) ids.push_back(parameter.master);
  for (const OptimizerTensor& tensor : parameter.optimizer) ids.push_back(tensor.values);
  return ids;
}

// What it keeps for each block of moments.
std::vector<StateId> scale_tensors(const Parameter& parameter) {
  std::vector<StateId> ids;
  for (const OptimizerTensor& tensor : parameter.optimizer) {
    if (tensor.scales.valid()) ids.push_back(tensor.scales);
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
  LowestHolder(const ModelPart& part, bool of_shards) : part_(part), of_shards_(of_shards) {
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
      return holds(part_.partition(), part_.layout().dense_place(rank).pp, parameter) &&
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
    return shard_of_rank(rank, parameter.gradient_class) ==
               shard_of_rank(part_.rank, parameter.gradient_class) &&
           contains(slice_of(parameter, part_.layout(), rank), piece);
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

// Calls add(state, whole shape, piece) for the histories of largest elements; to save, where the
// rank is the first that has them.
template <class Add>
void add_histories(const ModelState& state, bool to_save, const Add& add) {
  const auto is_first = [&](bool experts) {
    const DensePlace dense = state.part.dense();
    const ExpertPlace expert = state.part.expert();
    return experts ? expert.etp == 0 && expert.edp == 0
                   : dense.tp == 0 && dense.cp == 0 && dense.dp == 0;
  };
  for (const Parameter& parameter : state.parameters) {
    if (!parameter.amax_history.valid()) continue;
    const bool experts = parameter.gradient_class == GradientClass::expert;
    if (to_save && !is_first(experts)) continue;
    const Shape& own = (*state.table)[parameter.amax_history].shape;
    Shape whole = own;
    SlicePiece piece{.shape = own};
    if (experts) {
      whole = {parameter.whole_shape[0], own[1], own[2]};
      piece.offset[0] = parameter.slice.ranges[0][0].begin;
    }
    add(parameter.amax_history, whole, piece);
  }
}

// The boxes of this rank, in its memory: all of them, or those that it saves.
template <class Slice>
std::vector<Slice> slices_of(const ModelState& state, const StateStorage& storage,
                             const Holders* holders, bool with_optimizer) {
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
      if (!(*state.table)[parameter.value].is_stored) break;
      if (holders != nullptr && !holders->values.is_lowest(parameter, piece)) continue;
      add(parameter.value, parameter.whole_shape, piece);
    }
    const std::vector<StateId> kept = optimizer_tensors(parameter);
    if (kept.empty() || !with_optimizer) continue;
    for (const SlicePiece& piece : pieces_of(parameter.slice, parameter.shard)) {
      if (holders != nullptr && !holders->optimizer.is_lowest(parameter, piece)) continue;
      for (const StateId id : kept) add(id, parameter.whole_shape, piece);
      for (const StateId id : scale_tensors(parameter)) {
        const int64_t columns = (*state.table)[parameter.optimizer.front().values].shape.back();
        add(id, moment_scales_shape(parameter.whole_shape), scales_of(piece, columns));
      }
    }
  }
  if (with_optimizer && state.trained) add_histories(state, holders != nullptr, add);
  if (holders != nullptr && !holders->values.is_lowest_of_place()) return slices;
  for (const StateId id : state.expert_biases) {
    if (!id.valid()) continue;
    const Shape& shape = (*state.table)[id].shape;
    add(id, shape, {.shape = shape});
  }
  return slices;
}

template <class Slice>
Slice file_slice(const std::string& name, int64_t bytes) {
  Slice slice;
  slice.name = name;
  slice.role = CheckpointRole::state;
  slice.dtype = DType::u8;
  slice.global_shape = Shape{bytes};
  slice.box.shape = slice.global_shape;
  return slice;
}

bool is_file(const StoredTensor& tensor) {
  return tensor.name == kTokenizerTensor || tensor.name.starts_with(kFilePrefix);
}

// All files that a checkpoint keeps, under the names of their tensors.
std::vector<HfFile> read_files(const Checkpoint& checkpoint) {
  std::vector<HfFile> files;
  std::vector<std::string> others;
  for (const StoredTensor& tensor : checkpoint.tensors()) {
    if (is_file(tensor) && tensor.shape.rank() == 1 && tensor.shape.elements() > 0) {
      files.push_back({tensor.name, {}});
      files.back().contents.resize(static_cast<size_t>(tensor.shape.elements()));
    } else {
      others.push_back(tensor.name);
    }
  }
  std::vector<SliceToLoad> slices;
  for (HfFile& file : files) {
    slices.push_back(
        file_slice<SliceToLoad>(file.name, static_cast<int64_t>(file.contents.size())));
    slices.back().data = file.contents.data();
  }
  if (!slices.empty()) checkpoint.load(slices, std::vector{CheckpointRole::state}, others);
  return files;
}

// Takes the tokenizer's and the source's files out of those that a checkpoint keeps.
void take_files(const Checkpoint& checkpoint, const json& training, RunIdentity& identity) {
  identity.tokenizer.type = training.at("tokenizer_type").get<std::string>();
  identity.tokenizer.eod = training.value("tokenizer_eod", "");
  if (training.contains("tokenizer_pad")) {
    identity.tokenizer.pad = training.at("tokenizer_pad").get<std::string>();
  }
  identity.tokenizer.path = checkpoint.path();
  for (HfFile& file : read_files(checkpoint)) {
    if (file.name == kTokenizerTensor) {
      identity.tokenizer.contents = std::move(file.contents);
      continue;
    }
    std::string name = file.name.substr(kFilePrefix.size());
    if (!is_hf_file(name)) {
      throw_failed(fmt::format("{}: keeps a file of the unknown name {}.", checkpoint.path(),
                               quote_name(name)));
    }
    identity.source.files.push_back({std::move(name), std::move(file.contents)});
  }
  if (!training.contains("source")) return;  // an older checkpoint, or a model of flags alone
  const json& source = training.at("source");
  identity.source.config_json = source.at("config").get<std::string>();
  identity.source.has_weights = source.at("weights").get<bool>();
  identity.source.keeps_token_ids = source.at("token_ids").get<bool>();
}

// The files that a checkpoint keeps, as tensors.
std::vector<SliceToSave> slices_of_files(const RunIdentity& identity) {
  std::vector<SliceToSave> slices;
  const auto add = [&](const std::string& name, const std::string& contents) {
    if (contents.empty()) return;
    slices.push_back(file_slice<SliceToSave>(name, static_cast<int64_t>(contents.size())));
    slices.back().data = contents.data();
  };
  add(kTokenizerTensor, identity.tokenizer.contents);
  for (const HfFile& file : identity.source.files) {
    add(std::string(kFilePrefix) + file.name, file.contents);
  }
  return slices;
}

json to_json(const std::vector<DataHash>& hashes) {
  json all = json::array();
  for (const DataHash& hash : hashes) {
    json one = {{"bytes", hash.bytes}, {"sampled_xxh3", hash_to_hex(hash.sampled)}};
    if (hash.full) one["xxh3"] = hash_to_hex(*hash.full);
    all.push_back(std::move(one));
  }
  return all;
}

std::vector<DataHash> read_data_hashes(const json& training, const std::string& where) {
  std::vector<DataHash> hashes;
  if (!training.contains("data_hashes")) return hashes;  // an older version's
  const auto read = [&](const json& text) {
    const std::optional<uint64_t> hash = hash_from_hex(text.get<std::string>());
    if (!hash) throw_failed(where + ": a hash in \"data_hashes\" is broken");
    return *hash;
  };
  for (const json& one : training.at("data_hashes")) {
    DataHash hash{.bytes = one.at("bytes").get<uint64_t>(),
                  .sampled = read(one.at("sampled_xxh3")),
                  .full = {}};
    if (one.contains("xxh3")) hash.full = read(one.at("xxh3"));
    hashes.push_back(hash);
  }
  return hashes;
}

std::string describe_run(const RunIdentity& identity, const TrainingPosition& position,
                         const SavedParts& parts) {
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
      {"tokenizer_pad", identity.tokenizer.pad.value_or("")},
      {"ordered_samples", identity.ordered_samples},
      {"data", identity.data},
      {"data_hashes", to_json(identity.data_hashes)},
      {"schedules", json::parse(to_json(identity.schedules))},
      {"options", json::parse(identity.options_json)},
  };
  if (!identity.source.config_json.empty()) {
    training["source"] = {{"config", identity.source.config_json},
                          {"weights", identity.source.has_weights},
                          {"token_ids", identity.source.keeps_token_ids}};
  }
  if (identity.compute_dtype == DType::f16) {
    training["loss_scale"] = {{"value", position.loss_scale.value},
                              {"clean_steps", position.loss_scale.clean_steps},
                              {"overflows_left", position.loss_scale.overflows_left}};
  }
  if (position.best_step > 0) {
    training["best"] = {{"step", position.best_step}, {"loss", position.best_loss}};
  }
  if (!parts.optimizer) training["optimizer_left_out"] = true;
  if (!parts.seed) training.erase("seed");
  if (parts.by_clock) training["by_clock"] = true;
  return training.dump();
}

std::vector<std::string> names_of_files(const Checkpoint& checkpoint) {
  std::vector<std::string> names;
  for (const StoredTensor& tensor : checkpoint.tensors()) {
    if (is_file(tensor)) names.push_back(tensor.name);
  }
  return names;
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

// All ranks have come here, at least one with a failure: ends the save on all of them. Rank 0,
// which speaks, names the first one that has failed and says what of.
[[noreturn]] void fail_together(ProcessGroup* group, int32_t rank,
                                const std::exception_ptr& failure) {
  ExitStatus status = ExitStatus::failed;
  std::string message;
  if (failure != nullptr) {
    try {
      std::rethrow_exception(failure);
    } catch (const UserError& error) {
      status = error.status();
      message = error.what();
    } catch (const std::exception& error) {
      message = error.what();
    }
  }
  if (group != nullptr) {
    const std::vector<std::string> messages = group->gather(rank, message);
    for (size_t other = 0; other < messages.size() && message.empty(); ++other) {
      if (!messages[other].empty()) message = fmt::format("rank {}: {}", other, messages[other]);
    }
  }
  throw SaveFailed(status, message.empty() ? "another rank could not save" : message);
}

Holders holders_of(const ModelState& state) {
  const bool values_are_sharded = state.part.run->sharding == StateSharding::parameters;
  return {.values = LowestHolder(state.part, values_are_sharded),
          .optimizer = LowestHolder(state.part, /*of_shards=*/true)};
}

// What this rank writes.
std::vector<SliceToSave> slices_to_save(const RunIdentity& identity, const ModelState& state,
                                        const StateStorage& storage, bool with_optimizer) {
  const Holders holders = holders_of(state);
  std::vector<SliceToSave> slices =
      slices_of<SliceToSave>(state, storage, &holders, with_optimizer);
  if (state.part.rank == 0) {
    for (SliceToSave& file : slices_of_files(identity)) slices.push_back(std::move(file));
  }
  return slices;
}

}  // namespace

CheckpointInfo save_training_checkpoint(const std::string& dir, const RunIdentity& identity,
                                        const TrainingPosition& position, const ModelState& state,
                                        const StateStorage& storage, ProcessGroup* group,
                                        const CheckpointOptions& options, const SavedParts& parts) {
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
  if (any_failed(group, rank, failure != nullptr)) fail_together(group, rank, failure);

  failure = failure_of(
      [&] { writer.write(rank, slices_to_save(identity, state, storage, parts.optimizer)); });
  bool failed = true;
  try {
    failed = any_failed(group, rank, failure != nullptr);
  } catch (...) {  // a rank is gone
    if (first) writer.abandon();
    throw;
  }
  if (failed) {
    if (first) writer.abandon();
    fail_together(group, rank, failure);
  }

  CheckpointInfo info;
  failure = failure_of([&] {
    if (first) {
      info = writer.commit(ranks, std::string(kVersion), describe_run(identity, position, parts));
    }
  });
  if (any_failed(group, rank, failure != nullptr)) fail_together(group, rank, failure);
  return info;
}

uint64_t checkpoint_bytes(const RunIdentity& identity, const ModelState& state,
                          const StateStorage& storage, ProcessGroup* group,
                          const SavedParts& parts) {
  uint64_t bytes = 0;
  for (const SliceToSave& slice : slices_to_save(identity, state, storage, parts.optimizer)) {
    bytes += static_cast<uint64_t>(slice.box.shape.elements()) * size_of(slice.dtype);
  }
  if (group == nullptr) return bytes;
  uint64_t all = 0;
  for (const uint64_t each : group->exchange(state.part.rank, bytes)) all += each;
  return all;
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
    if (training.contains("loss_scale")) {
      const json& scale = training.at("loss_scale");
      run.position.loss_scale = {.value = scale.at("value").get<double>(),
                                 .clean_steps = count(scale, "clean_steps"),
                                 .overflows_left = count(scale, "overflows_left")};
    }
    if (training.contains("best")) {
      const json& best = training.at("best");
      run.position.best_step = count(best, "step");
      run.position.best_loss = best.at("loss").get<double>();
    }
    run.identity.model = parse_model_config(training.at("model").dump(), where);
    const auto dtype = training.at("compute_dtype").get<std::string>();
    bool known = false;
    for (const DType candidate : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
      if (dtype == name_of(candidate)) {
        run.identity.compute_dtype = candidate;
        known = true;
      }
    }
    if (!known) {
      throw_failed(fmt::format("{}: unknown compute dtype {}.", where, quote_name(dtype)));
    }
    run.parts.optimizer = !training.value("optimizer_left_out", false);
    run.parts.by_clock = training.value("by_clock", false);
    run.parts.seed = training.contains("seed");
    if (run.parts.seed) {
      if (!training.at("seed").is_number_unsigned()) {
        throw_failed(where + ": the field \"seed\" must be a whole number of 64 bits");
      }
      run.identity.seed = training.at("seed").get<uint64_t>();
    }
    run.identity.sequence = static_cast<int32_t>(
        integer_field(training, "seq_length", 1, std::numeric_limits<int32_t>::max(), where));
    run.identity.split = training.at("split").get<std::string>();
    take_files(checkpoint, training, run.identity);
    run.identity.ordered_samples =
        integer_field(training, "ordered_samples", 1, kMostSamples, where);
    run.identity.data = training.at("data").get<std::string>();
    run.identity.data_hashes = read_data_hashes(training, where);
    run.identity.schedules = parse_schedules(training.at("schedules").dump(), where);
    run.identity.options_json = training.at("options").dump();
  } catch (const json::exception& error) {
    throw_failed(fmt::format("{}: the description of the training run is broken ({}).", where,
                             reason_of(error)));
  }
  return run;
}

namespace {

// One line for each field in which the models differ: "  num_layers: 2 saved, 4 now".
std::string model_differences(const ModelConfig& saved, const ModelConfig& wanted) {
  constexpr int kMostLines = 12;
  constexpr size_t kMostCharacters = 60;
  const json before = json::parse(write_model_config(saved));
  const json now = json::parse(write_model_config(wanted));
  json names = before;
  names.update(now);
  const auto text_of = [](const json& value) {
    if (value.is_discarded()) return std::string("nothing");
    const std::string text = value.dump();
    return text.size() <= kMostCharacters ? text : text.substr(0, kMostCharacters) + "...";
  };
  const json none = json(json::value_t::discarded);
  // Of lists how long they are, or the first value that differs.
  const auto difference = [&](const std::string& name) {
    const json& was = before.contains(name) ? before.at(name) : none;
    const json& is = now.contains(name) ? now.at(name) : none;
    const bool are_lists = was.is_array() && is.is_array();
    if (are_lists && was.size() != is.size()) {
      return fmt::format("{}: {} values saved, {} now", name, was.size(), is.size());
    }
    if (are_lists) {
      const auto at = static_cast<size_t>(std::mismatch(was.begin(), was.end(), is.begin()).first -
                                          was.begin());
      return fmt::format("{}[{}]: {} saved, {} now", name, at, text_of(was[at]), text_of(is[at]));
    }
    return fmt::format("{}: {} saved, {} now", name, text_of(was), text_of(is));
  };
  std::string text;
  int count = 0;
  for (const auto& [name, value] : names.items()) {
    if (before.contains(name) && now.contains(name) && before.at(name) == now.at(name)) continue;
    if (++count > kMostLines) continue;
    text += "\n  " + difference(name);
  }
  if (count > kMostLines) text += fmt::format("\n  and {} more", count - kMostLines);
  return text;
}

// "fp32" of f32.
std::string name_in_flags(DType dtype) {
  std::string name(name_of(dtype));
  if (name.front() == 'f') name.insert(1, "p");
  return name;
}

}  // namespace

void require_same_run(const StoredRun& stored, const RunIdentity& wanted, const std::string& path,
                      bool any_seed) {
  const auto refuse = [&](const std::string& what, const std::string& was, const std::string& is) {
    throw_bad_request(fmt::format(
        "{} was saved with {} {}, this run has {}. Give the same value to go on with that run, or "
        "--finetune to start a new one from its weights.",
        path, what, was, is));
  };
  if (!(stored.identity.model == wanted.model)) {
    throw_bad_request(
        fmt::format("{} holds another model than the flags describe:{}\nGive the same flags, or "
                    "--use-checkpoint-args to take the model from the checkpoint.",
                    path, model_differences(stored.identity.model, wanted.model)));
  }
  if (stored.identity.compute_dtype != wanted.compute_dtype) {
    refuse("--compute-dtype", name_in_flags(stored.identity.compute_dtype),
           name_in_flags(wanted.compute_dtype));
  }
  if (!stored.parts.seed && !any_seed) {
    throw_bad_request(
        fmt::format("{} was saved without its seed (--no-save-rng). Give --no-load-rng to go on "
                    "with --seed {}, "
                    "or --finetune to start a new run from its weights.",
                    path, wanted.seed));
  }
  if (stored.identity.seed != wanted.seed && !any_seed) {
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
    refuse("--tokenizer-model", "a file of other contents (or another eos_token or pad_token)",
           wanted.tokenizer.path);
  }
  if (stored.identity.split != wanted.split) {
    refuse("--split", stored.identity.split, wanted.split);
  }
}

void require_same_data(const StoredRun& stored, const RunIdentity& wanted,
                       const std::vector<std::string>& prefixes, const std::string& path) {
  const std::vector<DataHash>& before = stored.identity.data_hashes;
  const std::vector<DataHash>& now = wanted.data_hashes;
  if (stored.identity.data != wanted.data || before.size() != now.size()) return;
  for (size_t i = 0; i < now.size(); ++i) {
    if (!now[i].differs(before[i])) continue;
    throw_bad_request(fmt::format(
        "--data-path {}: the data set has as many tokens as when {} was saved, but other contents "
        "({} then, {} now). Restore the data, start a new run from the weights with --finetune, or "
        "go on with the other data on purpose: --allow-changed-data.",
        prefixes[i], path, before[i].describe(), now[i].describe()));
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

std::string passed_over(const std::string& path, const std::string& chosen,
                        const std::vector<std::string>& incomplete) {
  if (chosen == path || incomplete.empty()) return "";
  const int64_t step = Checkpoint::open(chosen).step();
  const std::optional<int64_t> newest = newest_checkpoint_folder(path);
  if (!newest || *newest <= step) return "";
  // A run that goes on may have saved it since `chosen` was found.
  if (const auto now = newest_checkpoint(path); now && now->step >= *newest) return "";
  return fmt::format(
      "{}: the newest checkpoint, of step {}, is damaged; the newest complete one is "
      "that of step {}. ({})",
      path, *newest, step, incomplete.back());
}

namespace {

// Histories of largest elements that the run did not have, or had for other numbers of steps, begin
// anew.
void leave_out_new_histories(const Checkpoint& checkpoint, std::vector<SliceToLoad>& slices) {
  std::map<std::string_view, Shape> stored;
  for (const StoredTensor& tensor : checkpoint.tensors()) {
    if (tensor.name.starts_with(kAmaxHistoryPrefix)) stored[tensor.name] = tensor.shape;
  }
  std::erase_if(slices, [&](const SliceToLoad& slice) {
    if (!slice.name.starts_with(kAmaxHistoryPrefix)) return false;
    const auto found = stored.find(slice.name);
    return found == stored.end() || found->second != slice.global_shape;
  });
}

// Weights that were kept as master weights alone (RunLayout::weight_codes), and are not here.
std::vector<const Parameter*> leave_out_values_of_masters(const Checkpoint& checkpoint,
                                                          const ModelState& state,
                                                          std::vector<SliceToLoad>& slices) {
  std::unordered_set<std::string_view> stored;
  for (const StoredTensor& tensor : checkpoint.tensors()) stored.insert(tensor.name);
  std::vector<const Parameter*> parameters;
  std::unordered_set<std::string_view> names;
  for (const Parameter& parameter : state.parameters) {
    const StateTensor& value = (*state.table)[parameter.value];
    if (!value.is_stored || stored.contains(value.name)) continue;
    if (!stored.contains(kMasterPrefix + value.name)) continue;
    parameters.push_back(&parameter);
    names.insert(value.name);
  }
  std::erase_if(slices, [&](const SliceToLoad& slice) { return names.contains(slice.name); });
  return parameters;
}

// Fills tensors of a state from stored ones of the same shapes, whatever their dtypes.
class WeightsLoader {
 public:
  WeightsLoader(const Checkpoint& checkpoint, const ModelState& state, const StateStorage& storage)
      : checkpoint_(checkpoint), state_(state), storage_(storage) {}

  bool is_stored(const std::string& name) const { return checkpoint_.find(name) != nullptr; }
  bool is_stored_as(const std::string& name, DType dtype) const {
    const StoredTensor* const found = checkpoint_.find(name);
    return found != nullptr && found->dtype == dtype;
  }

  bool is_stored_as(const std::string& name, const Shape& shape) const {
    const StoredTensor* const found = checkpoint_.find(name);
    return found != nullptr && found->shape == shape;
  }

  // The boxes `pieces` of `target` are to come from the tensor `name`, of this role and whole
  // shape.
  void add(const std::string& name, CheckpointRole role, const Shape& whole, StateId target,
           const std::vector<SlicePiece>& pieces) {
    const DType wanted = (*state_.table)[target].dtype;
    const StoredTensor* const found = checkpoint_.find(name);
    const bool converts = found != nullptr && found->dtype != wanted &&
                          can_convert(to_file_dtype(found->dtype), wanted);
    for (const SlicePiece& piece : pieces) {
      SliceToLoad slice;
      slice.name = name;
      slice.role = role;
      slice.dtype = converts ? found->dtype : wanted;
      slice.global_shape = whole;
      slice.box = {piece.offset, piece.shape};
      slice.data = static_cast<std::byte*>(storage_.view(target).data) +
                   static_cast<size_t>(piece.first) * size_of(wanted);
      (converts ? converted_[name] : direct_).push_back({slice, wanted});
    }
  }

  // `report` is in bytes of what this rank takes.
  void load(const WorkReport& report) const {
    uint64_t total = bytes_of(direct_);
    for (const auto& [name, requests] : converted_) total += bytes_of(requests);
    uint64_t before = 0;  // of the calls that are done
    const auto report_of = [&](uint64_t own) -> WorkReport {
      if (!report) return {};
      return [&report, before, own, total](uint64_t done, uint64_t) {
        report(before + std::min(done, own), total);
      };
    };
    load_slices(direct_, report_of(bytes_of(direct_)));
    before = bytes_of(direct_);
    for (const auto& [name, requests] : converted_) {
      convert(requests, report_of(bytes_of(requests)));
      before += bytes_of(requests);
    }
  }

 private:
  struct Request {
    SliceToLoad slice;  // `data` is the place in the state
    DType wanted = DType::f32;
  };

  static uint64_t bytes_of(const std::vector<Request>& requests) {
    uint64_t bytes = 0;
    for (const Request& request : requests) {
      bytes +=
          static_cast<uint64_t>(request.slice.box.shape.elements()) * size_of(request.slice.dtype);
    }
    return bytes;
  }

  void load_slices(const std::vector<Request>& requests, const WorkReport& report) const {
    std::vector<SliceToLoad> slices;
    for (const Request& request : requests) slices.push_back(request.slice);
    checkpoint_.load_some(slices, report);
  }

  // By way of a copy of what this rank takes of one tensor.
  void convert(const std::vector<Request>& requests, const WorkReport& report) const {
    std::vector<std::vector<std::byte>> copies;
    std::vector<Request> loads = requests;
    for (Request& load : loads) {
      const auto elements = static_cast<size_t>(load.slice.box.shape.elements());
      load.slice.data = copies.emplace_back(elements * size_of(load.slice.dtype)).data();
    }
    load_slices(loads, report);
    for (size_t i = 0; i < requests.size(); ++i) {
      const SliceToLoad& slice = requests[i].slice;
      convert_elements(to_file_dtype(slice.dtype), copies[i].data(), requests[i].wanted, slice.data,
                       slice.box.shape.elements());
    }
  }

  const Checkpoint& checkpoint_;
  const ModelState& state_;
  const StateStorage& storage_;
  std::vector<Request> direct_;
  std::unordered_map<std::string, std::vector<Request>> converted_;  // by stored tensor
};

void require_finite(const std::string& path, const ModelState& state, const StateStorage& storage) {
  for (const Parameter& parameter : state.parameters) {
    const bool has_value = (*state.table)[parameter.value].is_stored;
    const TensorView view = storage.view(has_value ? parameter.value : parameter.master);
    const int64_t at = first_not_finite(view.dtype, view.data, view.shape.elements());
    if (at < 0) continue;
    throw_failed(
        fmt::format("{}: the tensor {} is not finite as {} (element {} of this rank's {}): the run "
                    "that saved it has diverged, or it is too large for this type. Take an earlier "
                    "checkpoint.",
                    path, (*state.table)[parameter.value].name, name_of(view.dtype), at,
                    view.shape.elements()));
  }
}

}  // namespace

void load_training_state(const Checkpoint& checkpoint, const ModelConfig& config,
                         const ModelState& state, const StateStorage& storage,
                         const WorkReport& report, bool with_optimizer) {
  TROUPE_CHECK(state.table.get() == &storage.table(), "state and storage belong together");
  std::vector<SliceToLoad> slices = slices_of<SliceToLoad>(state, storage, nullptr, with_optimizer);
  leave_out_new_histories(checkpoint, slices);
  const std::vector<const Parameter*> without_values =
      leave_out_values_of_masters(checkpoint, state, slices);
  std::vector<CheckpointRole> roles = {CheckpointRole::parameter, CheckpointRole::state};
  if (state.trained && with_optimizer) roles.push_back(CheckpointRole::optimizer);
  // What else the checkpoint may hold: what other ranks load of the same model, and the files,
  // which belong to the facts.
  std::vector<std::string> elsewhere = names_of_files(checkpoint);
  for (const StoredTensor& tensor : checkpoint.tensors()) {
    if (tensor.name.starts_with(kAmaxHistoryPrefix)) elsewhere.push_back(tensor.name);
  }
  RunLayout one = layout_of_one_rank(config.num_layers, config.mtp_num_layers);
  one.optimizer = state.part.run->optimizer;
  const ModelState whole =
      declare_model_state(config, state.dtype, state.trained,
                          {.run = std::make_shared<const RunLayout>(std::move(one)), .rank = 0});
  for (int32_t i = 0; i < whole.table->size(); ++i) {
    elsewhere.push_back((*whole.table)[StateId{i}].name);
  }
  checkpoint.load(slices, roles, elsewhere, report);
  // Weights and master weights of which the checkpoint has the other.
  WeightsLoader loader(checkpoint, state, storage);
  for (const Parameter* parameter : without_values) {
    const std::string& value = (*state.table)[parameter->value].name;
    loader.add(kMasterPrefix + value, CheckpointRole::optimizer, parameter->whole_shape,
               parameter->value, pieces_of(parameter->slice, parameter->held));
  }
  if (!with_optimizer) {
    for (const Parameter& parameter : state.parameters) {
      if ((*state.table)[parameter.value].is_stored) continue;
      const std::string& value = (*state.table)[parameter.value].name;
      const bool from_value = !loader.is_stored(kMasterPrefix + value);
      loader.add(from_value ? value : kMasterPrefix + value,
                 from_value ? CheckpointRole::parameter : CheckpointRole::optimizer,
                 parameter.whole_shape, parameter.master,
                 pieces_of(parameter.slice, parameter.shard));
    }
  }
  loader.load(report);
}

CheckpointWeights::CheckpointWeights(Checkpoint checkpoint, DType stored_dtype,
                                     const ModelConfig& config)
    : checkpoint_(std::move(checkpoint)),
      saved_(declare_model_state(config, stored_dtype, /*trained=*/true)) {
  std::vector<std::string> known = names_of_files(checkpoint_);
  for (int32_t i = 0; i < saved_.table->size(); ++i) {
    known.push_back((*saved_.table)[StateId{i}].name);
  }
  constexpr std::array kWeights = {CheckpointRole::parameter, CheckpointRole::state};
  checkpoint_.load({}, kWeights, known);  // refuses what is in no such model
}

void CheckpointWeights::load(const ModelState& state, const StateStorage& storage,
                             const WorkReport& report) const {
  TROUPE_CHECK(state.table.get() == &storage.table(), "state and storage belong together");
  WeightsLoader loader(checkpoint_, state, storage);
  for (const Parameter& parameter : state.parameters) {
    const Parameter& saved = saved_.get(parameter.id);
    const std::string& value = (*saved_.table)[saved.value].name;
    const std::string master =
        saved.master.valid() && loader.is_stored((*saved_.table)[saved.master].name)
            ? (*saved_.table)[saved.master].name
            : "";
    const auto add = [&](bool from_master, StateId target, const IndexRange& range) {
      loader.add(from_master ? master : value,
                 from_master ? CheckpointRole::optimizer : CheckpointRole::parameter,
                 parameter.whole_shape, target, pieces_of(parameter.slice, range));
    };
    const bool same = loader.is_stored_as(value, (*state.table)[parameter.value].dtype);
    if ((*state.table)[parameter.value].is_stored) {
      add(!same && !master.empty(), parameter.value, parameter.held);
    }
    if (parameter.master.valid()) add(!master.empty(), parameter.master, parameter.shard);
  }
  for (const StateId id : state.expert_biases) {
    if (!id.valid()) continue;
    const StateTensor& bias = (*state.table)[id];
    loader.add(bias.name, CheckpointRole::state, bias.shape, id, {{.shape = bias.shape}});
  }
  add_histories(state, /*to_save=*/false,
                [&](StateId id, const Shape& all, const SlicePiece& piece) {
                  const std::string& name = (*state.table)[id].name;
                  if (!loader.is_stored_as(name, all)) return;
                  loader.add(name, CheckpointRole::optimizer, all, id, {piece});
                });
  loader.load(report);
  require_finite(checkpoint_.path(), state, storage);
}

void reset_optimizer(const ModelState& state, const StateStorage& storage, bool masters_too) {
  for (const Parameter& parameter : state.parameters) {
    const auto clear = [&](StateId id) {
      if (!id.valid()) return;  // without scales
      const TensorView view = storage.view(id);
      std::memset(view.data, 0, static_cast<size_t>(view.shape.elements()) * size_of(view.dtype));
    };
    for (const OptimizerTensor& tensor : parameter.optimizer) {
      clear(tensor.values);
      clear(tensor.scales);
    }
    if (!masters_too || !parameter.master.valid()) continue;
    if (!(*state.table)[parameter.value].is_stored) continue;  // the master is what was loaded
    const TensorView master = storage.view(parameter.master);
    const TensorView value = storage.view(parameter.value);
    TROUPE_CHECK(master.dtype == DType::f32 && is_half(value.dtype),
                 "master weights are those of bf16 and f16 weights");
    const int64_t first = parameter.shard.begin - parameter.held.begin;
    convert_elements(to_file_dtype(value.dtype),
                     static_cast<const std::byte*>(value.data) +
                         static_cast<size_t>(first) * size_of(value.dtype),
                     DType::f32, master.data, master.shape.elements());
  }
}

}  // namespace troupe
