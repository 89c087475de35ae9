#include "train/trainer.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fmt/format.h>
#include <limits>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include "base/machine.h"
#include "base/text.h"
#include "base/units.h"
#include "data/make_tokenizer.h"
#include "io/checkpoint.h"
#include "io/hash.h"
#include "io/hf_config.h"
#include "io/hf_weights.h"
#include "options/changed_options.h"
#include "options/device_options.h"
#include "options/layout_options.h"
#include "options/model_options.h"
#include "options/schedule_options.h"
#include "options/tokenizer_options.h"
#include "plan/kernel_variants.h"
#include "runtime/device_memory.h"
#include "train/initialize.h"
#include "train/interrupt.h"
#include "train/matmul_limit.h"
#include "train/memory_remedies.h"
#include "train/model_source.h"
#include "train/rank_agreement.h"
#include "train/rank_hardware.h"
#include "train/rank_profile.h"
#include "train/rank_run.h"
#include "train/slow_kernels.h"
#include "train/step_profile.h"
#include "train/terminal.h"
#include "train/work_progress.h"

namespace troupe {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void say(const Options& options, const std::string& text) {
  if (options.quiet) return;
  std::fprintf(stderr, "%s\n", wrap_for_terminal(text, STDERR_FILENO, 2).c_str());
}

// "runs/a/" is "runs/a".
bool same_folder(const std::string& left, const std::string& right) {
  const auto plain = [](const std::string& name) {
    return (std::filesystem::path(name) / "").lexically_normal();
  };
  return plain(left) == plain(right);
}

// Samples of one batch of --eval-iters. `trained`: of one step.
int64_t evaluation_batch_size(const Options& options, int32_t trained) {
  const int64_t size = options.eval_global_batch_size.value_or(trained);
  const int64_t unit = int64_t{options.eval_micro_batch_size.value_or(options.micro_batch_size)} *
                       data_parallel_size_of(options);
  const bool given = options.eval_global_batch_size || options.eval_micro_batch_size;
  if (given && size % unit != 0) {
    throw_bad_request(fmt::format(
        "--eval-global-batch-size {}: it must be a multiple of --eval-micro-batch-size {} x DP {}.",
        size, options.eval_micro_batch_size.value_or(options.micro_batch_size),
        data_parallel_size_of(options)));
  }
  return size;
}

// The steps of --iterations-to-skip, counted from 1.
std::set<int64_t> steps_to_skip(const Options& options) {
  std::set<int64_t> steps;
  for (const std::string& text : options.iterations_to_skip) {
    int64_t step = 0;
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, step);
    if (error != std::errc() || stop != end || step < 1) {
      throw_bad_request(fmt::format("--iterations-to-skip {}: steps are whole numbers from 1.",
                                    quote_name(text)));
    }
    steps.insert(step);
  }
  return steps;
}

// What tells the weights in a folder, of Hugging Face or of a run, from others.
std::string describe_weights(const std::string& folder) {
  const std::optional<std::string> path =
      path_exists(join_path(folder, "config.json")) ? std::nullopt : find_checkpoint(folder);
  if (path) return "one whose index has the xxh3 " + hash_to_hex(Checkpoint::open(*path).hash());
  return "files with the sampled xxh3 " + hash_to_hex(sampled_weights_hash(folder));
}

bool is_finite(const TensorView& view) {
  const auto finite = [&](const auto* values) {
    return std::all_of(values, values + view.shape.elements(),
                       [](auto value) { return std::isfinite(value); });
  };
  return view.dtype == DType::f64 ? finite(view.as<double>()) : finite(view.as<float>());
}

}  // namespace

Trainer::Trainer(const Options& options, int32_t rank, ProcessGroup* group)
    : options_(options),
      start_(std::chrono::steady_clock::now()),
      session_(device_spec_of(options), rank, group),
      saver_(options_, rank, group),
      routing_watch_({.load_imbalance = options.warn_load_imbalance,
                      .dead_experts = options.warn_dead_experts,
                      .router_entropy = options.warn_router_entropy}) {
  options_.quiet = options.quiet || !leads();
  if (options.profile) profiled_ranks(options);  // refuses ranks that there are not
  find_start();
  describe_run();
  step_options_ = training_step_options(options_, identity_.model);
  auto layout = std::make_shared<const RunLayout>(run_layout_of(options, identity_.model, group));
  identity_.sequence = step_options_.sequence;
  batch_sizes_ = make_batch_sizes(options, step_options_.sequence);
  skipped_steps_ = steps_to_skip(options);
  if (load_path_ && !options_.finetune) go_on();
  find_source();
  find_last_step();
  open_data();

  session_.declare(identity_.model, identity_.compute_dtype, /*trained=*/true, std::move(layout));
  build_step(batch_sizes_.largest());
  if (!evaluation_sets_.empty()) {
    evaluation_plan_ =
        plan_evaluation(identity_.model, session_, evaluation_sets_,
                        options.eval_micro_batch_size.value_or(options.micro_batch_size),
                        options.eval_iters * evaluation_batch_size(options, batch_sizes_.largest()),
                        options.loss_chunk_tokens);
    evaluation_bytes_ = evaluation_plan_.own_bytes();
  }
}

