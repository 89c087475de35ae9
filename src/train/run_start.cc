#include "train/run_start.h"

#include <algorithm>
#include <filesystem>
#include <fmt/format.h>
#include <utility>

#include "base/error.h"
#include "data/make_tokenizer.h"
#include "io/checkpoint.h"
#include "io/hash.h"
#include "io/hf_config.h"
#include "io/hf_weights.h"
#include "options/changed_options.h"
#include "options/layout_options.h"
#include "options/model_options.h"
#include "options/schedule_options.h"
#include "options/tokenizer_options.h"
#include "train/data_sets.h"
#include "train/initialize.h"
#include "train/model_source.h"
#include "train/rank_agreement.h"
#include "train/upcycling.h"
#include "train/work_progress.h"

namespace troupe {
namespace {

// "runs/a/" is "runs/a".
bool same_folder(const std::string& left, const std::string& right) {
  const auto plain = [](const std::string& name) {
    return (std::filesystem::path(name) / "").lexically_normal();
  };
  return plain(left) == plain(right);
}

// What tells the weights in a folder, of Hugging Face or of a run, from others.
std::string describe_weights(const std::string& folder) {
  const std::optional<std::string> path =
      path_exists(join_path(folder, "config.json")) ? std::nullopt : find_checkpoint(folder);
  if (path) return "one whose index has the xxh3 " + hash_to_hex(Checkpoint::open(*path).hash());
  return "files with the sampled xxh3 " + hash_to_hex(sampled_weights_hash(folder));
}

}  // namespace

LoadedCheckpoint find_loaded(const LoadSpec& load, const std::string& save, const RunLog& log) {
  LoadedCheckpoint loaded;
  if (load.folder.empty()) return loaded;
  std::vector<std::string> incomplete;
  loaded.path = find_checkpoint(load.folder, load.step, &incomplete);
  if (!loaded.path && has_checkpoint_folders(load.folder)) {
    throw_failed(fmt::format(
        "--load {}: none of its checkpoints is complete, the last because of: {}. Restore it, or "
        "move the folder away to start from the beginning.",
        load.folder, incomplete.back()));
  }
  // A warning: the run goes on from an earlier step than its owner may think.
  for (const std::string& line : incomplete) {
    log.warn(fmt::format("Warning: {}{}", line, line.ends_with('.') ? "" : "."));
  }
  if (loaded.path) {
    const Checkpoint checkpoint = Checkpoint::open(*loaded.path);
    loaded.stored = read_stored_run(checkpoint);
    loaded.hash = checkpoint.hash();
    const RunIdentity& run = loaded.stored->identity;
    if (load.takes_model) {
      loaded.args = SavedArgs{run.model, run.sequence, run.compute_dtype, run.tokenizer};
    }
    return loaded;
  }
  if (!same_folder(load.folder, save) || load.is_required) {
    throw_bad_request(
        fmt::format("--load {}: there is no {}.", load.folder,
                    path_exists(load.folder) ? "complete checkpoint in it" : "such folder"));
  }
  log.say(fmt::format("No checkpoint in {} yet: starting from the beginning.", load.folder));
  return loaded;
}

RunStart::RunStart(const RunSpec& spec, const LoadedCheckpoint& loaded, const RankSession& session,
                   const RunLog& log)
    : spec_(spec), loaded_(loaded), session_(session), log_(log) {
  Options saved = spec.options;
  saved.quiet = false;  // of the terminal, not of the run
  identity_ = {.model = spec.step.model,
               .compute_dtype = spec.step.dtype,
               .seed = spec.step.options.seed,
               .sequence = spec.step.options.sequence,
               .split = spec.data.split,
               .tokenizer = spec.tokenizer,
               .schedules = spec.schedules,
               .options_json = to_json(saved)};
  if (goes_on()) go_on();
  find_source();
  find_last_step();
  open_data();
}

bool RunStart::goes_on() const {
  const bool is_dense_source = spec_.load.upcycling_granularity > 0 && loaded_.stored &&
                               loaded_.stored->identity.model.num_experts == 0;
  return loaded_.path && !spec_.load.finetune && !is_dense_source;
}

void RunStart::go_on() {
  resumed_ = &*loaded_.stored;
  require_same_run(*resumed_, identity_, *loaded_.path, spec_.load.any_seed);
  if (!resumed_->parts.optimizer && spec_.load.optimizer) {
    throw_bad_request(fmt::format(
        "{} was saved without the optimizer's state (--no-save-optim). Give --no-load-optim to go "
        "on with a fresh optimizer, or --finetune to start a new run from its weights.",
        *loaded_.path));
  }
  if (spec_.load.keeps_schedules) {
    identity_.schedules = resumed_->identity.schedules;
  } else if (!spec_.load.any_schedules) {
    require_same_schedules(*resumed_, identity_.schedules, *loaded_.path);
  }
  position_ = resumed_->position;
  if (!spec_.load.optimizer) position_.updates = position_.scheduled_samples = 0;
  for (const std::string& line :
       changed_option_lines(resumed_->identity.options_json, spec_.options)) {
    if (line.starts_with("Warning")) {
      log_.warn(line);
    } else {
      log_.say(line);
    }
  }
}

void RunStart::find_source() {
  if (!loaded_.path) require_clear_weights(spec_);
  if (is_upcycled()) dense_model_of(identity_.model, spec_.load.upcycling_granularity);
  if (resumed_ != nullptr && !resumed_->identity.source.is_empty()) {
    identity_.source = resumed_->identity.source;
    return;
  }
  identity_.source = source_of_run(spec_, resumed_ != nullptr ? std::nullopt : loaded_.path);
}

void RunStart::find_last_step() {
  if (spec_.length.steps) {
    last_step_ = *spec_.length.steps;
    return;
  }
  last_step_ = position_.step +
               spec_.batch_sizes.steps_between(position_.consumed_samples, *spec_.length.samples);
  if (last_step_ == 0) {
    throw_bad_request(fmt::format("--train-samples {} are less than the first step's {}.",
                                  *spec_.length.samples, spec_.batch_sizes.at(0)));
  }
}

void RunStart::open_data() {
  const auto tokenizer = make_tokenizer(identity_.tokenizer);
  if (tokenizer->vocab_size() > identity_.model.vocab_size) {
    throw_bad_request(
        fmt::format("The {} tokenizer has {} ids, more than the model's vocabulary of {} "
                    "(--vocab-size).",
                    tokenizer->name(), tokenizer->vocab_size(), identity_.model.vocab_size));
  }
  if (spec_.data.needs_padding && tokenizer->pad() < 0) {
    throw_bad_request(
        fmt::format("--moe-router-ignore-padding: the {} tokenizer has no token that stands for "
                    "padding. Name one with a pad_token, or leave the option out.",
                    tokenizer->name()));
  }
  const DataSets data =
      open_run_data(spec_.data, tokenizer->vocab_size(), tokenizer->eod(), tokenizer->name());
  identity_.data = fingerprint(data);
  // Ranks of one process read the same files; one of them is enough.
  const ProcessGroup* const group = session_.group();
  hasher_ = std::make_unique<DataHasher>(
      data.sets, group == nullptr || session_.rank() == group->own_ranks().front());
  identity_.data_hashes = hasher_->hashes();
  for (const auto& set : data.sets) data_prefixes_.push_back(set->prefix());
  if (resumed_ != nullptr && resumed_->identity.data != identity_.data) {
    log_.warn(
        fmt::format("Warning: the run goes on with other data. Until now: {}. From here on: {}.",
                    resumed_->identity.data, identity_.data));
  }
  require_data_of_checkpoint();
  const SampleOptions samples{.split = Split::train,
                              .sequence_length = identity_.sequence,
                              .seed = identity_.seed,
                              .vocab_size = identity_.model.vocab_size,
                              .eod = tokenizer->eod(),
                              .pad = tokenizer->pad(),
                              .eod_mask_loss = spec_.data.eod_mask_loss,
                              .reset_attention_mask = spec_.data.reset_attention_mask,
                              .progress = [this](const std::string& line) { log_.say(line); }};
  training_data_ = order_training_data(data, samples);
  if (!spec_.evaluation.evaluates()) return;
  evaluation_sets_ = open_evaluation_sets(spec_.validation, samples, data, spec_.data.split);
}

void RunStart::require_data_of_checkpoint() const {
  if (resumed_ == nullptr || spec_.load.any_data) return;
  require_same_data(*resumed_, identity_, data_prefixes_, *loaded_.path);
}

void RunStart::finish_hashing() {
  if (hasher_ == nullptr) return;
  identity_.data_hashes = hasher_->hashes();
  hasher_.reset();
  RankFacts facts;
  for (size_t i = 0; i < data_prefixes_.size(); ++i) {
    const DataHash& hash = identity_.data_hashes[i];
    if (hash.full)
      facts.push_back({"the data set " + data_prefixes_[i], "one of " + hash.describe()});
  }
  require_same_facts(session_.group(), session_.rank(), facts);
  require_data_of_checkpoint();
}

int64_t RunStart::needed_samples() const {
  // As Megatron does: the order is made for the samples asked for, also where whole batches are
  // fewer.
  if (spec_.length.samples) return std::max(*spec_.length.samples, position_.consumed_samples);
  // Where a run's length is in steps, they have one size.
  const int64_t step_samples = spec_.batch_sizes.largest();
  const int64_t steps = std::max<int64_t>(0, last_step_ - position_.step);
  if (steps > (kMostSamples - position_.consumed_samples) / step_samples) {
    throw_bad_request(
        fmt::format("--train-iters {}: that many steps take more than the {} sequences "
                    "that a run may take.",
                    last_step_, kMostSamples));
  }
  return position_.consumed_samples + steps * step_samples;
}

std::unique_ptr<SampleSource> RunStart::order_training_data(const DataSets& data,
                                                            SampleOptions options) {
  const int64_t needed = needed_samples();
  if (resumed_) {
    const int64_t ordered = resumed_->identity.ordered_samples;
    options.num_samples = identity_.ordered_samples = ordered;
    options.num_read = needed;
    auto source = make_source(data, spec_.data.split, options);
    if (source->num_samples() >= needed) {
      if (needed != ordered) {
        log_.say(
            fmt::format("The run now ends after {} samples instead of {}. The order of "
                        "its data is kept: it holds {}.",
                        needed, ordered, source->num_samples()));
      }
      return source;
    }
    log_.warn(fmt::format(
        "Warning: the run now takes {} samples, and the order of its data, made for {}, holds {}. "
        "It goes on in an order made for {}, from sample {} on: some of what it has read comes "
        "again, and some is passed over.",
        needed, ordered, source->num_samples(), needed, position_.consumed_samples));
  }
  options.num_samples = identity_.ordered_samples = needed;
  options.num_read = 0;
  return make_source(data, spec_.data.split, options);
}

void RunStart::require_same_files() const {
  if (session_.group() == nullptr) return;
  RankFacts facts = {{"the position in the data", std::to_string(position_.consumed_samples)}};
  if (loaded_.stored) {
    facts.push_back({"the checkpoint in " + *loaded_.path,
                     "one whose index has the xxh3 " + hash_to_hex(loaded_.hash)});
  } else if (!spec_.load.pretrained.empty()) {
    facts.push_back(
        {"what lies in --pretrained-checkpoint", describe_weights(spec_.load.pretrained)});
  }
  const auto add_data = [&](const std::string& prefix, DataHash hash) {
    hash.full.reset();  // which ranks may know already
    facts.push_back({"the data set " + prefix, "one of " + hash.describe()});
  };
  for (size_t i = 0; i < data_prefixes_.size(); ++i) {
    add_data(data_prefixes_[i], identity_.data_hashes[i]);
  }
  for (const EvaluationSet& set : evaluation_sets_) {
    for (const auto& file : set.files) add_data(file->prefix(), sampled_hash(*file));
  }
  require_same_facts(session_.group(), session_.rank(), facts);
}

void RunStart::load_weights(RankSession& session, RunSaver& saver) const {
  if (is_upcycled()) return upcycle_weights(session);
  if (loaded_.path)
    return load_checkpoint(*loaded_.path, /*resume=*/resumed_ != nullptr, session, saver);
  if (spec_.load.pretrained.empty()) {
    initialize_parameters(session.state(), session.storage(), identity_.seed, session.pool());
    return;
  }
  const std::string& pretrained = spec_.load.pretrained;
  if (path_exists(join_path(pretrained, "config.json"))) {
    const HfPredictionLayers prediction = find_hf_prediction_layers(pretrained);
    if (!spec_.options.mtp_num_layers) require_whole(prediction, pretrained);
    WorkProgress progress(log_.is_quiet(), "loading " + pretrained);
    load_hf_weights(pretrained, identity_.model, session.state(), session.storage(),
                    progress.report());
    log_.say("Weights from " + pretrained + ".");
    if (hf_also_sees(join_path(pretrained, "config.json"))) {
      log_.say("The part of the model that takes images is left out.");
    }
    const int32_t held = prediction.held;
    const int32_t trained = identity_.model.own_mtp_layers();
    if (held > 0 && !prediction.are_read) {
      log_.say(
          "The folder's layers for multi-token prediction are left out: those of its "
          "architecture are not read.");
    } else if (prediction.announced > 0 && held == 0) {
      log_.say(
          "config.json announces layers for multi-token prediction, and the folder has no "
          "tensor of theirs.");
    } else if (held > trained) {
      log_.say(
          fmt::format("The folder has {} for multi-token prediction; {} trained "
                      "(--mtp-num-layers).",
                      held == 1 ? "a layer" : fmt::format("{} layers", held),
                      trained == 0   ? "none is"
                      : trained == 1 ? "one of them is"
                                     : fmt::format("{} of them are", trained)));
    }
    const bool by_bytes =
        identity_.tokenizer.type == "byte" && !was_given(spec_.options, "tokenizer-type");
    if (by_bytes && path_exists(join_path(pretrained, "tokenizer.json"))) {
      log_.say(
          fmt::format("The data are read as bytes, though {0} has a tokenizer: give "
                      "--tokenizer-type HuggingFaceTokenizer --tokenizer-model {0} if "
                      "they were made with it.",
                      pretrained));
    }
    return;
  }
  std::vector<std::string> incomplete;
  const auto path = find_checkpoint(pretrained, std::nullopt, &incomplete);
  if (!path && !incomplete.empty()) {
    throw_failed(
        fmt::format("--pretrained-checkpoint {}: none of its checkpoints is complete, the last "
                    "because of: {}",
                    pretrained, incomplete.back()));
  }
  if (!path) {
    throw_bad_request(
        fmt::format("--pretrained-checkpoint {}: neither a Hugging Face model "
                    "(config.json) nor a run with a complete checkpoint.",
                    pretrained));
  }
  if (const std::string damage = passed_over(pretrained, *path, incomplete); !damage.empty()) {
    log_.warn(fmt::format("Warning: --pretrained-checkpoint {}", damage));
  }
  load_checkpoint(*path, /*resume=*/false, session, saver);
}

void RunStart::upcycle_weights(const RankSession& session) const {
  const std::string& path = loaded_.path ? *loaded_.path : spec_.load.pretrained;
  const SavedModel dense = find_model(path, identity_.compute_dtype);
  if (!dense.passed_over.empty())
    log_.warn("Warning: --pretrained-checkpoint " + dense.passed_over);
  const ModelConfig& model = identity_.model;
  WorkProgress progress(log_.is_quiet(), "upcycling " + path, "layers");
  upcycle(dense, spec_.load.upcycling_granularity, identity_.seed, session.state(),
          session.storage(), progress.report());
  progress.clear();
  log_.say(fmt::format("Upcycled {}: {} experts of inner size {} from each network of {}.",
                       dense.path, model.num_experts, model.moe_ffn_hidden_size,
                       model.moe_ffn_hidden_size * spec_.load.upcycling_granularity));
  if (!starts_as_dense(model)) {
    log_.say(
        "The weights of the experts that a token chooses have no fixed sum with this router, so "
        "the model starts near the dense one, not as it. Softmax after top-k, or normalised "
        "scores, would make it exact.");
  }
}

void RunStart::load_checkpoint(const std::string& path, bool resume, const RankSession& session,
                               RunSaver& saver) const {
  Checkpoint checkpoint = Checkpoint::open(path);
  const StoredRun stored = read_stored_run(checkpoint);
  if (resume && same_folder(spec_.load.folder, spec_.save.folder)) {
    saver.go_on_from(position_.step, stored.parts.by_clock);
    // The run may have died between saving its best checkpoint and marking it.
    if (session.leads() && spec_.save.best && position_.best_step == position_.step &&
        position_.step > 0) {
      mark_best_checkpoint(spec_.save.folder, position_.step);
    }
  }
  WorkProgress progress(log_.is_quiet(), "loading " + path);
  if (resume) {
    const bool with_optimizer = spec_.load.optimizer;
    load_training_state(checkpoint, identity_.model, session.state(), session.storage(),
                        progress.report(), with_optimizer);
    if (!with_optimizer) reset_optimizer(session.state(), session.storage(), /*masters_too=*/true);
  } else {
    CheckpointWeights(std::move(checkpoint), stored.identity.compute_dtype, identity_.model)
        .load(session.state(), session.storage(), progress.report());
    reset_optimizer(session.state(), session.storage(), /*masters_too=*/false);
  }
  progress.clear();
  log_.say(fmt::format("Loaded {} (step {}{}).", path, stored.position.step,
                       !resume                 ? ", weights only"
                       : !spec_.load.optimizer ? ", with a fresh optimizer"
                                               : ""));
}

}  // namespace troupe
