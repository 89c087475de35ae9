// `troupe bench`: how fast a training step is, and where its time goes, by kind of operation.
//
// Runs the step that `train` would run with the same flags, on all ranks, on random tokens, with
// fresh weights, and prints medians over several runs beside the machine's limits. A run of several
// ranks begins when all are there and ends when the last one has finished.
#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdio>
#include <fmt/format.h>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "base/units.h"
#include "cli/calibrate.h"
#include "cli/command.h"
#include "data/json_text.h"
#include "options/device_options.h"
#include "options/model_options.h"
#include "options/run_spec.h"
#include "options/step_spec.h"
#include "plan/fallback_step.h"
#include "plan/kernel_variants.h"
#include "runtime/device_memory.h"
#include "train/expert_room_choice.h"
#include "train/gpu_choices.h"
#include "train/initialize.h"
#include "train/interrupt.h"
#include "train/memory_remedies.h"
#include "train/random_batch.h"
#include "train/rank_profile.h"
#include "train/rank_run.h"
#include "train/rank_session.h"
#include "train/slow_kernels.h"
#include "train/step_profile.h"
#include "train/terminal.h"
#include "train/work_progress.h"

namespace troupe {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::ordered_json;

constexpr int kWarmUps = 3;
constexpr int kRuns = 7;

// A number of all ranks.
struct RankRange {
  uint64_t least = 0;
  uint64_t most = 0;
  int32_t of_rank = 0;  // the first that has most
};

RankRange range_of(const std::vector<uint64_t>& numbers) {
  const auto most = std::max_element(numbers.begin(), numbers.end());
  return {*std::min_element(numbers.begin(), numbers.end()), *most,
          static_cast<int32_t>(most - numbers.begin())};
}

// One rank of the run. Construction allocates nothing that is large.
class BenchRank {
 public:
  BenchRank(const Options& options, const StepSpec& spec, int32_t rank, ProcessGroup* group)
      : options_(options),
        spec_(spec),
        session_(device_spec_of(options), rank, group),
        progress_(options.quiet || rank != 0, "measuring", "steps") {
    session_.declare(spec.model, spec.dtype, /*trained=*/true, spec.layout);
    step_ = build_training_step(spec.model, session_.state(), spec.options);
    plan_ = session_.plan(*step_.program);
    fallback_ = plan_fallback_step(spec.model, session_.state(), spec.options, step_, plan_,
                                   [&](const Program& program) { return session_.plan(program); });
  }

  // On all ranks at once. Rank 0 prints.
  void run();

 private:
  // The kernels of ranks that share a GPU could not be told apart.
  bool is_profiled() const { return !on_gpu() || options_.ranks_per_gpu == 1; }
  bool on_gpu() const { return session_.device() == Device::cuda; }
  void prepare();
  void done_one() { progress_.show(++done_, kWarmUps + kRuns + (is_profiled() ? kRuns : 0)); }
  void write_inputs(const TrainingStep& step, Interpreter& interpreter) const;
  // The step, and its fallback where the experts' room does not suffice.
  void run_step();
  // The time of one step, in s: the longest of all ranks, since all have met.
  double time_step();
  void profile_step();
  double samples_per_step() const;
  std::string text() const;
  std::string json() const;
  ordered_json profile_json() const;

  const Options& options_;
  const StepSpec& spec_;
  RankSession session_;
  TrainingStep step_;
  MemoryPlan plan_;
  std::optional<FallbackStep> fallback_;

