#include "train/trainer.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fmt/format.h>
#include <limits>

#include "base/machine.h"
#include "base/units.h"
#include "data/tokenizer.h"
#include "io/hash.h"
#include "io/hf_weights.h"
#include "parallel/group_schedule.h"
#include "parallel/rank_communicators.h"
#include "train/initialize.h"
#include "train/interrupt.h"
#include "train/layout_options.h"
#include "train/matmul_limit.h"
#include "train/model_options.h"
#include "train/rank_run.h"
#include "train/step_profile.h"

namespace troupe {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void say(const Options& options, const std::string& text) {
  if (!options.quiet) std::fprintf(stderr, "%s\n", text.c_str());
}

// "runs/a/" is "runs/a".
bool same_folder(const std::string& left, const std::string& right) {
  const auto plain = [](const std::string& name) {
    return (std::filesystem::path(name) / "").lexically_normal();
  };
  return plain(left) == plain(right);
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
      rank_(rank),
      group_(group),
      start_(std::chrono::steady_clock::now()),
      pool_(threads_of_rank(options, group)),
      device_(device_of(options)),
      gpu_(device_ == Device::cuda ? gpu_of_rank(group, rank, options.ranks_per_gpu) : 0),
      routing_watch_({.load_imbalance = options.warn_load_imbalance,
                      .dead_experts = options.warn_dead_experts,
                      .router_entropy = options.warn_router_entropy}) {
  options_.quiet = options.quiet || !leads();
  if (options.profile) profiled_ranks(options);  // refuses ranks that there are not
  identity_.model = load_model_config(options);
  identity_.compute_dtype = compute_dtype_of(options);
  identity_.seed = static_cast<uint64_t>(options.seed);
  identity_.split = options.split;
  identity_.tokenizer = read_tokenizer_model(options.tokenizer_type, options.tokenizer_model);
  identity_.schedules = make_schedules(options);
  identity_.options_json = to_json(options);
  step_options_ = training_step_options(options, identity_.model);
  part_ = {.run = std::make_shared<const RunLayout>(run_layout_of(options, identity_.model)),
           .rank = rank};
  identity_.sequence = step_options_.sequence;
  batch_sizes_ = make_batch_sizes(options, step_options_.sequence);
  find_start();
  find_last_step();
  open_data();

  state_ = declare_model_state(identity_.model, identity_.compute_dtype, /*trained=*/true, part_);
  build_step(batch_sizes_.largest());
  if (!evaluation_sets_.empty()) {
    evaluation_plan_ =
        plan_evaluation(identity_.model, state_, evaluation_sets_, options.micro_batch_size,
                        options.eval_iters * batch_sizes_.largest(), options.loss_chunk_tokens,
                        pool_.threads(), device_);
    evaluation_bytes_ = evaluation_plan_.own_bytes();
  }
}

void Trainer::start() {
  // Before the memory is taken that the measurement needs, too.
  if (options_.profile) {
    profile_limits_ =
        measure_limits_of_rank(options_, group_, rank_, identity_.compute_dtype, device_);
  }
  storage_ = std::make_unique<StateStorage>(state_.table, device_, gpu_);
  feed_ = std::make_unique<BatchFeed>(*training_data_);
  if (!evaluation_sets_.empty()) {
    evaluation_ = std::make_unique<Evaluation>(
        std::move(evaluation_plan_), *storage_, pool_, evaluation_sets_, part_, group_,
        InterpreterOptions{.one_stream = options_.ranks_per_gpu > 1});
  }
  load_weights();
  storage_->to_device();
  if (leads()) refuse_foreign_folder();
}

void Trainer::build_step(int32_t batch_size) {
  step_options_.micro_batches = batch_size / (options_.micro_batch_size * part_.layout().dp());
  PlannedStep planned = plan_training_step(identity_.model, state_, step_options_, pool_.threads(),
                                           device_, options_.oracle);
  step_ = std::move(planned.step);
  plan_ = std::move(planned.plan);
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
    if (group_ != nullptr) verify_collectives(*group_, rank_, *step_.program, part_.layout());
  }
  interpreter_ = make_interpreter(*step_.program, plan_, *storage_, pool_,
                                  communicators_of(group_, part_.layout(), rank_),
                                  {.capture = captures_graph(options_),
                                   .profile = options_.profile,
                                   .one_stream = options_.ranks_per_gpu > 1});
}

void Trainer::check_with_others() const {
  if (group_ != nullptr) {
    const std::string start =
        fmt::format("{} {} {}", identity_.options_json, identity_.data, position_.consumed_samples);
    const std::vector<uint64_t> starts =
        group_->exchange(rank_, hash_bytes(start.data(), start.size()));
    for (size_t rank = 1; leads() && rank < starts.size(); ++rank) {
      if (starts[rank] == starts[0]) continue;
      throw_bad_request(fmt::format(
          "Rank {} was not started as rank 0 was: its options, its data or the checkpoint that it "
          "goes on from are others. Give all ranks the same flags, and folders that all hosts "
          "share.",
          rank));
    }
  }
  require_memory(options_, group_, rank_, planned_bytes(), gpu_,
                 describe_memory(plan_, evaluation_bytes_));
  require_host_memory(options_, group_, rank_, plan_);
  if (group_ == nullptr) return;
  verify_collectives(*group_, rank_, *step_.program, part_.layout());
  if (evaluation_plan_.step.program != nullptr) {
    verify_collectives(*group_, rank_, *evaluation_plan_.step.program, part_.layout());
  }
}

void Trainer::warn(const std::string& text) const {
  if (leads()) std::fprintf(stderr, "%s\n", text.c_str());
}

uint32_t Trainer::votes_of_all(uint32_t votes) const {
  if (group_ == nullptr) return votes;
  uint64_t all = 0;
  for (const uint64_t each : group_->exchange(rank_, votes)) all |= each;
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
  if (!load_path_) {
    if (!same_folder(options_.load, options_.save) || options_.exit_on_missing_checkpoint) {
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
  if (options_.use_checkpoint_opt_param_scheduler) {
    identity_.schedules = resumed_->identity.schedules;
  } else if (!options_.override_opt_param_scheduler) {
    require_same_schedules(*resumed_, identity_.schedules, *load_path_);
  }
  position_ = resumed_->position;
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
  const DataSets data =
      open_data_sets(data_path_of(options_), tokenizer->vocab_size(), tokenizer->name());
  identity_.data = fingerprint(data);
  if (resumed_ && resumed_->identity.data != identity_.data) {
    warn(fmt::format("Warning: the run goes on with other data. Until now: {}. From here on: {}.",
                     resumed_->identity.data, identity_.data));
  }
  const SampleOptions samples{.split = Split::train,
                              .sequence_length = identity_.sequence,
                              .seed = identity_.seed,
                              .vocab_size = identity_.model.vocab_size,
                              .eod = tokenizer->eod(),
                              .eod_mask_loss = options_.eod_mask_loss,
                              .progress = [this](const std::string& line) { say(options_, line); }};
  training_data_ = order_training_data(data, samples);
  if (options_.eval_interval) evaluation_sets_ = open_evaluation_sets(options_, samples, &data);
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
        fmt::format("--train-iters {}: so many steps take more than the {} sequences "
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
    auto source = make_source(data, options_.split, options);
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
  return make_source(data, options_.split, options);
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
  load_checkpoint(*path, /*resume=*/false);
}

void Trainer::refuse_foreign_folder() const {
  if (options_.save.empty()) return;
  if (last_saved_step_ < 0) {
    if (!has_checkpoint_folders(options_.save)) return;
    throw_bad_request(
        fmt::format("--save {0}: the folder holds another run. Give --load {0} to go on with it, "
                    "or save into another folder.",
                    options_.save));
  }
  const auto newest = newest_checkpoint(options_.save);
  if (!newest || newest->step <= last_saved_step_) return;  // going on with this run
  throw_bad_request(
      fmt::format("--save {}: the folder holds later checkpoints ({}) than --ckpt-step {}. Save "
                  "into another folder, or remove them.",
                  options_.save, newest->path, last_saved_step_));
}

void Trainer::load_checkpoint(const std::string& path, bool resume) {
  const Checkpoint checkpoint = Checkpoint::open(path);
  const StoredRun stored = read_stored_run(checkpoint);
  if (resume) {
    last_saved_step_ = same_folder(options_.load, options_.save) ? position_.step : -1;
    // The run may have died between saving its best checkpoint and marking it.
    if (leads() && options_.save_best && last_saved_step_ >= 0 &&
        position_.best_step == position_.step && position_.step > 0) {
      mark_best_checkpoint(options_.save, position_.step);
    }
  }
  load_training_state(checkpoint, identity_.model, state_, *storage_);
  if (!resume) {
    for (const Parameter& parameter : state_.parameters) {
      for (const StateId id : {parameter.exp_avg, parameter.exp_avg_scale, parameter.exp_avg_sq,
                               parameter.exp_avg_sq_scale}) {
        if (!id.valid()) continue;  // of an empty shard, or without scales
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
  for (size_t i = 0; i < evaluation_sets_.size(); ++i) {
    const auto& [name, source] = evaluation_sets_[i];
    const int64_t evaluated = evaluation_->num_samples(i);
    text += fmt::format("Validation data{}: {} samples for each evaluation\n",
                        name.empty() ? "" : " " + name, evaluated);
    text += describe_use(*source, evaluated);
  }
  text += fmt::format("{}: {} operations, {} sequences in {} micro-batches\n",
                      batch_sizes_.stages.size() > 1 ? "Largest step" : "Step",
                      step_.program->op_count(), step_batch_size_,
                      step_batch_size_ / options_.micro_batch_size);
  if (options_.ranks > 1) {
    const Layout& layout = part_.layout();
    text += fmt::format(
        "{} ranks of {} threads: TP {} x CP {} x DP {} x PP {}; experts ETP {} x EP {} x EDP {}; "
        "{} micro-batches of the step each\n",
        options_.ranks, pool_.threads(), layout.tp(), layout.cp(), layout.dp(), layout.pp(),
        layout.etp(), layout.ep(), layout.edp(), step_options_.micro_batches);
  }
  text += fmt::format("Memory, planned and allocated{}:\n",
                      options_.ranks > 1 ? ", of the first rank" : "") +
          describe_memory(plan_, evaluation_bytes_);
  std::fputs(text.c_str(), stderr);
}

bool Trainer::due(const std::optional<int64_t>& interval) const {
  return interval && *interval > 0 && position_.step % *interval == 0;
}

ExitStatus Trainer::run() {
  check_with_others();
  start();
  print_start();
  double limit = 1;  // only the leader reports
  if (leads()) {
    ThreadPool all_threads(thread_count(options_));
    limit = measure_matmul_limit(identity_.compute_dtype, all_threads, device_);
    say(options_,
        fmt::format("Matrix products reach {} flop/s on {}.", format_count(limit),
                    device_ == Device::cuda ? "the GPU"
                                            : fmt::format("{} threads", all_threads.threads())));
  }
  open_logs();
  progress_ = std::make_unique<Progress>(last_step_, needed_samples() * identity_.sequence,
                                         limit / ranks_that_share(options_, group_, device_),
                                         options_.quiet);

  StepMetrics metrics;
  if (position_.step == 0) evaluate();
  // Clocks and signals are not the same for all ranks: they end together.
  constexpr uint32_t kStop = 1;
  constexpr uint32_t kInterrupt = 2;
  uint32_t votes = 0;
  while (true) {
    votes = votes_of_all(votes | (interrupt_requested() ? kInterrupt : 0));
    if (votes != 0 || position_.step >= last_step_) break;
    metrics = do_step();
    routing_watch_.add(metrics);
    if (position_.step % options_.log_interval == 0 || position_.step == last_step_) {
      log_step(metrics);
    }
    if (metrics.skipped) note_skipped_step();
    stop_if_hopeless(metrics);
    if (due(options_.eval_interval) || position_.step == last_step_) evaluate();
    if (due(options_.save_interval)) save();
    votes = must_exit() ? kStop : 0;
  }
  save();
  if (!options_.quiet && !metrics.layers.empty()) {
    progress_->note("Expert load of the last step:");
    std::fputs(expert_load_chart(metrics, 40).c_str(), stderr);
  }
  if ((votes & kInterrupt) != 0) {
    progress_->note(options_.save.empty()
                        ? "Interrupted. Nothing was saved: there is no --save."
                        : fmt::format("Interrupted after step {}, saved. --load {} goes on.",
                                      position_.step, options_.save));
    return ExitStatus::interrupted;
  }
  return ExitStatus::done;
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
    log_ = std::make_unique<MetricsLog>(join_path(options_.save, "metrics.jsonl"), last_kept);
    const std::string path = join_path(options_.save, "options.toml");
    const std::string temporary = path + ".tmp";
    disk.write_file(temporary, to_toml(options_));
    disk.rename(temporary, path);
  }
  if (!options_.tensorboard_dir.empty()) {
    tensorboard_ = std::make_unique<TensorboardWriter>(options_.tensorboard_dir, last_kept + 1);
  }
}

StepMetrics Trainer::do_step() {
  const int32_t samples = batch_sizes_.at(position_.consumed_samples);
  prepare_step(samples);
  const auto start = std::chrono::steady_clock::now();
  for (size_t i = 0; i < step_.micro_batches.size(); ++i) {
    const int64_t number = part_.global_micro_batch(static_cast<int32_t>(i));
    feed_->write(*interpreter_, step_.micro_batches[i],
                 position_.consumed_samples + number * options_.micro_batch_size);
  }
  StepMetrics metrics;
  const Schedules& schedules = identity_.schedules;
  metrics.lr = schedules.learning_rate.at(position_.scheduled_samples + samples);
  metrics.weight_decay = schedules.weight_decay.at(position_.scheduled_samples + samples);
  *interpreter_->view(step_.learning_rate).as<double>() = metrics.lr;
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
  metrics.tokens = position_.consumed_samples * identity_.sequence;
  metrics.batch_size = samples;
  read_layer_metrics(metrics);
  metrics.step_time_s = seconds_since(start);
  metrics.tokens_per_s =
      static_cast<double>(int64_t{samples} * identity_.sequence) / metrics.step_time_s;
  metrics.tflops_per_gpu = identity_.model.training_flops_per_sequence(identity_.sequence) *
                           static_cast<double>(samples) / options_.ranks / metrics.step_time_s /
                           1e12;
  metrics.peak_bytes = device_ == Device::cuda ? DeviceMemory::peak_allocated_bytes()
                                               : Arena::peak_allocated_bytes();
  return metrics;
}

void Trainer::profile_step() {
  StepProfile profile(*step_.program);
  add_profiled_run(*interpreter_, group_, rank_, profile);
  const std::vector<int32_t> ranks = profiled_ranks(options_);
  const std::vector<std::string> tables =
      gather_from(group_, rank_, ranks, describe_profile(profile, profile_limits_));
  for (size_t i = 0; i < tables.size(); ++i) {
    progress_->note(options_.ranks == 1 ? tables[i]
                                        : fmt::format("Rank {}\n{}", ranks[i], tables[i]));
  }
  progress_->note(write_timelines(options_, group_, rank_, position_.step + 1, ranks, profile));
}

void Trainer::note_skipped_step() const {
  progress_->note(fmt::format("step {}: update skipped; not finite: gradients of {}",
                              position_.step, non_finite_gradients()));
}

std::string Trainer::non_finite_gradients() const {
  const ModelState whole = declare_model_state(identity_.model, state_.dtype, /*trained=*/false);
  constexpr size_t kBits = 64;
  std::vector<uint64_t> found((whole.parameters.size() + kBits - 1) / kBits);
  storage_->gradients_to_host();
  for (const Parameter& parameter : state_.parameters) {
    if (is_finite(storage_->view(parameter.gradient))) continue;
    found[parameter.number / kBits] |= uint64_t{1} << parameter.number % kBits;
  }
  if (group_ != nullptr) {
    for (uint64_t& bits : found) {
      for (const uint64_t other : group_->exchange(rank_, bits)) bits |= other;
    }
  }
  constexpr int kNamed = 3;
  std::string text;
  int count = 0;
  for (const Parameter& parameter : whole.parameters) {
    if ((found[parameter.number / kBits] >> parameter.number % kBits & 1) == 0) continue;
    if (++count > kNamed) continue;
    text += (text.empty() ? "" : ", ") + (*whole.table)[parameter.value].name;
  }
  // Each may be finite and the sum of their squares not.
  if (count == 0) return "the sum of all";
  return count > kNamed ? fmt::format("{} and {} more", text, count - kNamed) : text;
}

void Trainer::stop_if_hopeless(const StepMetrics& metrics) const {
  const std::string kept =
      last_saved_step_ < 0 ? "Nothing was saved."
                           : fmt::format("The checkpoint of step {} is kept.", last_saved_step_);
  if (position_.updates == 0 && !std::isfinite(metrics.loss)) {
    throw_failed(
        fmt::format("The loss of step {} is {}, and no step has changed the weights yet: they are "
                    "out of range from the start. Check where they come from, or lower "
                    "--init-method-std. {}",
                    metrics.step, std::abs(metrics.loss), kept));  // NaN may carry a sign
  }
  // A few steps that change nothing are sound; after so many, the next will be no other.
  if (options_.max_skipped_steps > 0 && position_.skipped_in_row >= options_.max_skipped_steps) {
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
    router.slots = int64_t{step_batch_size_} * identity_.sequence * identity_.model.moe_router_topk;
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
  progress_->step(metrics);
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
  tensorboard_->write(metrics.step, scalars);
}

void Trainer::evaluate() {
  if (evaluation_ == nullptr) return;
  const std::vector<EvaluationResult> results = evaluation_->run();
  if (log_) log_->evaluation(position_.step, results);
  progress_->evaluation(position_.step, results);
  if (tensorboard_) {
    std::vector<std::string> tags;
    for (const EvaluationResult& result : results) {
      tags.push_back("lm loss validation" + (result.name.empty() ? "" : "/" + result.name));
    }
    std::vector<TensorboardWriter::Scalar> scalars;
    for (size_t i = 0; i < results.size(); ++i) scalars.push_back({tags[i], results[i].loss});
    tensorboard_->write(position_.step, scalars);
  }
  const double loss = results.front().loss;
  const bool is_first = position_.best_step == 0;
  if (position_.step == 0 || !std::isfinite(loss) || !(is_first || loss < position_.best_loss)) {
    return;
  }
  position_.best_step = position_.step;
  position_.best_loss = loss;
  if (options_.save_best) save();
}

void Trainer::save() {
  if (options_.save.empty() || last_saved_step_ == position_.step) return;
  const auto start = std::chrono::steady_clock::now();
  storage_->to_host();
  const CheckpointInfo info =
      save_training_checkpoint(options_.save, identity_, position_, state_, *storage_, group_);
  last_saved_step_ = position_.step;
  if (!leads()) return;
  if (options_.save_best && position_.best_step == position_.step) {
    mark_best_checkpoint(options_.save, position_.step);
  }
  // While steps are being skipped, a checkpoint may hold the weights that are to blame. It must not
  // push out those that were saved before.
  const bool prunes = options_.keep_checkpoints > 0 || options_.save_retain_interval;
  if (prunes && position_.skipped_in_row == 0) {
    prune_checkpoints(options_.save,
                      {.newest = std::max(1, options_.keep_checkpoints),
                       .retain_interval = options_.save_retain_interval.value_or(0)});
  }
  progress_->note(fmt::format("saved {} in {}", info.path, format_duration(seconds_since(start))));
}

ExitStatus train(const Options& options, ProcessGroup* processes) {
  std::atomic<ExitStatus> status = ExitStatus::done;  // the same for all ranks
  run_all_ranks(
      options, processes,
      [&](int32_t rank, ProcessGroup* group) {
        return std::make_unique<Trainer>(options, rank, group);
      },
      [&](Trainer& trainer) { status = trainer.run(); });
  return status;
}

}  // namespace troupe