void Trainer::start() {
  for (const std::string& line :
       warn_of_slow_kernels(*step_.program, session_.device(), session_.gpu())) {
    warn(line);
  }
  // Before the memory is taken that the measurement needs, too.
  if (options_.profile) {
    profile_limits_ = measure_limits_of_rank(session_, identity_.compute_dtype);
  }
  session_.allocate();
  feed_ = std::make_unique<BatchFeed>(*training_data_);
  if (!evaluation_sets_.empty()) {
    evaluation_ =
        std::make_unique<Evaluation>(std::move(evaluation_plan_), session_, evaluation_sets_);
  }
  load_weights();
  session_.storage().to_device();
  if (leads()) saver_.refuse_foreign_folder();
  saver_.require_room(identity_, session_.state(), session_.storage());
}

void Trainer::build_step(int32_t batch_size) {
  // --use-checkpoint-opt_param-scheduler may have brought others than those of the options.
  step_options_.decoupled_learning_rate = identity_.schedules.decoupled_learning_rate.has_value();
  step_options_.micro_batches = batch_size / (options_.micro_batch_size * session_.layout().dp());
  step_ = build_training_step(identity_.model, session_.state(), step_options_);
  plan_ = session_.plan(*step_.program, options_.oracle);
  step_batch_size_ = batch_size;
}

void Trainer::prepare_step(int32_t batch_size) {
  if (interpreter_ != nullptr && step_batch_size_ == batch_size) return;
  if (interpreter_ != nullptr) {
    progress_->note(
        fmt::format("global batch size {} instead of {}", batch_size, step_batch_size_));
  }
  // The memory of one step is freed before that of the next is taken.
  interpreter_.reset();
  if (step_batch_size_ != batch_size) {
    build_step(batch_size);
    session_.check_collectives(*step_.program);
  }
  interpreter_ = session_.interpreter(
      *step_.program, plan_,
      {.capture = session_.spec().capture_graphs, .profile = options_.profile});
}

