#include "train/trainer.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <fmt/format.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include "base/text.h"
#include "base/units.h"
#include "io/hf_config.h"
#include "options/model_options.h"
#include "train/expert_room_choice.h"
#include "train/gpu_choices.h"
#include "train/interrupt.h"
#include "train/matmul_limit.h"
#include "train/memory_remedies.h"
#include "train/rank_hardware.h"
#include "train/rank_run.h"
#include "train/seconds_since.h"
#include "train/slow_kernels.h"
#include "train/terminal.h"

namespace troupe {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

Trainer::Trainer(const RunSpec& spec, const LoadedCheckpoint& loaded, int32_t rank,
                 ProcessGroup* group)
    : begin_(Clock::now()),
      spec_(spec),
      session_(spec_.device, rank, group),
      log_(spec_.report, session_.leads()),
      start_(spec_, loaded, session_, log_),
      saver_(spec_.save, rank, group),
      runner_(spec_, start_.identity(), start_.training_data(), session_, log_),
      position_(start_.position()) {
  const RunIdentity& run = start_.identity();
  session_.declare(run.model, run.compute_dtype, /*trained=*/true, spec_.step.layout);
  const int32_t largest = spec_.batch_sizes.largest();
  runner_.build(largest);
  if (start_.evaluation_sets().empty()) return;
  const EvaluationSpec& evaluation = spec_.evaluation;
  evaluation_plan_ = plan_evaluation(run.model, session_, start_.evaluation_sets(),
                                     evaluation.micro_batch_size, evaluation.samples(largest),
                                     evaluation.loss_chunk_tokens, spec_.step.options.precision);
  evaluation_bytes_ = evaluation_plan_.own_bytes();
}

ExitStatus Trainer::run() {
  check_with_others();
  if (leads()) saver_.lock();
  prepare();
  print_start();
  const RunIdentity& run = start_.identity();
  if (const std::string reason = why_no_hf_form(run.model); !reason.empty()) log_.say(reason);
  open_log();
  if (start_.is_upcycled()) save(SaveReason::asked);
  if (position_.step > 0 && position_.step >= start_.last_step()) {
    log_.say(
        fmt::format("All {} steps are done already. A larger --train-iters or --train-samples "
                    "goes on.",
                    start_.last_step()));
  }
  if (position_.step == 0) evaluate();
  // Clocks and signals are not the same for all ranks: they end, and save, together.
  constexpr uint32_t kStop = 1;
  constexpr uint32_t kInterrupt = 2;
  constexpr uint32_t kSave = 4;
  constexpr uint32_t kHashing = 8;
  constexpr uint32_t kLook = 16;
  uint32_t votes = 0;
  while (true) {
    if (interrupt_requested()) votes |= kInterrupt;
    if (leads() && position_.step > 0 && saver_.is_due()) votes |= kSave;
    if (start_.is_hashing()) votes |= kHashing;
    if (time_watch_.is_slow()) votes |= kLook;
    votes = votes_of_all(votes);
    if ((votes & kHashing) == 0) start_.finish_hashing();
    if ((votes & (kStop | kInterrupt)) != 0 || position_.step >= start_.last_step()) break;
    if ((votes & kSave) != 0) save(SaveReason::clock);
    if (spec_.length.left_out.contains(position_.step + 1)) {
      leave_step_out();
    } else {
      do_step((votes & kLook) != 0);
    }
    votes = must_exit() ? kStop : 0;
  }
  save(SaveReason::asked, /*is_last=*/true);
  if ((votes & (kStop | kInterrupt)) == 0) test();
  if (!metrics_.layers.empty()) log_.say(expert_load_chart(metrics_, kDefaultColumns));
  const bool interrupted = (votes & kInterrupt) != 0;
  if (interrupted) {
    log_.say(saver_.is_off()
                 ? "Interrupted. Nothing was saved, because of --no-save."
                 : fmt::format("Interrupted after step {0}, saved. --load {1} --save {1} goes on.",
                               position_.step, spec_.save.folder));
  } else {
    fail_if_diverged();
  }
  log_.print_json({.interrupted = interrupted,
                   .step = position_.step,
                   .last_step = start_.last_step(),
                   .tokens = position_.consumed_samples * run.sequence,
                   .parameters = session_.state().model->parameter_count(),
                   .active_parameters = session_.state().model->active_parameter_count(),
                   .seconds = seconds_since(begin_),
                   .folder = spec_.save.folder,
                   .saved_step = saver_.last_saved_step()},
                  metrics_);
  return interrupted ? ExitStatus::interrupted : ExitStatus::done;
}

uint32_t Trainer::votes_of_all(uint32_t votes) const {
  uint64_t all = 0;
  for (const uint64_t each : session_.exchange(votes)) all |= each;
  return static_cast<uint32_t>(all);
}

void Trainer::check_with_others() const {
  start_.require_same_files();
  std::vector<PlannedProgram> programs = {{&runner_.program(), &runner_.plan()}};
  if (const Program* fallback = runner_.fallback_program()) {
    session_.check_collectives(*fallback);
  }
  if (evaluation_plan_.step.program != nullptr) {
    programs.push_back({evaluation_plan_.step.program.get(), &evaluation_plan_.memory});
  }
  session_.check(programs, remedies_of_training(spec_.options, session_.rank()));
}

void Trainer::prepare() {
  for (const std::string& line :
       warn_of_slow_kernels(runner_.program(), session_.device(), session_.gpu())) {
    log_.warn(line);
  }
  runner_.measure_limits();
  session_.allocate();
  if (!start_.evaluation_sets().empty()) {
    evaluation_.emplace(std::move(evaluation_plan_), session_, start_.evaluation_sets());
  }
  start_.load_weights(session_, saver_);
  session_.storage().to_device();
  if (leads()) saver_.refuse_foreign_folder();
  saver_.require_room(start_.identity(), session_.state(), session_.storage());
}

void Trainer::print_start() const {
  if (log_.is_quiet()) return;
  const ModelConfig& model = start_.identity().model;
  std::string text;
  if (spec_.report.verbose) {
    text += describe(spec_.options);
  } else {
    text += "Options of troupe train that differ from the defaults (--verbose: all)\n";
    text += wrap_words(changed_flags(spec_.options), kDefaultColumns, 2, 2) + "\n";
  }
  const Model& parameters = *session_.state().model;
  text += fmt::format("Model: {} parameters, {} active per token, {} layers",
                      format_count(static_cast<double>(parameters.parameter_count())),
                      format_count(static_cast<double>(parameters.active_parameter_count())),
                      model.num_layers);
  if (model.mtp_num_layers > 0) {
    text += fmt::format(" and {} of multi-token prediction", model.own_mtp_layers());
    if (model.mtp_num_layers > model.own_mtp_layers()) {
      text += fmt::format(" used {} times", model.mtp_num_layers);
    }
  }
  if (model.num_experts > 0) {
    text += fmt::format(", {} experts, top-{}", model.num_experts, model.moe_router_topk);
  }
  const int64_t samples = start_.needed_samples();
  text += fmt::format("\nTraining data: {} samples of {} tokens\n", samples,
                      start_.identity().sequence);
  text += describe_use(start_.training_data(), samples);
  const std::vector<EvaluationSet>& sets = start_.evaluation_sets();
  for (size_t i = 0; i < sets.size(); ++i) {
    const std::string& name = sets[i].name;
    const SampleSource& source = *sets[i].source;
    const int64_t evaluated = evaluation_->num_samples(i);
    text += sets[i].is_test
                ? fmt::format("Test data: {} samples, when the run is over\n", evaluated)
                : fmt::format("Validation data{}: {} samples for each evaluation\n",
                              name.empty() ? "" : " " + name, evaluated);
    text += describe_use(source, evaluated);
  }
  text += fmt::format("{}: {} operations, {} in {}\n",
                      spec_.batch_sizes.stages.size() > 1 ? "Largest step" : "Step",
                      runner_.program().op_count(), counted(runner_.batch_size(), "sequence"),
                      counted(runner_.batch_size() / spec_.step.options.micro_batch_size,
                              "micro-batch", "micro-batches"));
  if (spec_.device.ranks > 1) {
    const Layout& layout = session_.layout();
    text += fmt::format(
        "{} ranks of {}: TP {} x CP {} x DP {} x PP {}; experts ETP {} x EP {} x EDP {}; "
        "{} micro-batches of the step each\n",
        spec_.device.ranks, counted(session_.threads(), "thread"), layout.tp(), layout.cp(),
        layout.dp(), layout.pp(), layout.etp(), layout.ep(), layout.edp(),
        spec_.step.options.micro_batches);
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
                      spec_.device.ranks > 1 ? ", of the first rank" : "") +
          describe_memory(runner_.plan(), evaluation_bytes_);
  std::fputs(wrap_for_terminal(text, STDERR_FILENO, 4).c_str(), stderr);
}

void Trainer::open_log() {
  const DeviceSpec& spec = session_.spec();
  const RunIdentity& run = start_.identity();
  double limit = 1;  // only the leader reports
  if (leads()) {
    ThreadPool all_threads(spec.thread_count());
    limit = measure_matmul_limit(run.compute_dtype, all_threads, spec.device);
    const std::string where =
        spec.device == Device::cuda ? "the GPU" : counted(all_threads.threads(), "thread");
    log_.say(fmt::format("Matrix products reach {}flop/s on {}: the limit.", format_count(limit),
                         where));
    limit /= ranks_that_share(spec, session_.group(), spec.device);
  }
  log_.open(spec_.save.folder,
            {.step = position_.step,
             .device = value_text(spec_.options, "device"),
             .ranks = spec.ranks,
             .model = spec_.model_name,
             .parameters = session_.state().model->parameter_count(),
             .active_parameters = session_.state().model->active_parameter_count(),
             .data = start_.data_prefixes(),
             .matmul_limit_tflops = limit / 1e12},
            to_toml(spec_.options),
            {.last_step = start_.last_step(),
             .last_token = start_.needed_samples() * run.sequence,
             .log_interval = spec_.report.log_interval,
             .matmul_limit = limit,
             .byte_tokens = run.tokenizer.type == "byte",
             .quiet = log_.is_quiet()});
}

void Trainer::do_step(bool looks) {
  metrics_ = runner_.run(position_, spec_.batch_sizes.at(position_.consumed_samples), looks);
  const bool is_last = position_.step == start_.last_step();
  log_.step(metrics_, is_last || position_.step % spec_.report.log_interval == 0);
  if (metrics_.skipped) note_skipped_step();
  if (looks && leads()) warn_of_slow_steps();
  time_watch_.add(metrics_);
  log_.watch_gradients(metrics_);
  stop_if_hopeless();
  if (is_last || due(spec_.evaluation.interval)) evaluate();
  if (due(spec_.save.interval)) save(SaveReason::asked);
}

void Trainer::warn_of_slow_steps() {
  const std::optional<PlannedTime>& planned = runner_.planned_time();
  // Unless this step is of another size than those that were slow.
  if (!planned || planned->seconds != time_watch_.planned() || !time_watch_.is_slow()) return;
  log_.warn(
      describe_slow_steps(position_.step - 1, time_watch_.seconds(), *planned, runner_.seen()));
  time_watch_.say_no_more();
}

void Trainer::leave_step_out() {
  position_.consumed_samples += spec_.batch_sizes.at(position_.consumed_samples);
  position_.step += 1;
  log_.say(fmt::format("step {}: left out, its samples consumed (--iterations-to-skip)",
                       position_.step));
  if (position_.step == start_.last_step()) evaluate();
}

void Trainer::note_skipped_step() const {
  if (metrics_.loss_scale && position_.skipped_in_row == 0) {
    log_.say(fmt::format(
        "step {}: update skipped; gradients overflow at loss scale {}; that of the next step is {}",
        position_.step, loss_scale_text(*metrics_.loss_scale),
        loss_scale_text(position_.loss_scale.value)));
    return;
  }
  if (std::isfinite(metrics_.grad_norm)) {
    log_.say(fmt::format(
        "step {}: update skipped; the gradients' norm {} is above --grad-norm-skip-threshold {}",
        position_.step, metrics_.grad_norm, spec_.step.options.skip_norm));
    return;
  }
  log_.say(fmt::format("step {}: update skipped; not finite: gradients of {}", position_.step,
                       runner_.non_finite_gradients()));
}

void Trainer::stop_if_hopeless() const {
  const std::string kept = saver_.kept();
  if (position_.updates == 0 && !std::isfinite(metrics_.loss)) {
    throw_failed(
        fmt::format("The loss of step {} is {}, and no step has changed the weights yet: they are "
                    "out of range from the start. Check where they come from, or lower "
                    "--init-method-std. {}",
                    metrics_.step, std::abs(metrics_.loss), kept));  // NaN may carry a sign
  }
  // A few steps that change nothing are sound; after this many, the next will be no other.
  if (spec_.length.max_skipped_steps > 0 &&
      position_.skipped_in_row >= spec_.length.max_skipped_steps) {
    if (std::isfinite(metrics_.grad_norm)) {
      throw_failed(fmt::format(
          "The updates of the last {} steps, up to step {}, were skipped (in the last one the "
          "gradients' norm was {}), and --max-skipped-steps ends the run. Raise "
          "--grad-norm-skip-threshold, or go on from an earlier checkpoint with a lower --lr. {}",
          position_.skipped_in_row, metrics_.step, metrics_.grad_norm, kept));
    }
    throw_failed(fmt::format(
        "The gradients of the last {} steps, up to step {}, are not finite (in the last one those "
        "of {}): the run has diverged, and --max-skipped-steps ends it. Go on from an earlier "
        "checkpoint with a lower --lr. {}",
        position_.skipped_in_row, metrics_.step, runner_.non_finite_gradients(), kept));
  }
}

void Trainer::fail_if_diverged() const {
  if (position_.step < start_.last_step() || spec_.length.max_skipped_steps == 0 ||
      position_.skipped_in_row == 0 || std::isfinite(metrics_.loss)) {
    return;
  }
  throw_failed(
      fmt::format("All steps are done, but the loss of the last one is {}, and the updates of the "
                  "last {} were skipped: the run has diverged. Go on from an earlier checkpoint "
                  "with a lower --lr. {}",
                  std::abs(metrics_.loss), position_.skipped_in_row, saver_.kept()));
}

void Trainer::evaluate() {
  if (!evaluation_) return;
  const auto start = Clock::now();
  std::vector<EvaluationResult> results =
      evaluation_->run([this](uint64_t done, uint64_t total) { log_.evaluating(done, total); });
  const double loss = results.front().loss;
  log_.evaluation(position_.step, std::move(results), seconds_since(start));
  const bool is_first = position_.best_step == 0;
  if (position_.step == 0 || !std::isfinite(loss) || !(is_first || loss < position_.best_loss)) {
    return;
  }
  position_.best_step = position_.step;
  position_.best_loss = loss;
  if (spec_.save.best) save(SaveReason::asked);
}

void Trainer::test() {
  if (!evaluation_ || !evaluation_->has_test()) return;
  const auto results = evaluation_->run(
      [this](uint64_t done, uint64_t total) { log_.evaluating(done, total); }, /*test=*/true);
  log_.test(position_.step, results.front());
}

void Trainer::save(SaveReason reason, bool is_last) {
  if (!is_last && position_.step >= start_.last_step()) return;  // the last save follows
  const auto start = Clock::now();
  const int64_t before = saver_.last_saved_step();
  const auto say = [this](const std::string& text, bool is_failure) {
    if (is_failure) {
      log_.warn(text);
    } else {
      log_.say(text);
    }
  };
  const ModelState& state = session_.state();
  const StateStorage& storage = session_.storage();
  if (is_last) {
    saver_.save_last(start_.identity(), position_, state, storage, say);
  } else {
    saver_.save(reason, start_.identity(), position_, state, storage, say);
  }
  if (saver_.last_saved_step() != before) log_.saved(position_.step, seconds_since(start));
}

bool Trainer::due(const std::optional<int64_t>& interval) const {
  return interval && *interval > 0 && position_.step % *interval == 0;
}

bool Trainer::must_exit() const {
  const LengthSpec& length = spec_.length;
  return (length.exit_after_step && position_.step >= *length.exit_after_step) ||
         due(length.exit_interval) ||
         (length.exit_minutes && seconds_since(begin_) > 60.0 * *length.exit_minutes);
}

namespace {

// What every rank may take of its GPU; 0 on CPUs.
uint64_t usable_bytes_of_all(const Options& options, ProcessGroup* processes) {
  const uint64_t own = usable_bytes_of_gpu(options);
  if (processes == nullptr) return own;
  const std::vector<uint64_t> all = processes->exchange(processes->own_ranks().front(), own);
  return *std::min_element(all.begin(), all.end());
}

// With what depends on the GPUs chosen. With --use-checkpoint-args the model is the checkpoint's,
// and all stays open.
Options choose_for_gpus(const Options& options, ProcessGroup* processes) {
  if (options.use_checkpoint_args) return options;
  const uint64_t usable = usable_bytes_of_all(options, processes);
  if (usable == 0) return options;
  return with_gpu_choices(options, load_model_config(options), usable);
}

}  // namespace

ExitStatus train(const Options& options, ProcessGroup* processes) {
  const Options chosen = choose_for_gpus(options, processes);
  const RunLog log(report_spec_of(chosen), leads(processes));
  for (const std::string& note : notes_on_gpu_choices(options, chosen)) log.say(note);
  const LoadedCheckpoint loaded = find_loaded(load_spec_of(chosen), chosen.save, log);
  const RunSpec spec = run_spec_of(chosen, loaded.args, processes);
  std::atomic<ExitStatus> status = ExitStatus::done;  // the same for all ranks
  run_all_ranks(
      spec.device, processes,
      [&](int32_t rank, ProcessGroup* group) {
        return std::make_unique<Trainer>(spec, loaded, rank, group);
      },
      [&](Trainer& trainer) { status = trainer.run(); });
  return status;
}

}  // namespace troupe