  WorkProgress progress_;
  uint64_t done_ = 0;     // steps
  ProfileLimits limits_;  // of a rank
  std::unique_ptr<Interpreter> interpreter_;
  std::unique_ptr<Interpreter> fallback_interpreter_;  // once it is needed
  std::unique_ptr<StepProfile> profile_;
  std::vector<int32_t> profiled_;  // the ranks whose tables are shown
  std::vector<std::string> tables_;
  std::vector<std::string> profiles_;  // the same as JSON
  double step_time_ = 0;
  RankRange planned_bytes_;
  RankRange planned_host_bytes_;  // of what is offloaded
  RankRange allocated_bytes_;
  RankRange other_bytes_;  // of GPUs: what the driver, libraries and the graph hold, too
};

void BenchRank::prepare() {
  const Program& program = *step_.program;
  session_.check({{&program, &plan_}}, remedies_of_training(options_, session_.rank()));
  if (fallback_) session_.check_collectives(*fallback_->step.program);
  limits_ = measure_limits_of_rank(session_, spec_.dtype);
  const int gpu = session_.gpu();
  if (session_.leads()) {
    for (const std::string& line : warn_of_slow_kernels(program, session_.device(), gpu)) {
      print_note(line);
    }
  }

  const bool has_gpu = on_gpu() && options_.ranks_per_gpu == 1;
  const uint64_t free_before = has_gpu ? available_device_bytes(gpu) : 0;
  session_.allocate();
  interpreter_ = session_.interpreter(
      program, plan_, {.capture = session_.spec().capture_graphs, .profile = is_profiled()});
  const StateStorage& storage = session_.storage();
  initialize_parameters(session_.state(), storage, static_cast<uint64_t>(options_.seed),
                        session_.pool());
  storage.to_device();
  write_inputs(step_, *interpreter_);

  // The first run touches all memory; on GPUs one is traced, and one captured as a graph.
  for (int run = 0; run < kWarmUps; ++run) {
    session_.barrier();
    run_step();
    done_one();
  }
  if (session_.leads()) {
    const std::string warning =
        warn_of_missing_algorithms(program, interpreter_->operations_without_algorithm());
    if (!warning.empty()) print_note(warning);
  }
  const uint64_t allocated =
      storage.bytes() + (on_gpu() ? 0 : storage.host_bytes()) + interpreter_->allocated_bytes();
  planned_bytes_ = range_of(session_.exchange(plan_.total_bytes()));
  planned_host_bytes_ = range_of(session_.exchange(plan_.host_bytes()));
  allocated_bytes_ = range_of(session_.exchange(allocated));
  other_bytes_ = range_of(
      session_.exchange(has_gpu ? free_before - available_device_bytes(gpu) - allocated : 0));
}

void BenchRank::write_inputs(const TrainingStep& step, Interpreter& interpreter) const {
  for (size_t i = 0; i < step.micro_batches.size(); ++i) {
    write_random_batch(interpreter, step.micro_batches[i],
                       session_.part().global_micro_batch(static_cast<int32_t>(i)),
                       spec_.model.vocab_size);
  }
  *interpreter.view(step.update_number).as<int64_t>() = 1;
  if (step.loss_scale.valid()) *interpreter.view(step.loss_scale).as<double>() = 1;
  if (step.step_number.valid()) *interpreter.view(step.step_number).as<int64_t>() = 0;
}

void BenchRank::run_step() {
  interpreter_->run();
  if (!fallback_ || *interpreter_->view(step_.rooms_lacked).as<double>() == 0) return;
  if (fallback_interpreter_ == nullptr) {
    fallback_interpreter_ = session_.interpreter(
        *fallback_->step.program, fallback_->memory,
        {.memory_of = interpreter_.get(), .capture = session_.spec().capture_graphs});
    if (session_.leads()) {
      const double stash = spec_.options.stash.factor;
      print_note(fmt::format(
          "Note: the experts' room (--moe-expert-rank-capacity-factor {}{}) does not suffice: each "
          "step runs a second time, in rounds of tokens.",
          session_.part().run->expert_room,
          stash > 0 ? fmt::format(", --moe-paged-stash-buffer-size-factor-cuda {}", stash) : ""));
    }
  }
  // One memory, so each finds the other's bytes.
  write_inputs(fallback_->step, *fallback_interpreter_);
  fallback_interpreter_->run();
  write_inputs(step_, *interpreter_);
}

double BenchRank::time_step() {
  session_.barrier();
  const auto start = Clock::now();
  run_step();
  const double own = std::chrono::duration<double>(Clock::now() - start).count();
  double longest = 0;
  for (const uint64_t bits : session_.exchange(std::bit_cast<uint64_t>(own))) {
    longest = std::max(longest, std::bit_cast<double>(bits));
  }
  return longest;
}

void BenchRank::profile_step() {
  const ProfileSpec spec = profile_spec_of(options_);
  profiled_ = spec.ranks_or({0});
  if (!is_profiled()) return;
  profile_ = std::make_unique<StepProfile>(
      *step_.program, on_gpu()
                          ? variants_of_operations(*step_.program, device_traits(session_.gpu()))
                          : std::vector<std::string>());
  for (int run = 0; run < kRuns; ++run) {
    add_profiled_run(*interpreter_, session_, *profile_);
    done_one();
  }
  tables_ = gather_from(session_, profiled_, describe_profile(*profile_, limits_, options_.op));
  profiles_ = gather_from(session_, profiled_, profile_json().dump());
  if (!spec.enabled) return;
  const std::vector<int32_t> timelines = spec.ranks_or(ranks_below(options_.ranks));
  const WrittenTimelines written =
      write_timelines(session_, spec.folder, /*step=*/1, timelines, *profile_);
  if (!written.fault.empty()) throw_failed(written.fault);
  if (session_.leads()) fmt::print(stderr, "{}\n", written.note);
}

double BenchRank::samples_per_step() const {
  return static_cast<double>(spec_.options.micro_batch_size) *
         static_cast<double>(spec_.options.micro_batches) * session_.layout().dp();
}

ordered_json BenchRank::profile_json() const {
  ordered_json document = {{"rank", session_.rank()}, {"kinds", ordered_json::array()}};
  for (const KindTime& kind : profile_->kinds()) {
    if (kind.kind.find(options_.op) == std::string::npos) continue;
    // An operation that does nothing on this device takes no time.
    const double seconds = std::max(kind.seconds, 1e-12);
    document["kinds"].push_back({{"kind", kind.kind},
                                 {"count", kind.count},
                                 {"time_s", kind.seconds},
                                 {"flops_per_s", kind.flops / seconds},
                                 {"bytes_per_s", kind.bytes / seconds}});
    if (!kind.kernels.empty()) document["kinds"].back()["kernels"] = kind.kernels;
  }
  const StepTimes times = profile_->times();
  document["profiled_step_s"] = times.seconds;
  document["idle_s"] = times.seconds - times.busy_s;
  document["largest_gap_s"] = times.largest_gap_s;
  document["communication_s"] = times.communication_s;
  document["exposed_communication_s"] = times.exposed_communication_s;
  return document;
}

std::string BenchRank::json() const {
  const double tokens_per_s = samples_per_step() * spec_.options.sequence / step_time_;
  const double flops = session_.state().model->training_flops(spec_.options.sequence) *
                       samples_per_step() / options_.ranks;
  const auto range_json = [](const RankRange& range) {
    return ordered_json{{"least", range.least}, {"most", range.most}, {"of_rank", range.of_rank}};
  };
  ordered_json document = {{"ranks", options_.ranks},
                           {"threads", session_.threads()},
                           {"matmul_limit_flops_per_s", limits_.flops},
                           {"copy_limit_bytes_per_s", limits_.copy_bytes},
                           {"step_time_s", step_time_},
                           {"tokens_per_s", tokens_per_s},
                           {"tokens_per_s_per_rank", tokens_per_s / options_.ranks},
                           {"tflops_per_gpu", flops / step_time_ / 1e12},
                           {"matmul_limit_share", flops / step_time_ / limits_.flops},
                           {"operations", step_.program->op_count()},
                           {"planned_bytes", planned_bytes_.most},
                           {"planned_host_bytes", planned_host_bytes_.most},
                           {"allocated_bytes", allocated_bytes_.most}};
  if (on_gpu()) document["other_device_bytes"] = other_bytes_.most;
  if (options_.ranks > 1) {
    document["planned_bytes_of_ranks"] = range_json(planned_bytes_);
    document["allocated_bytes_of_ranks"] = range_json(allocated_bytes_);
  }
  if (!profiles_.empty()) {
    document.update(ordered_json::parse(profiles_.front()));
    if (profiles_.size() > 1) {
      for (const std::string& profile : profiles_) {
        document["profiles"].push_back(ordered_json::parse(profile));
      }
    }
  }
  return printed_json(document);
}

std::string BenchRank::text() const {
  const bool several = options_.ranks > 1;
  const double tokens_per_s = samples_per_step() * spec_.options.sequence / step_time_;
  const double flops_per_s = session_.state().model->training_flops(spec_.options.sequence) *
                             samples_per_step() / options_.ranks / step_time_;
  const int threads = session_.threads();
  const std::string_view unit = on_gpu() ? "GPU" : "rank";
  std::string text = fmt::format(
      "limits {}on {}, the best seen: {}flop/s in matrix products, {}/s copying\n",
      several ? fmt::format("of one of {} ranks ", options_.ranks) : "",
      on_gpu()       ? "the GPU"
      : threads == 1 ? "one thread"
                     : fmt::format("{} threads", threads),
      format_count(limits_.flops), format_bytes(static_cast<uint64_t>(limits_.copy_bytes)));
  text += fmt::format("step {} (median of {}), {} tokens/s", format_duration(step_time_), kRuns,
                      format_count(tokens_per_s));
  if (several) {
    text +=
        fmt::format(" in all, {} of each {}", format_count(tokens_per_s / options_.ranks), unit);
  }
  text +=
      fmt::format(", {:.{}f} model TFLOP/s{}, {:.0f}% of the matmul limit\n", flops_per_s / 1e12,
                  on_gpu() ? 1 : 3, several ? fmt::format(" of each {}", unit) : "",
                  100.0 * flops_per_s / limits_.flops);
  const auto range_text = [&](const RankRange& range) {
    std::string most = format_bytes(range.most);
    if (!several) return most;
    if (range.least == range.most) return most + " on each rank";
    return fmt::format("{} (rank {}; least {})", most, range.of_rank, format_bytes(range.least));
  };
  text += fmt::format("memory planned {}, allocated {}", range_text(planned_bytes_),
                      range_text(allocated_bytes_));
  if (on_gpu() && options_.ranks_per_gpu == 1) {
    text += fmt::format("; {} beside it for the driver, libraries and the graph",
                        format_bytes(other_bytes_.most));
  }
  if (planned_host_bytes_.most > 0) {
    text += fmt::format("; {} offloaded to the host", range_text(planned_host_bytes_));
  }
  text += "\n";
  text = wrap_text(text, kDefaultColumns, 2);
  for (size_t i = 0; i < tables_.size(); ++i) {
    text += several ? fmt::format("\nRank {}\n", profiled_[i]) : "\n";
    text += tables_[i];
  }
  if (!is_profiled()) text += "\nRanks that share a GPU have no table of operations.\n";
  return text;
}

void BenchRank::run() {
  prepare();
  std::vector<double> times;
  for (int run = 0; run < kRuns; ++run) {
    times.push_back(time_step());
    done_one();
  }
  step_time_ = median(std::move(times));
  profile_step();
  progress_.clear();
  if (profile_ != nullptr) limits_ = best_limits(limits_, *profile_);
  limits_.flops =
      std::max(limits_.flops, session_.state().model->training_flops(spec_.options.sequence) *
                                  samples_per_step() / options_.ranks / step_time_);
  if (session_.leads()) fmt::print("{}", options_.json ? json() : text());
}

}  // namespace

ExitStatus run_bench(const Options& asked, ProcessGroup* processes) {
  if (!asked.calibrate.empty()) return run_calibration(asked, processes);
  end_at_once_when_interrupted(/*quiet=*/!leads(processes));
  profile_spec_of(asked);  // refuses ranks that there are not
  const ModelConfig config = load_model_config(asked);
  Options measured = asked;
  measured.eval_iters = 0;
  const Options options = with_gpu_choices(measured, config, usable_bytes_of_gpu(asked));
  if (leads(processes)) {
    for (const std::string& note : notes_on_gpu_choices(asked, options)) print_note(note);
  }
  const StepSpec spec = step_spec_of(options, config, processes);
  run_all_ranks(
      device_spec_of(options), processes,
      [&](int32_t rank, ProcessGroup* group) {
        return std::make_unique<BenchRank>(options, spec, rank, group);
      },
      [](BenchRank& rank) { rank.run(); });
  return ExitStatus::done;
}

}  // namespace troupe