void Trainer::check_with_others() const {
  if (session_.group() != nullptr) {
    RankFacts facts = {{"the position in the data", std::to_string(position_.consumed_samples)}};
    if (stored_) {
      facts.push_back({"the checkpoint in " + *load_path_,
                       "one whose index has the xxh3 " + hash_to_hex(stored_hash_)});
    } else if (!options_.pretrained_checkpoint.empty()) {
      facts.push_back({"what lies in --pretrained-checkpoint",
                       describe_weights(options_.pretrained_checkpoint)});
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
  std::vector<PlannedProgram> programs = {{step_.program.get(), &plan_}};
  if (evaluation_plan_.step.program != nullptr) {
    programs.push_back({evaluation_plan_.step.program.get(), &evaluation_plan_.memory});
  }
  session_.check(programs, remedies_of_training(options_, session_.rank()));
}

void Trainer::warn(const std::string& text) const {
  if (!leads()) return;
  std::fprintf(stderr, "%s\n", wrap_for_terminal(text, STDERR_FILENO, 2).c_str());
}

uint32_t Trainer::votes_of_all(uint32_t votes) const {
  uint64_t all = 0;
  for (const uint64_t each : session_.exchange(votes)) all |= each;
  return static_cast<uint32_t>(all);
}

void Trainer::find_start() {
  if (options_.load.empty()) return;
  std::vector<std::string> incomplete;
  load_path_ = find_checkpoint(options_.load, options_.ckpt_step, &incomplete);
  if (!load_path_ && has_checkpoint_folders(options_.load)) {
    throw_failed(fmt::format(
        "--load {}: none of its checkpoints is complete, the last because of: {}. Restore it, or "
        "move the folder away to start from the beginning.",
        options_.load, incomplete.back()));
  }
  // A warning: the run goes on from an earlier step than its owner may think.
  for (const std::string& line : incomplete) warn(line);
  if (load_path_) {
    const Checkpoint checkpoint = Checkpoint::open(*load_path_);
    stored_ = read_stored_run(checkpoint);
    stored_hash_ = checkpoint.hash();
    return;
  }
  if (!same_folder(options_.load, options_.save) || options_.exit_on_missing_checkpoint) {
    throw_bad_request(
        fmt::format("--load {}: there is no complete checkpoint in it.", options_.load));
  }
  say(options_,
      fmt::format("No checkpoint in {} yet: starting from the beginning.", options_.load));
}

void Trainer::describe_run() {
  const ModelConfig* base = nullptr;
  if (options_.use_checkpoint_args && stored_) {
    const RunIdentity& saved = stored_->identity;
    const Options defaults;
    base = &saved.model;
    if (!options_.seq_length) options_.seq_length = saved.sequence;
    if (options_.compute_dtype == defaults.compute_dtype) {
      options_.compute_dtype = saved.compute_dtype;
    }
    if (options_.tokenizer_type == defaults.tokenizer_type && options_.tokenizer_model.empty()) {
      options_.tokenizer_type = saved.tokenizer.type;
      identity_.tokenizer = saved.tokenizer;
    }
  }
  identity_.model = load_model_config(options_, base);
  identity_.compute_dtype = options_.compute_dtype;
  identity_.seed = static_cast<uint64_t>(options_.seed);
  identity_.split = split_of(options_);
  if (identity_.tokenizer.contents.empty()) {
    identity_.tokenizer = read_tokenizer_of(options_);
  }
  identity_.schedules = make_schedules(options_);
  Options of_all_ranks = options_;
  of_all_ranks.quiet = false;  // ranks that do not lead are quiet
  identity_.options_json = to_json(of_all_ranks);
}

void Trainer::go_on() {
  resumed_ = stored_;
  require_same_run(*resumed_, identity_, *load_path_, options_.no_load_rng);
  if (!resumed_->parts.optimizer && !options_.no_load_optim) {
    throw_bad_request(fmt::format(
        "{} was saved without the optimizer's state (--no-save-optim). Give --no-load-optim to go "
        "on with a fresh optimizer, or --finetune to start a new run from its weights.",
        *load_path_));
  }
  if (options_.use_checkpoint_opt_param_scheduler) {
    identity_.schedules = resumed_->identity.schedules;
  } else if (!options_.override_opt_param_scheduler) {
    require_same_schedules(*resumed_, identity_.schedules, *load_path_);
  }
  position_ = resumed_->position;
  if (options_.no_load_optim) position_.updates = position_.scheduled_samples = 0;
  for (const std::string& line : changed_option_lines(resumed_->identity.options_json, options_)) {
    if (line.starts_with("Warning")) {
      warn(line);
    } else {
      say(options_, line);
    }
  }
}

void Trainer::find_source() {
  if (!load_path_) require_clear_weights(options_);
  if (resumed_ && !resumed_->identity.source.is_empty()) {
    identity_.source = resumed_->identity.source;
    return;
  }
  identity_.source =
      source_of_run(options_, identity_.tokenizer, options_.finetune ? load_path_ : std::nullopt);
}

void Trainer::find_last_step() {
  if (options_.train_iters) {
    last_step_ = *options_.train_iters;
    return;
  }
  last_step_ = position_.step +
               batch_sizes_.steps_between(position_.consumed_samples, *options_.train_samples);
  if (last_step_ == 0) {
    throw_bad_request(fmt::format("--train-samples {} are less than the first step's {}.",
                                  *options_.train_samples, batch_sizes_.at(0)));
  }
}

void Trainer::open_data() {
  const auto tokenizer = make_tokenizer(identity_.tokenizer);
  if (tokenizer->vocab_size() > identity_.model.vocab_size) {
    throw_bad_request(
        fmt::format("The {} tokenizer has {} ids, more than the model's vocabulary of {} "
                    "(--vocab-size).",
                    tokenizer->name(), tokenizer->vocab_size(), identity_.model.vocab_size));
  }
  if (options_.moe_router_ignore_padding && tokenizer->pad() < 0) {
    throw_bad_request(
        fmt::format("--moe-router-ignore-padding: the {} tokenizer has no token that stands for "
                    "padding. Name one with a pad_token, or leave the option out.",
                    tokenizer->name()));
  }
  const DataSets data =
      open_run_data(options_, tokenizer->vocab_size(), tokenizer->eod(), tokenizer->name());
  identity_.data = fingerprint(data);
  // Ranks of one process read the same files; one of them is enough.
  const ProcessGroup* const group = session_.group();
  hasher_ = std::make_unique<DataHasher>(
      data.sets, group == nullptr || session_.rank() == group->own_ranks().front());
  identity_.data_hashes = hasher_->hashes();
  for (const auto& set : data.sets) data_prefixes_.push_back(set->prefix());
  if (resumed_ && resumed_->identity.data != identity_.data) {
    warn(fmt::format("Warning: the run goes on with other data. Until now: {}. From here on: {}.",
                     resumed_->identity.data, identity_.data));
  }
  require_data_of_checkpoint();
  const SampleOptions samples{.split = Split::train,
                              .sequence_length = identity_.sequence,
                              .seed = identity_.seed,
                              .vocab_size = identity_.model.vocab_size,
                              .eod = tokenizer->eod(),
                              .pad = tokenizer->pad(),
                              .eod_mask_loss = options_.eod_mask_loss,
                              .reset_attention_mask = options_.reset_attention_mask,
                              .progress = [this](const std::string& line) { say(options_, line); }};
  training_data_ = order_training_data(data, samples);
  const bool evaluates = options_.eval_interval && options_.eval_iters > 0;
  if (evaluates) evaluation_sets_ = open_evaluation_sets(options_, samples, &data);
}

void Trainer::require_data_of_checkpoint() const {
  if (!resumed_ || options_.allow_changed_data) return;
  require_same_data(*resumed_, identity_, data_prefixes_, *load_path_);
}

void Trainer::finish_data_hashes() {
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

int64_t Trainer::needed_samples() const {
  // As Megatron does: the order is made for the samples asked for, also where whole batches are
  // fewer.
  if (options_.train_samples) return std::max(*options_.train_samples, position_.consumed_samples);
  // Where a run's length is in steps, they have one size.
  const int64_t step_samples = batch_sizes_.largest();
  const int64_t steps = std::max<int64_t>(0, last_step_ - position_.step);
  if (steps > (kMostSamples - position_.consumed_samples) / step_samples) {
    throw_bad_request(
        fmt::format("--train-iters {}: that many steps take more than the {} sequences "
                    "that a run may take.",
                    last_step_, kMostSamples));
  }
  return position_.consumed_samples + steps * step_samples;
}

std::unique_ptr<SampleSource> Trainer::order_training_data(const DataSets& data,
                                                           SampleOptions options) {
  const int64_t needed = needed_samples();
  if (resumed_) {
    const int64_t ordered = resumed_->identity.ordered_samples;
    options.num_samples = identity_.ordered_samples = ordered;
    options.num_read = needed;
    auto source = make_source(data, split_of(options_), options);
    if (source->num_samples() >= needed) {
      if (needed != ordered) {
        say(options_, fmt::format("The run now ends after {} samples instead of {}. The order of "
                                  "its data is kept: it holds {}.",
                                  needed, ordered, source->num_samples()));
      }
      return source;
    }
    warn(fmt::format(
        "Warning: the run now takes {} samples, and the order of its data, made for {}, holds {}. "
        "It goes on in an order made for {}, from sample {} on: some of what it has read comes "
        "again, and some is passed over.",
        needed, ordered, source->num_samples(), needed, position_.consumed_samples));
  }
  options.num_samples = identity_.ordered_samples = needed;
  options.num_read = 0;
  return make_source(data, split_of(options_), options);
}

void Trainer::load_weights() {
  if (load_path_) return load_checkpoint(*load_path_, /*resume=*/!options_.finetune);
  if (options_.pretrained_checkpoint.empty()) {
    initialize_parameters(session_.state(), session_.storage(), identity_.seed, session_.pool());
    return;
  }
  const std::string& pretrained = options_.pretrained_checkpoint;
  if (path_exists(join_path(pretrained, "config.json"))) {
    WorkProgress progress(options_.quiet, "loading " + pretrained);
    load_hf_weights(pretrained, identity_.model, session_.state(), session_.storage(),
                    progress.report());
    say(options_, "Weights from " + pretrained + ".");
    if (hf_prediction_layers(join_path(pretrained, "config.json")) > 0) {
      say(options_, "Layers of multi-token prediction, where the folder holds any, are left out.");
    }
    const bool by_bytes =
        identity_.tokenizer.type == "byte" && !was_given(options_, "tokenizer-type");
    if (by_bytes && path_exists(join_path(pretrained, "tokenizer.json"))) {
      say(options_, fmt::format("The data are read as bytes, though {0} has a tokenizer: give "
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
    warn(fmt::format("Warning: --pretrained-checkpoint {}", damage));
  }
  load_checkpoint(*path, /*resume=*/false);
}

void Trainer::load_checkpoint(const std::string& path, bool resume) {
  const Checkpoint checkpoint = Checkpoint::open(path);
  const StoredRun stored = read_stored_run(checkpoint);
  if (resume && same_folder(options_.load, options_.save)) {
    saver_.go_on_from(position_.step, stored.parts.by_clock);
    // The run may have died between saving its best checkpoint and marking it.
    if (leads() && options_.save_best && position_.best_step == position_.step &&
        position_.step > 0) {
      mark_best_checkpoint(options_.save, position_.step);
    }
  }
  WorkProgress progress(options_.quiet, "loading " + path);
  if (resume) {
    const bool with_optimizer = !options_.no_load_optim;
    load_training_state(checkpoint, identity_.model, session_.state(), session_.storage(),
                        progress.report(), with_optimizer);
    if (!with_optimizer)
      reset_optimizer(session_.state(), session_.storage(), /*masters_too=*/true);
  } else {
    load_checkpoint_weights(checkpoint, stored.identity.compute_dtype, identity_.model,
                            session_.state(), session_.storage(), progress.report());
    reset_optimizer(session_.state(), session_.storage(), /*masters_too=*/false);
  }
  progress.clear();
  say(options_, fmt::format("Loaded {} (step {}{}).", path, stored.position.step,
                            !resume                  ? ", weights only"
                            : options_.no_load_optim ? ", with a fresh optimizer"
                                                     : ""));
}

void Trainer::print_start() const {
  if (options_.quiet) return;
  const ModelConfig& model = identity_.model;
  std::string text;
  if (options_.verbose) {
    text += describe(options_);
  } else {
    text += "Options of troupe train that differ from the defaults (--verbose: all)\n";
    text += wrap_words(changed_flags(options_), kDefaultColumns, 2, 2) + "\n";
  }
  text += fmt::format(
      "Model: {} parameters, {} active per token, {} layers",
      format_count(static_cast<double>(session_.state().model->parameter_count())),
      format_count(static_cast<double>(session_.state().model->active_parameter_count())),
      model.num_layers);
  if (model.num_experts > 0) {
    text += fmt::format(", {} experts, top-{}", model.num_experts, model.moe_router_topk);
  }
  const int64_t samples = needed_samples();
  text += fmt::format("\nTraining data: {} samples of {} tokens\n", samples, identity_.sequence);
  text += describe_use(*training_data_, samples);
  for (size_t i = 0; i < evaluation_sets_.size(); ++i) {
    const std::string& name = evaluation_sets_[i].name;
    const SampleSource& source = *evaluation_sets_[i].source;
    const int64_t evaluated = evaluation_->num_samples(i);
    text += fmt::format("Validation data{}: {} samples for each evaluation\n",
                        name.empty() ? "" : " " + name, evaluated);
    text += describe_use(source, evaluated);
  }
  text += fmt::format("{}: {} operations, {} sequences in {} micro-batches\n",
                      batch_sizes_.stages.size() > 1 ? "Largest step" : "Step",
                      step_.program->op_count(), step_batch_size_,
                      step_batch_size_ / options_.micro_batch_size);
  if (options_.ranks > 1) {
    const Layout& layout = session_.layout();
    text += fmt::format(
        "{} ranks of {} threads: TP {} x CP {} x DP {} x PP {}; experts ETP {} x EP {} x EDP {}; "
        "{} micro-batches of the step each\n",
        options_.ranks, session_.threads(), layout.tp(), layout.cp(), layout.dp(), layout.pp(),
        layout.etp(), layout.ep(), layout.edp(), step_options_.micro_batches);
  }
  if (const int32_t replicas = session_.layout().dp();
      model.moe_global_aux_loss_coeff > 0 && replicas > 1) {
    text += fmt::format(
        "Note: the gradient of global_aux_loss does not depend on the number of replicas. In "
        "Megatron it is about 1/{0} of this with {0} of them: for its strength divide "
        "--moe-aux-loss-coeff by {0}.\n",
        replicas);
  }
  text += fmt::format("Memory, planned and allocated{}:\n",
                      options_.ranks > 1 ? ", of the first rank" : "") +
          describe_memory(plan_, evaluation_bytes_);
  std::fputs(wrap_for_terminal(text, STDERR_FILENO, 4).c_str(), stderr);
}

bool Trainer::due(const std::optional<int64_t>& interval) const {
  return interval && *interval > 0 && position_.step % *interval == 0;
}

ExitStatus Trainer::run() {
  check_with_others();
  if (leads()) saver_.lock();
  start();
  print_start();
  if (const std::string reason = why_no_hf_form(identity_.model); !reason.empty()) {
    say(options_, reason);
  }
  double limit = 1;  // only the leader reports
  if (leads()) {
    ThreadPool all_threads(session_.spec().thread_count());
    limit = measure_matmul_limit(identity_.compute_dtype, all_threads, session_.device());
    say(options_,
        fmt::format("Matrix products reach {}flop/s on {}: the limit.", format_count(limit),
                    session_.device() == Device::cuda
                        ? "the GPU"
                        : fmt::format("{} threads", all_threads.threads())));
  }
  open_logs();
  progress_ = std::make_unique<Progress>(ProgressOptions{
      .last_step = last_step_,
      .last_token = needed_samples() * identity_.sequence,
      .log_interval = options_.log_interval,
      .matmul_limit =
          limit / ranks_that_share(session_.spec(), session_.group(), session_.device()),
      .byte_tokens = identity_.tokenizer.type == "byte",
      .quiet = options_.quiet});

  StepMetrics metrics;
  if (position_.step == 0) evaluate();
  // Clocks and signals are not the same for all ranks: they end, and save, together.
  constexpr uint32_t kStop = 1;
  constexpr uint32_t kInterrupt = 2;
  constexpr uint32_t kSave = 4;
  constexpr uint32_t kHashing = 8;
  uint32_t votes = 0;
  while (true) {
    if (interrupt_requested()) votes |= kInterrupt;
    if (leads() && position_.step > 0 && saver_.is_due()) votes |= kSave;
    if (hasher_ != nullptr && !hasher_->is_done()) votes |= kHashing;
    votes = votes_of_all(votes);
    if ((votes & kHashing) == 0) finish_data_hashes();
    if ((votes & (kStop | kInterrupt)) != 0 || position_.step >= last_step_) break;
    if ((votes & kSave) != 0) save(SaveReason::clock);
    if (skipped_steps_.contains(position_.step + 1)) {
      leave_step_out();
      votes = must_exit() ? kStop : 0;
      continue;
    }
    metrics = do_step();
    routing_watch_.add(metrics);
    const bool logged = position_.step % options_.log_interval == 0 || position_.step == last_step_;
    progress_->step(metrics, logged);
    if (logged) log_step(metrics);
    if (metrics.skipped) note_skipped_step(metrics);
    if (options_.check_for_large_grads) {
      if (const std::string line = gradient_watch_.look(metrics.step, metrics.grad_norm);
          !line.empty()) {
        progress_->warning(line);
      }
    }
    stop_if_hopeless(metrics);
    if (due(options_.eval_interval) || position_.step == last_step_) evaluate();
    if (due(options_.save_interval)) save(SaveReason::asked);
    votes = must_exit() ? kStop : 0;
  }
  save(SaveReason::asked, /*is_last=*/true);
  if (!options_.quiet && !metrics.layers.empty()) {
    progress_->note(expert_load_chart(metrics, kDefaultColumns));
  }
  const bool interrupted = (votes & kInterrupt) != 0;
  if (interrupted) {
    progress_->note(options_.save.empty()
                        ? "Interrupted. Nothing was saved, because of --no-save."
                        : fmt::format("Interrupted after step {}, saved. --load {} goes on.",
                                      position_.step, options_.save));
  }
  if (leads() && options_.json) print_json(metrics, interrupted);
  return interrupted ? ExitStatus::interrupted : ExitStatus::done;
}

void Trainer::print_json(const StepMetrics& metrics, bool interrupted) const {
  using nlohmann::ordered_json;
  const bool stepped = metrics.step > 0;  // a finished run that is started again does no step
  const auto of_last_step = [&](double value) {
    return stepped ? ordered_json(value) : ordered_json();
  };
  ordered_json document = {
      {"status", interrupted ? "interrupted" : "done"},
      {"step", position_.step},
      {"last_step", last_step_},
      {"tokens", position_.consumed_samples * identity_.sequence},
      {"parameters", session_.state().model->parameter_count()},
      {"active_parameters", session_.state().model->active_parameter_count()},
      {"seconds", seconds_since(start_)},
      {"loss", of_last_step(metrics.loss)},
      {"grad_norm", of_last_step(metrics.grad_norm)},
      {"tokens_per_s", of_last_step(metrics.tokens_per_s)},
      {"tflops_per_gpu", of_last_step(metrics.tflops_per_gpu)},
      {"load_imbalance", of_last_step(metrics.load_imbalance())},
      {"peak_bytes", stepped ? ordered_json(metrics.peak_bytes) : ordered_json()},
      {"val_loss",
       last_evaluation_.empty() ? ordered_json() : ordered_json(last_evaluation_.front().loss)}};
  for (const EvaluationResult& result : last_evaluation_) {
    if (!result.name.empty()) document["val_loss/" + result.name] = result.loss;
  }
  document["save"] = options_.save.empty() ? ordered_json() : ordered_json(options_.save);
  const int64_t saved = saver_.last_saved_step();
  document["saved_step"] = saved < 0 ? ordered_json() : ordered_json(saved);
  fmt::print("{}\n", document.dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
}

bool Trainer::must_exit() const {
  return (options_.exit_after_step && position_.step >= *options_.exit_after_step) ||
         due(options_.exit_interval) ||
         (options_.exit_duration_in_mins &&
          seconds_since(start_) > 60.0 * *options_.exit_duration_in_mins);
}

void Trainer::open_logs() {
  // A run from the beginning also evaluates step 0 again.
  if (!leads()) return;
  const int64_t last_kept = position_.step > 0 ? position_.step : -1;
  if (!options_.save.empty()) {
    const Disk disk;
    disk.make_directories(options_.save);
    const std::string path = join_path(options_.save, "options.toml");
    const std::string temporary = path + ".tmp";
    disk.write_file(temporary, to_toml(options_));
    disk.rename(temporary, path);
    log_ = std::make_unique<MetricsLog>(join_path(options_.save, "metrics.jsonl"), last_kept,
                                        [this](const std::string& line) { warn(line); });
    log_->header({.step = position_.step,
                  .host = host_name(),
                  .device = value_text(options_, "device"),
                  .ranks = options_.ranks,
                  .model = options_.model,
                  .parameters = session_.state().model->parameter_count(),
                  .active_parameters = session_.state().model->active_parameter_count(),
                  .data = data_prefixes_,
                  .options_file = path});
  }
  if (!options_.tensorboard_dir.empty()) {
    tensorboard_ = std::make_unique<TensorboardWriter>(options_.tensorboard_dir, last_kept + 1);
  }
}

void Trainer::write_curves(std::span<const TensorboardWriter::Scalar> scalars) {
  if (!tensorboard_) return;
  try {
    tensorboard_->write(position_.step, scalars);
  } catch (const UserError& error) {
    warn(fmt::format("Warning: {} Training goes on without --tensorboard-dir.", error.what()));
    tensorboard_.reset();
  }
}

StepMetrics Trainer::do_step() {
  const int32_t samples = batch_sizes_.at(position_.consumed_samples);
  prepare_step(samples);
  const auto start = std::chrono::steady_clock::now();
  for (size_t i = 0; i < step_.micro_batches.size(); ++i) {
    const int64_t number = session_.part().global_micro_batch(static_cast<int32_t>(i));
    feed_->write(*interpreter_, step_.micro_batches[i],
                 position_.consumed_samples + number * options_.micro_batch_size);
  }
  StepMetrics metrics;
  metrics.data_time_s = seconds_since(start);
  const Schedules& schedules = identity_.schedules;
  metrics.lr = schedules.learning_rate.at(position_.scheduled_samples + samples);
  metrics.weight_decay = schedules.weight_decay.at(position_.scheduled_samples + samples);
  *interpreter_->view(step_.learning_rate).as<double>() = metrics.lr;
  if (schedules.decoupled_learning_rate) {
    *interpreter_->view(step_.decoupled_learning_rate).as<double>() =
        schedules.decoupled_learning_rate->at(position_.scheduled_samples + samples);
  }
  *interpreter_->view(step_.weight_decay).as<double>() = metrics.weight_decay;
  *interpreter_->view(step_.update_number).as<int64_t>() = position_.updates + 1;
  if (step_.step_number.valid()) {
    *interpreter_->view(step_.step_number).as<int64_t>() = position_.step;
  }
  if (is_profiled(options_, position_.step + 1)) {
    profile_step();
  } else {
    interpreter_->run();
  }

  metrics.skipped = *interpreter_->view(step_.skipped).as<int32_t>() != 0;
  position_.step += 1;
  position_.consumed_samples += samples;
  if (metrics.skipped) {
    position_.skipped_in_row += 1;
  } else {
    position_.skipped_in_row = 0;
    position_.updates += 1;
    position_.scheduled_samples += samples;
  }

  metrics.step = position_.step;
  metrics.loss = *interpreter_->view(step_.loss).as<double>();
  metrics.grad_norm = *interpreter_->view(step_.grad_norm).as<double>();
  if (step_.zero_gradients.valid()) {
    metrics.num_zeros =
        static_cast<int64_t>(*interpreter_->view(step_.zero_gradients).as<double>());
  }
  if (step_.squared_parameter_norm.valid()) {
    metrics.params_norm = std::sqrt(*interpreter_->view(step_.squared_parameter_norm).as<double>());
  }
  metrics.tokens = position_.consumed_samples * identity_.sequence;
  metrics.batch_size = samples;
  read_layer_metrics(metrics);
  metrics.step_time_s = seconds_since(start);
  metrics.tokens_per_s =
      static_cast<double>(int64_t{samples} * identity_.sequence) / metrics.step_time_s;
  metrics.tflops_per_gpu = session_.state().model->training_flops(identity_.sequence) *
                           static_cast<double>(samples) / options_.ranks / metrics.step_time_s /
                           1e12;
  metrics.peak_bytes = session_.device() == Device::cuda ? DeviceMemory::peak_allocated_bytes()
                                                         : Arena::peak_allocated_bytes();
  return metrics;
}

void Trainer::leave_step_out() {
  position_.consumed_samples += batch_sizes_.at(position_.consumed_samples);
  position_.step += 1;
  progress_->note(fmt::format("step {}: left out, its samples consumed (--iterations-to-skip)",
                              position_.step));
  if (position_.step == last_step_) evaluate();
}

void Trainer::profile_step() {
  StepProfile profile(*step_.program,
                      session_.device() == Device::cuda
                          ? variants_of_operations(*step_.program, device_traits(session_.gpu()))
                          : std::vector<std::string>());
  add_profiled_run(*interpreter_, session_, profile);
  const std::vector<int32_t> ranks = profiled_ranks(options_);
  const std::vector<std::string> tables =
      gather_from(session_, ranks, describe_profile(profile, profile_limits_));
  for (size_t i = 0; i < tables.size(); ++i) {
    progress_->note(options_.ranks == 1 ? tables[i]
                                        : fmt::format("Rank {}\n{}", ranks[i], tables[i]));
  }
  const WrittenTimelines written =
      write_timelines(session_, options_.profile_dir, position_.step + 1, ranks, profile);
  if (written.fault.empty()) {
    progress_->note(written.note);
  } else if (leads()) {
    progress_->warning(fmt::format("Warning: the timeline of step {} could not be written: {}",
                                   position_.step + 1, written.fault));
  }
}

void Trainer::note_skipped_step(const StepMetrics& metrics) const {
  if (std::isfinite(metrics.grad_norm)) {
    progress_->note(fmt::format(
        "step {}: update skipped; the gradients' norm {} is above --grad-norm-skip-threshold {}",
        position_.step, metrics.grad_norm, step_options_.skip_norm));
    return;
  }
  progress_->note(fmt::format("step {}: update skipped; not finite: gradients of {}",
                              position_.step, non_finite_gradients()));
}

std::string Trainer::non_finite_gradients() const {
  const std::vector<ParameterSpec>& all = session_.state().model->parameters();
  constexpr size_t kBits = 64;
  std::vector<uint64_t> found((all.size() + kBits - 1) / kBits);
  session_.storage().gradients_to_host();
  for (const Parameter& parameter : session_.state().parameters) {
    if (is_finite(session_.storage().view(parameter.gradient))) continue;
    const size_t number = parameter.number();
    found[number / kBits] |= uint64_t{1} << number % kBits;
  }
  for (uint64_t& bits : found) {
    for (const uint64_t other : session_.exchange(bits)) bits |= other;
  }
  constexpr int kNamed = 3;
  std::string text;
  int count = 0;
  for (const ParameterSpec& parameter : all) {
    const size_t number = parameter.number();
    if ((found[number / kBits] >> number % kBits & 1) == 0) continue;
    if (++count > kNamed) continue;
    text += (text.empty() ? "" : ", ") + parameter.full_name();
  }
  // Each may be finite and the sum of their squares not.
  if (count == 0) return "the sum of all";
  return count > kNamed ? fmt::format("{} and {} more", text, count - kNamed) : text;
}

void Trainer::stop_if_hopeless(const StepMetrics& metrics) const {
  const std::string kept = saver_.kept();
  if (position_.updates == 0 && !std::isfinite(metrics.loss)) {
    throw_failed(
        fmt::format("The loss of step {} is {}, and no step has changed the weights yet: they are "
                    "out of range from the start. Check where they come from, or lower "
                    "--init-method-std. {}",
                    metrics.step, std::abs(metrics.loss), kept));  // NaN may carry a sign
  }
  // A few steps that change nothing are sound; after this many, the next will be no other.
  if (options_.max_skipped_steps > 0 && position_.skipped_in_row >= options_.max_skipped_steps) {
    if (std::isfinite(metrics.grad_norm)) {
      throw_failed(fmt::format(
          "The updates of the last {} steps, up to step {}, were skipped (in the last one the "
          "gradients' norm was {}), and --max-skipped-steps ends the run. Raise "
          "--grad-norm-skip-threshold, or go on from an earlier checkpoint with a lower --lr. {}",
          position_.skipped_in_row, metrics.step, metrics.grad_norm, kept));
    }
    throw_failed(fmt::format(
        "The gradients of the last {} steps, up to step {}, are not finite (in the last one those "
        "of {}): the run has diverged, and --max-skipped-steps ends it. Go on from an earlier "
        "checkpoint with a lower --lr. {}",
        position_.skipped_in_row, metrics.step, non_finite_gradients(), kept));
  }
}

void Trainer::read_layer_metrics(StepMetrics& metrics) const {
  const auto read = [&](ValueId id) { return *interpreter_->view(id).as<double>(); };
  for (const LayerMetrics& layer : step_.layers) {
    RouterMetrics router;
    router.layer = layer.layer;
    const TensorView counts = interpreter_->view(layer.counts);
    for (int64_t i = 0; i < counts.shape.elements(); ++i) {
      router.rows.push_back(static_cast<int64_t>(counts.as<double>()[i]));
    }
    const int64_t tokens = layer.tokens.valid() ? static_cast<int64_t>(read(layer.tokens))
                                                : int64_t{step_batch_size_} * identity_.sequence;
    router.slots = tokens * identity_.model.moe_router_topk;
    router.entropy = read(layer.entropy);
    for (const LayerMetrics::Loss& loss : layer.losses) {
      router.losses.push_back({name_of(loss.kind), read(loss.value)});
    }
    metrics.layers.push_back(std::move(router));
  }
}

void Trainer::log_step(const StepMetrics& metrics) {
  if (!leads()) return;
  if (log_) log_->training(metrics);
  for (const std::string& line : routing_watch_.look(metrics.step)) progress_->warning(line);
  if (!tensorboard_) return;
  // Megatron's names, where it has one.
  std::vector<TensorboardWriter::Scalar> scalars = {
      {"lm loss", metrics.loss},
      {"learning-rate", metrics.lr},
      {"weight-decay", metrics.weight_decay},
      {"batch-size", static_cast<double>(metrics.batch_size)},
      {"grad-norm", metrics.grad_norm},
      {"tokens", static_cast<double>(metrics.tokens)},
      {"tokens-per-second", metrics.tokens_per_s},
      {"throughput", metrics.tflops_per_gpu},
      {"iteration-time", metrics.step_time_s},
      {"load_imbalance", metrics.load_imbalance()}};
  for (const RouterMetrics::Loss& loss : metrics.losses()) {
    scalars.push_back({loss.name, loss.value});
  }
  if (options_.log_memory_to_tensorboard) {
    scalars.push_back({"mem-max-allocated-bytes", static_cast<double>(metrics.peak_bytes)});
  }
  if (options_.log_timers_to_tensorboard) {
    scalars.push_back({"batch-generator-time", metrics.data_time_s});
    scalars.push_back(
        {"forward-backward-optimizer-time", metrics.step_time_s - metrics.data_time_s});
  }
  if (metrics.num_zeros) {
    scalars.push_back({"num-zeros", static_cast<double>(*metrics.num_zeros)});
  }
  if (metrics.params_norm) scalars.push_back({"params-norm", *metrics.params_norm});
  write_curves(scalars);
}

void Trainer::evaluate() {
  if (evaluation_ == nullptr) return;
  const auto start = std::chrono::steady_clock::now();
  last_evaluation_ = evaluation_->run([this](uint64_t done, uint64_t total) {
    progress_->between_steps("validating", done, total, "batches");
  });
  const std::vector<EvaluationResult>& results = last_evaluation_;
  if (log_) log_->evaluation(position_.step, results);
  progress_->evaluation(position_.step, results);
  if (tensorboard_) {
    std::vector<std::string> tags;
    for (const EvaluationResult& result : results) {
      tags.push_back("lm loss validation" + (result.name.empty() ? "" : "/" + result.name));
    }
    std::vector<TensorboardWriter::Scalar> scalars;
    for (size_t i = 0; i < results.size(); ++i) scalars.push_back({tags[i], results[i].loss});
    if (options_.log_timers_to_tensorboard) {
      scalars.push_back({"evaluate-time", seconds_since(start)});
    }
    write_curves(scalars);
  }
  const double loss = results.front().loss;
  const bool is_first = position_.best_step == 0;
  if (position_.step == 0 || !std::isfinite(loss) || !(is_first || loss < position_.best_loss)) {
    return;
  }
  position_.best_step = position_.step;
  position_.best_loss = loss;
  if (options_.save_best) save(SaveReason::asked);
}

RunSaver::Say Trainer::speaker() const {
  return [this](const std::string& text, bool is_failure) {
    if (is_failure) {
      progress_->warning(text);
    } else {
      progress_->note(text);
    }
  };
}

void Trainer::save(SaveReason reason, bool is_last) {
  const auto start = std::chrono::steady_clock::now();
  const int64_t before = saver_.last_saved_step();
  if (is_last) {
    saver_.save_last(identity_, position_, session_.state(), session_.storage(), speaker());
  } else {
    saver_.save(reason, identity_, position_, session_.state(), session_.storage(), speaker());
  }
  if (options_.log_timers_to_tensorboard && saver_.last_saved_step() != before) {
    const std::vector<TensorboardWriter::Scalar> timers = {
        {"save-checkpoint-time", seconds_since(start)}};
    write_curves(timers);
  }
}

ExitStatus train(const Options& options, ProcessGroup* processes) {
  std::atomic<ExitStatus> status = ExitStatus::done;  // the same for all ranks
  run_all_ranks(
      device_spec_of(options), processes,
      [&](int32_t rank, ProcessGroup* group) {
        return std::make_unique<Trainer>(options, rank, group);
      },
      [&](Trainer& trainer) { status = trainer.run(); });
  return status;
}

}  // namespace troupe
