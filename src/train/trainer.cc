#include "train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fmt/format.h>
#include <limits>

#include "base/machine.h"
#include "base/units.h"
#include "data/tokenizer.h"
#include "io/hf_weights.h"
#include "program/verify.h"
#include "train/initialize.h"
#include "train/interrupt.h"
#include "train/matmul_limit.h"
#include "train/model_options.h"

namespace troupe {
namespace {

// Steps without finite gradients change nothing. A few of them are sound; after this many in a row,
// the next will be no other.
constexpr int64_t kMostSkippedInARow = 20;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void say(const Options& options, const std::string& text) {
  if (!options.quiet) std::fprintf(stderr, "%s\n", text.c_str());
}

LearningRateSchedule make_schedule(const Options& options, int64_t samples_per_step) {
  const int64_t decay_iters = options.lr_decay_iters.value_or(*options.train_iters);
  return {
      .style = options.lr_decay_style == "constant" ? LrDecayStyle::constant : LrDecayStyle::cosine,
      .max_lr = *options.lr,
      .min_lr = options.min_lr,
      .warmup_samples = options.lr_warmup_iters * samples_per_step,
      .decay_samples = decay_iters * samples_per_step};
}

}  // namespace

std::string describe_memory(const MemoryPlan& plan, uint64_t evaluation_bytes) {
  std::string text;
  for (int i = 0; i < kRoleCount; ++i) {
    const uint64_t bytes = plan.bytes_by_role[static_cast<size_t>(i)];
    if (bytes == 0) continue;
    text += fmt::format("  {:<14} {:>12}\n", name_of(static_cast<Role>(i)), format_bytes(bytes));
  }
  if (evaluation_bytes > 0) {
    text += fmt::format("  {:<14} {:>12}\n", "evaluation", format_bytes(evaluation_bytes));
  }
  return text + fmt::format("  {:<14} {:>12}\n", "total",
                            format_bytes(plan.total_bytes() + evaluation_bytes));
}

Trainer::Trainer(const Options& options) : options_(options), pool_(thread_count(options)) {
  identity_.model = load_model_config(options);
  identity_.compute_dtype = compute_dtype_of(options);
  identity_.seed = static_cast<uint64_t>(options.seed);
  identity_.split = options.split;
  identity_.tokenizer = read_tokenizer_model(options.tokenizer_type, options.tokenizer_model);
  identity_.options_json = to_json(options);
  const TrainingStepOptions step_options = training_step_options(options, identity_.model);
  identity_.sequence = step_options.sequence;
  micro_batches_ = step_options.micro_batches;
  schedule_ = make_schedule(options, micro_batches_ * options.micro_batch_size);
  last_step_ = *options.train_iters;
  find_start();
  open_data();

  state_ = declare_model_state(identity_.model, identity_.compute_dtype, /*trained=*/true);
  step_ = build_training_step(identity_.model, state_, step_options);
  verify_program(*step_.program);
  plan_ = options.oracle ? plan_oracle(*step_.program, pool_.threads())
                         : plan_memory(*step_.program, pool_.threads());
  verify_memory_plan(*step_.program, plan_);
  EvaluationPlan evaluation;
  if (validation_data_ != nullptr) {
    evaluation = plan_evaluation(
        identity_.model, state_, *validation_data_, options.micro_batch_size,
        options.eval_iters * micro_batches_ * options.micro_batch_size, pool_.threads());
    evaluation_bytes_ = evaluation.own_bytes();
  }
  check_memory();
  storage_ = std::make_unique<StateStorage>(state_.table);
  interpreter_ = std::make_unique<CpuInterpreter>(*step_.program, plan_, *storage_, pool_);
  feed_ = std::make_unique<BatchFeed>(*training_data_);
  if (validation_data_ != nullptr) {
    evaluation_ =
        std::make_unique<Evaluation>(std::move(evaluation), *storage_, pool_, *validation_data_);
  }
  load_weights();
  refuse_foreign_folder();
}

void Trainer::find_start() {
  if (options_.load.empty()) return;
  std::vector<std::string> incomplete;
  load_path_ = find_checkpoint(options_.load, &incomplete);
  if (!load_path_ && has_checkpoint_folders(options_.load)) {
    throw_failed(fmt::format(
        "--load {}: none of its checkpoints is complete, the last because of: {}. Restore it, or "
        "move the folder away to start from the beginning.",
        options_.load, incomplete.back()));
  }
  // A warning: the run goes on from an earlier step than its owner may think.
  for (const std::string& line : incomplete) std::fprintf(stderr, "%s\n", line.c_str());
  if (!load_path_) {
    if (options_.load != options_.save) {
      throw_bad_request(
          fmt::format("--load {}: there is no complete checkpoint in it.", options_.load));
    }
    say(options_,
        fmt::format("No checkpoint in {} yet: starting from the beginning.", options_.load));
    return;
  }
  if (options_.finetune) return;
  resumed_ = read_stored_run(Checkpoint::open(*load_path_));
  require_same_run(*resumed_, identity_, *load_path_);
  position_ = resumed_->position;
}

void Trainer::open_data() {
  const auto tokenizer = make_tokenizer(identity_.tokenizer);
  if (tokenizer->vocab_size() > identity_.model.vocab_size) {
    throw_bad_request(
        fmt::format("The {} tokenizer has {} ids, more than the model's vocabulary of {} "
                    "(--vocab-size).",
                    tokenizer->name(), tokenizer->vocab_size(), identity_.model.vocab_size));
  }
  const DataSets data =
      open_data_sets(data_path_of(options_), tokenizer->vocab_size(), tokenizer->name());
  identity_.data = fingerprint(data);
  if (resumed_ && resumed_->identity.data != identity_.data) {
    fmt::print(stderr,
               "Warning: the run goes on with other data. Until now: {}. From here on: {}.\n",
               resumed_->identity.data, identity_.data);
  }
  SampleOptions samples{.split = Split::train,
                        .sequence_length = identity_.sequence,
                        .seed = identity_.seed,
                        .vocab_size = identity_.model.vocab_size,
                        .eod = tokenizer->eod(),
                        .eod_mask_loss = options_.eod_mask_loss,
                        .progress = [this](const std::string& line) { say(options_, line); }};
  training_data_ = order_training_data(data, samples);
  if (options_.eval_interval && options_.eval_iters > 0) {
    samples.split = Split::validation;
    samples.keep_partial = options_.keep_partial_validation_sample;
    validation_data_ = make_source(data, options_.split, samples);
  }
}

int64_t Trainer::needed_samples() const {
  const int64_t step_samples = micro_batches_ * options_.micro_batch_size;
  const int64_t steps = std::max<int64_t>(0, last_step_ - position_.step);
  if (steps > (std::numeric_limits<int64_t>::max() - position_.consumed_samples) / step_samples) {
    throw_bad_request(fmt::format(
        "--train-iters {}: the samples of so many steps cannot be counted.", last_step_));
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
    auto source = make_source(data, options_.split, options);
    if (source->num_samples() >= needed) {
      if (needed != ordered) {
        say(options_, fmt::format("The run now ends after {} samples instead of {}. The order of "
                                  "its data is kept: it holds {}.",
                                  needed, ordered, source->num_samples()));
      }
      return source;
    }
    fmt::print(stderr,
               "Warning: the run now takes {} samples, and the order of its data, made for {}, "
               "holds {}. It goes on in an order made for {}, from sample {} on: some of what it "
               "has read comes again, and some is passed over.\n",
               needed, ordered, source->num_samples(), needed, position_.consumed_samples);
  }
  options.num_samples = identity_.ordered_samples = needed;
  options.num_read = 0;
  return make_source(data, options_.split, options);
}

void Trainer::check_memory() const {
  const uint64_t available = available_memory_bytes();
  const uint64_t wanted = plan_.total_bytes() + evaluation_bytes_;
  if (available == 0 || wanted <= available) return;
  throw UserError(ExitStatus::does_not_fit,
                  fmt::format("The run needs {}, this machine has {} available:\n{}Use a smaller "
                              "--micro-batch-size, --seq-length or model.",
                              format_bytes(wanted), format_bytes(available),
                              describe_memory(plan_, evaluation_bytes_)));
}

void Trainer::load_weights() {
  if (load_path_) return load_checkpoint(*load_path_, /*resume=*/!options_.finetune);
  if (options_.pretrained_checkpoint.empty()) {
    initialize_parameters(state_, *storage_, identity_.seed, pool_);
    return;
  }
  const std::string& pretrained = options_.pretrained_checkpoint;
  if (path_exists(join_path(pretrained, "config.json"))) {
    load_hf_weights(pretrained, identity_.model, state_, *storage_);
    say(options_, "Weights from " + pretrained + ".");
    return;
  }
  std::vector<std::string> incomplete;
  const auto path = find_checkpoint(pretrained, &incomplete);
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
  load_checkpoint(*path, /*resume=*/false);
}

void Trainer::refuse_foreign_folder() const {
  if (options_.save.empty() || last_saved_step_ >= 0) return;  // going on with this run
  if (!has_checkpoint_folders(options_.save)) return;
  throw_bad_request(
      fmt::format("--save {0}: the folder holds another run. Give --load {0} to go on with it, or "
                  "save into another folder.",
                  options_.save));
}

void Trainer::load_checkpoint(const std::string& path, bool resume) {
  const Checkpoint checkpoint = Checkpoint::open(path);
  const StoredRun stored = read_stored_run(checkpoint);
  if (resume) {
    last_saved_step_ = options_.load == options_.save ? position_.step : -1;
  }
  load_training_state(checkpoint, state_, *storage_);
  if (!resume) {
    for (const Parameter& parameter : state_.parameters) {
      for (const StateId id : {parameter.exp_avg, parameter.exp_avg_sq}) {
        const TensorView view = storage_->view(id);
        std::memset(view.data, 0, static_cast<size_t>(view.shape.elements()) * size_of(view.dtype));
      }
    }
  }
  say(options_, fmt::format("Loaded {} (step {}{}).", path, stored.position.step,
                            resume ? "" : ", weights only"));
}

void Trainer::print_start() const {
  if (options_.quiet) return;
  const ModelConfig& model = identity_.model;
  std::string text = describe(options_);
  text += fmt::format("Model: {} parameters, {} active per token, {} layers",
                      format_count(static_cast<double>(model.parameter_count())),
                      format_count(static_cast<double>(model.active_parameter_count())),
                      model.num_layers);
  if (model.num_experts > 0) {
    text += fmt::format(", {} experts, top-{}", model.num_experts, model.moe_router_topk);
  }
  const int64_t samples = needed_samples();
  text += fmt::format("\nTraining data: {} samples of {} tokens\n", samples, identity_.sequence);
  text += describe_use(*training_data_, samples);
  if (validation_data_ != nullptr) {
    text += fmt::format("Validation data: {} samples for each evaluation\n",
                        evaluation_->num_samples());
    text += describe_use(*validation_data_, evaluation_->num_samples());
  }
  text += fmt::format("Step: {} operations, {} sequences in {} micro-batches\n",
                      step_.program->op_count(), micro_batches_ * options_.micro_batch_size,
                      micro_batches_);
  text += "Memory, planned and allocated:\n" + describe_memory(plan_, evaluation_bytes_);
  std::fputs(text.c_str(), stderr);
}

bool Trainer::due(const std::optional<int64_t>& interval) const {
  return interval && *interval > 0 && position_.step % *interval == 0;
}

ExitStatus Trainer::run() {
  print_start();
  const double limit = measure_matmul_limit(identity_.compute_dtype, pool_);
  say(options_, fmt::format("Matrix products reach {} flop/s on {} threads.", format_count(limit),
                            pool_.threads()));
  if (!options_.save.empty()) {
    const Disk disk;
    disk.make_directories(options_.save);
    // A run from the beginning also evaluates step 0 again.
    const int64_t last_kept = position_.step > 0 ? position_.step : -1;
    log_ = std::make_unique<MetricsLog>(join_path(options_.save, "metrics.jsonl"), last_kept);
  }
  progress_ = std::make_unique<Progress>(position_.step, last_step_, limit, options_.quiet);

  StepMetrics metrics;
  if (position_.step == 0) evaluate();
  while (position_.step < last_step_ && !interrupt_requested()) {
    metrics = do_step();
    if (position_.step % options_.log_interval == 0 || position_.step == last_step_) {
      if (log_) log_->training(metrics);
      progress_->step(metrics);
    }
    stop_if_hopeless(metrics);
    const bool last = position_.step == last_step_ ||
                      (options_.exit_after_step && position_.step >= *options_.exit_after_step);
    if (due(options_.eval_interval) || position_.step == last_step_) evaluate();
    if (due(options_.save_interval)) save();
    if (last) break;
  }
  save();
  if (!options_.quiet && !metrics.layers.empty()) {
    progress_->note("Expert load of the last step:");
    std::fputs(expert_load_chart(metrics, 40).c_str(), stderr);
  }
  if (interrupt_requested()) {
    progress_->note(options_.save.empty()
                        ? "Interrupted. Nothing was saved: there is no --save."
                        : fmt::format("Interrupted after step {}, saved. --load {} goes on.",
                                      position_.step, options_.save));
    return ExitStatus::interrupted;
  }
  return ExitStatus::done;
}

StepMetrics Trainer::do_step() {
  const auto start = std::chrono::steady_clock::now();
  const int64_t samples = micro_batches_ * options_.micro_batch_size;
  for (int64_t i = 0; i < micro_batches_; ++i) {
    feed_->write(*interpreter_, step_.micro_batches[static_cast<size_t>(i)],
                 position_.consumed_samples + i * options_.micro_batch_size);
  }
  StepMetrics metrics;
  metrics.lr = schedule_.at(position_.scheduled_samples + samples);
  *interpreter_->view(step_.learning_rate).as<double>() = metrics.lr;
  *interpreter_->view(step_.weight_decay).as<double>() = options_.weight_decay;
  *interpreter_->view(step_.update_number).as<int64_t>() = position_.updates + 1;
  if (step_.step_number.valid()) {
    *interpreter_->view(step_.step_number).as<int64_t>() = position_.step;
  }
  interpreter_->run();

  metrics.skipped = *interpreter_->view(step_.skipped).as<int32_t>() != 0;
  position_.step += 1;
  position_.consumed_samples += samples;
  if (!metrics.skipped) {
    position_.updates += 1;
    position_.scheduled_samples += samples;
  }

  metrics.step = position_.step;
  metrics.loss = *interpreter_->view(step_.loss).as<double>();
  metrics.grad_norm = *interpreter_->view(step_.grad_norm).as<double>();
  metrics.tokens = position_.consumed_samples * identity_.sequence;
  read_layer_metrics(metrics);
  metrics.step_time_s = seconds_since(start);
  metrics.tokens_per_s = static_cast<double>(samples * identity_.sequence) / metrics.step_time_s;
  metrics.tflops_per_gpu = identity_.model.training_flops_per_sequence(identity_.sequence) *
                           static_cast<double>(samples) / metrics.step_time_s / 1e12;
  metrics.peak_bytes = Arena::peak_allocated_bytes();
  return metrics;
}

void Trainer::stop_if_hopeless(const StepMetrics& metrics) {
  skipped_in_a_row_ = metrics.skipped ? skipped_in_a_row_ + 1 : 0;
  const std::string kept =
      last_saved_step_ < 0 ? "Nothing was saved."
                           : fmt::format("The checkpoint of step {} is kept.", last_saved_step_);
  if (position_.updates == 0 && !std::isfinite(metrics.loss)) {
    throw_failed(
        fmt::format("The loss of step {} is {}, and no step has changed the weights yet: they are "
                    "out of range from the start. Check where they come from, or lower "
                    "--init-method-std. {}",
                    metrics.step, metrics.loss, kept));
  }
  if (skipped_in_a_row_ >= kMostSkippedInARow) {
    throw_failed(fmt::format(
        "The gradients of the last {} steps, up to step {}, are not finite: the run has "
        "diverged. Go on from an earlier checkpoint with a lower --lr. {}",
        skipped_in_a_row_, metrics.step, kept));
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
    router.slots = micro_batches_ * options_.micro_batch_size * identity_.sequence *
                   identity_.model.moe_router_topk;
    router.entropy = read(layer.entropy);
    for (const LayerMetrics::Loss& loss : layer.losses) {
      router.losses.push_back({name_of(loss.kind), read(loss.value)});
    }
    metrics.layers.push_back(std::move(router));
  }
}

void Trainer::evaluate() {
  if (evaluation_ == nullptr) return;
  const EvaluationResult result = evaluation_->run();
  if (log_) log_->evaluation(position_.step, result.loss, result.tokens);
  progress_->evaluation(position_.step, result.loss);
}

void Trainer::save() {
  if (options_.save.empty() || last_saved_step_ == position_.step) return;
  const auto start = std::chrono::steady_clock::now();
  const CheckpointInfo info =
      save_training_checkpoint(options_.save, identity_, position_, state_, *storage_);
  last_saved_step_ = position_.step;
  if (options_.keep_checkpoints > 0) prune_checkpoints(options_.save, options_.keep_checkpoints);
  progress_->note(fmt::format("saved {} in {}", info.path, format_duration(seconds_since(start))));
}

}  // namespace troupe
