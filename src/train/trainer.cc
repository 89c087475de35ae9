#include "train/trainer.h"

#include <chrono>
#include <cstdio>
#include <cstring>
#include <fmt/format.h>

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

void Trainer::open_data() {
  const auto tokenizer = make_tokenizer(identity_.tokenizer);
  if (tokenizer->vocab_size() > identity_.model.vocab_size) {
    throw_bad_request(
        fmt::format("The {} tokenizer has {} ids, more than the model's vocabulary of {} "
                    "(--vocab-size).",
                    tokenizer->name(), tokenizer->vocab_size(), identity_.model.vocab_size));
  }
  dataset_ = std::make_shared<const IndexedDataset>(options_.data_path);
  require_vocabulary(*dataset_, tokenizer->vocab_size(), tokenizer->name());
  const auto ranges = split_sequences(options_.split, dataset_->num_sequences());
  const auto source = [&](Split split) {
    return std::make_unique<SampleSource>(
        dataset_, SampleOptions{.split = split,
                                .sequences = ranges[static_cast<size_t>(split)],
                                .sequence_length = identity_.sequence,
                                .seed = identity_.seed,
                                .vocab_size = identity_.model.vocab_size,
                                .eod = tokenizer->eod(),
                                .eod_mask_loss = options_.eod_mask_loss});
  };
  training_data_ = source(Split::train);
  if (options_.eval_interval && options_.eval_iters > 0)
    validation_data_ = source(Split::validation);
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
  if (!options_.load.empty()) {
    std::vector<std::string> incomplete;
    const auto path = find_checkpoint(options_.load, &incomplete);
    for (const std::string& line : incomplete) say(options_, line);
    if (path) return load_checkpoint(*path, /*resume=*/!options_.finetune);
    if (options_.load != options_.save) {
      throw_bad_request(
          fmt::format("--load {}: there is no complete checkpoint in it.", options_.load));
    }
    say(options_,
        fmt::format("No checkpoint in {} yet: starting from the beginning.", options_.load));
  }
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
  const auto path = find_checkpoint(pretrained);
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
  const auto newest = newest_checkpoint(options_.save);
  if (!newest) return;
  throw_bad_request(fmt::format(
      "--save {}: the folder holds another run ({}). Give --load {} to go on with it, or "
      "save into another folder.",
      options_.save, newest->path, options_.save));
}

void Trainer::load_checkpoint(const std::string& path, bool resume) {
  const Checkpoint checkpoint = Checkpoint::open(path);
  const StoredRun stored = read_stored_run(checkpoint);
  if (resume) {
    require_same_run(stored, identity_, path);
    position_ = stored.position;
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
  text += fmt::format(
      "\nData: {} tokens in {} documents; {} training samples of {} tokens per epoch\n",
      format_count(static_cast<double>(dataset_->num_tokens())), dataset_->num_documents(),
      training_data_->samples_per_epoch(), identity_.sequence);
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

void Trainer::read_layer_metrics(StepMetrics& metrics) const {
  for (const LayerMetrics& layer : step_.layers) {
    ExpertLoads loads;
    loads.layer = layer.layer;
    const TensorView counts = interpreter_->view(layer.counts);
    for (int64_t i = 0; i < counts.shape.elements(); ++i) {
      loads.rows.push_back(static_cast<int64_t>(counts.as<double>()[i]));
    }
    if (layer.load_balancing_loss.valid()) {
      metrics.has_load_balancing_loss = true;
      loads.load_balancing_loss = *interpreter_->view(layer.load_balancing_loss).as<double>();
    }
    if (layer.z_loss.valid()) {
      metrics.has_z_loss = true;
      loads.z_loss = *interpreter_->view(layer.z_loss).as<double>();
    }
    metrics.layers.push_back(std::move(loads));
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
