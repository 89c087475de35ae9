#include "train/step_runner.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <fmt/format.h>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "ops/precision/code_counts/code_counts.h"
#include "plan/kernel_variants.h"
#include "runtime/device_memory.h"
#include "train/gradient_watch.h"
#include "train/rank_profile.h"
#include "train/seconds_since.h"
#include "train/slow_kernels.h"

namespace troupe {
namespace {

bool is_finite(const TensorView& view) {
  const auto finite = [&](const auto* values) {
    return std::all_of(values, values + view.shape.elements(),
                       [](auto value) { return std::isfinite(value); });
  };
  return view.dtype == DType::f64 ? finite(view.as<double>()) : finite(view.as<float>());
}

}  // namespace

StepRunner::StepRunner(const RunSpec& spec, const RunIdentity& identity, const SampleSource& data,
                       RankSession& session, const RunLog& log)
    : spec_(spec),
      identity_(identity),
      session_(session),
      log_(log),
      feed_(data),
      step_options_(spec.step.options) {
  // --use-checkpoint-opt_param-scheduler may have brought others than those of the options.
  step_options_.decoupled_learning_rate = identity.schedules.decoupled_learning_rate.has_value();
  if (!spec.oracle) hardware_ = hardware_of_run(spec.hardware, session);
}

void StepRunner::measure_limits() {
  if (spec_.profile.enabled) {
    profile_limits_ = measure_limits_of_rank(session_, identity_.compute_dtype);
  }
}

void StepRunner::build(int32_t batch_size) {
  step_options_.micro_batches =
      batch_size / (step_options_.micro_batch_size * session_.layout().dp());
  step_ = build_training_step(identity_.model, session_.state(), step_options_);
  plan_ = session_.plan(*step_.program, spec_.oracle);
  fallback_ = plan_fallback_step(
      identity_.model, session_.state(), step_options_, step_, plan_,
      [&](const Program& program) { return session_.plan(program, spec_.oracle); });
  batch_size_ = batch_size;
}

void StepRunner::prepare(int32_t batch_size) {
  if (interpreter_ != nullptr && batch_size_ == batch_size) return;
  if (interpreter_ != nullptr) {
    log_.say(fmt::format("global batch size {} instead of {}", batch_size, batch_size_));
  }
  // The memory of one step is freed before that of the next is taken.
  fallback_interpreter_.reset();
  interpreter_.reset();
  if (batch_size_ != batch_size) {
    build(batch_size);
    session_.check_collectives(*step_.program);
    if (fallback_) session_.check_collectives(*fallback_->step.program);
  }
  interpreter_ = session_.interpreter(
      *step_.program, plan_,
      {.capture = session_.spec().capture_graphs, .profile = spec_.profile.enabled});
  has_run_ = false;
  planned_time_ = plan_time(session_, *step_.program, plan_, hardware_);
}

void StepRunner::warn_of_what_it_lacks() {
  if (std::exchange(has_run_, true)) return;
  const std::string warning =
      warn_of_missing_algorithms(*step_.program, interpreter_->operations_without_algorithm());
  if (!warning.empty()) log_.warn(warning);
}

StepMetrics StepRunner::run(TrainingPosition& position, int32_t samples, bool looks) {
  prepare(samples);
  const auto start = std::chrono::steady_clock::now();
  StepMetrics metrics;
  metrics.batch_size = samples;
  now_ = &step_;
  running_ = interpreter_.get();
  write_batch(position);
  metrics.data_time_s = seconds_since(start);
  write_rates(position, metrics);
  if (spec_.profile.covers(position.step + 1)) {
    profile(position.step + 1);
  } else if (looks) {
    look();
  } else {
    interpreter_->run();
  }
  warn_of_what_it_lacks();
  if (fallback_ && *running_->view(step_.rooms_lacked).as<double>() > 0) {
    run_fallback(position, metrics);
  }
  metrics.skipped = *running_->view(now_->skipped).as<int32_t>() != 0;
  advance(position, metrics);
  read_metrics(metrics);
  read_layer_metrics(metrics);
  read_codes(metrics);
  metrics.step_time_s = seconds_since(start);
  if (planned_time_) metrics.planned_step_time_s = planned_time_->seconds;
  metrics.tokens_per_s =
      static_cast<double>(int64_t{samples} * identity_.sequence) / metrics.step_time_s;
  metrics.tflops_per_gpu = session_.state().model->training_flops(identity_.sequence) *
                           static_cast<double>(samples) / spec_.device.ranks / metrics.step_time_s /
                           1e12;
  metrics.peak_bytes = session_.device() == Device::cuda ? DeviceMemory::peak_allocated_bytes()
                                                         : Arena::peak_allocated_bytes();
  return metrics;
}

double StepRunner::largest_of_ranks(double here) {
  double largest = here;
  for (const uint64_t each : session_.exchange(std::bit_cast<uint64_t>(here))) {
    largest = std::max(largest, std::bit_cast<double>(each));
  }
  return largest;
}

void StepRunner::run_fallback(const TrainingPosition& position, StepMetrics& metrics) {
  metrics.rooms_lacked = std::llround(*running_->view(step_.rooms_lacked).as<double>());
  const auto number = [&](ValueId id) { return *running_->view(id).as<double>(); };
  const double fullest = largest_of_ranks(number(step_.fullest_room));
  if (fullest > session_.part().run->expert_room) metrics.room_needed = fullest;
  if (step_.pages_lacked.valid()) {
    const auto pages = static_cast<double>(stash_pages(*step_.program));
    metrics.stash_needed =
        largest_of_ranks(number(step_.pages_lacked) > 0
                             ? number(step_.most_pages) / pages * step_options_.stash.factor
                             : 0);
  }
  if (fallback_interpreter_ == nullptr) {
    fallback_interpreter_ = session_.interpreter(
        *fallback_->step.program, fallback_->memory,
        {.memory_of = interpreter_.get(), .capture = session_.spec().capture_graphs});
  }
  now_ = &fallback_->step;
  running_ = fallback_interpreter_.get();
  write_batch(position);
  write_rates(position, metrics);
  running_->run();
}

void StepRunner::write_batch(const TrainingPosition& position) {
  for (size_t i = 0; i < now_->micro_batches.size(); ++i) {
    const int64_t number = session_.part().global_micro_batch(static_cast<int32_t>(i));
    feed_.write(*running_, now_->micro_batches[i],
                position.consumed_samples + number * step_options_.micro_batch_size);
  }
}

void StepRunner::write_rates(const TrainingPosition& position, StepMetrics& metrics) const {
  const int64_t samples = position.scheduled_samples + metrics.batch_size;
  const Schedules& schedules = identity_.schedules;
  metrics.lr = schedules.learning_rate.at(samples);
  metrics.weight_decay = schedules.weight_decay.at(samples);
  *running_->view(now_->learning_rate).as<double>() = metrics.lr;
  if (schedules.decoupled_learning_rate) {
    *running_->view(now_->decoupled_learning_rate).as<double>() =
        schedules.decoupled_learning_rate->at(samples);
  }
  *running_->view(now_->weight_decay).as<double>() = metrics.weight_decay;
  *running_->view(now_->update_number).as<int64_t>() = position.updates + 1;
  if (now_->loss_scale.valid()) {
    metrics.loss_scale = spec_.loss_scaling.before(position.loss_scale).value;
    *running_->view(now_->loss_scale).as<double>() = *metrics.loss_scale;
  }
  if (now_->step_number.valid()) {
    *running_->view(now_->step_number).as<int64_t>() = position.step;
  }
}

void StepRunner::advance(TrainingPosition& position, StepMetrics& metrics) const {
  position.step += 1;
  position.consumed_samples += metrics.batch_size;
  bool scale_may_end_it = false;
  if (now_->loss_scale.valid()) {
    const LossScale scale = spec_.loss_scaling.before(position.loss_scale);
    const bool overflowed =
        metrics.skipped && !std::isfinite(*running_->view(now_->grad_norm).as<double>());
    scale_may_end_it = overflowed && spec_.loss_scaling.can_fall(scale);
    position.loss_scale = spec_.loss_scaling.after(scale, overflowed);
  }
  if (metrics.skipped) {
    if (!scale_may_end_it) position.skipped_in_row += 1;
  } else {
    position.skipped_in_row = 0;
    position.updates += 1;
    position.scheduled_samples += metrics.batch_size;
  }
  metrics.step = position.step;
  metrics.tokens = position.consumed_samples * identity_.sequence;
}

void StepRunner::read_metrics(StepMetrics& metrics) const {
  metrics.loss = *running_->view(now_->loss).as<double>();
  for (const ValueId loss : now_->mtp_losses) {
    metrics.mtp_losses.push_back(*running_->view(loss).as<double>());
  }
  metrics.grad_norm = *running_->view(now_->grad_norm).as<double>();
  if (now_->zero_gradients.valid()) {
    metrics.num_zeros = static_cast<int64_t>(*running_->view(now_->zero_gradients).as<double>());
  }
  if (now_->squared_parameter_norm.valid()) {
    metrics.params_norm = std::sqrt(*running_->view(now_->squared_parameter_norm).as<double>());
  }
}

void StepRunner::profile(int64_t step) {
  StepProfile seen(*step_.program,
                   session_.device() == Device::cuda
                       ? variants_of_operations(*step_.program, device_traits(session_.gpu()))
                       : std::vector<std::string>());
  add_profiled_run(*interpreter_, session_, seen);
  const std::vector<int32_t> ranks = spec_.profile.ranks_or({0});
  const std::vector<std::string> tables =
      gather_from(session_, ranks, describe_profile(seen, profile_limits_));
  for (size_t i = 0; i < tables.size(); ++i) {
    log_.say(spec_.device.ranks == 1 ? tables[i] : fmt::format("Rank {}\n{}", ranks[i], tables[i]));
  }
  const WrittenTimelines written =
      write_timelines(session_, spec_.profile.folder, step, ranks, seen);
  if (written.fault.empty()) {
    log_.say(written.note);
  } else {
    log_.warn(fmt::format("Warning: the timeline of step {} could not be written: {}", step,
                          written.fault));
  }
}

void StepRunner::look() {
  // On a GPU only an interpreter that was made for it tells operations apart.
  if (session_.device() == Device::cuda && !spec_.profile.enabled) return interpreter_->run();
  StepProfile profile(*step_.program);
  add_profiled_run(*interpreter_, session_, profile);
  seen_ = {.kinds = profile.kinds(), .times = profile.times()};
}

std::string StepRunner::non_finite_gradients() const {
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
  std::vector<std::string> names;
  for (const ParameterSpec& parameter : all) {
    const size_t number = parameter.number();
    if ((found[number / kBits] >> number % kBits & 1) != 0) names.push_back(parameter.full_name());
  }
  return list_gradients(names);
}

void StepRunner::read_layer_metrics(StepMetrics& metrics) const {
  const auto read = [&](ValueId id) { return *running_->view(id).as<double>(); };
  const auto read_rows = [&](ValueId id) {
    const TensorView counts = running_->view(id);
    const auto* first = counts.as<double>();
    return std::vector<int64_t>(first, first + counts.shape.elements());
  };
  for (const LayerMetrics& layer : now_->layers) {
    RouterMetrics router;
    for (const LayerMetrics::Loss& loss : layer.losses) {
      if (loss.kind == AuxiliaryLossKind::indexer) {
        metrics.indexers.push_back({layer.layer, read(loss.value)});
      } else {
        router.losses.push_back({name_of(loss.kind), read(loss.value)});
      }
    }
    if (!layer.counts.valid()) continue;
    router.layer = layer.layer;
    router.rows = read_rows(layer.counts);
    // Slots are in the order of ranks, as experts are.
    const int32_t ranks = session_.layout().ep();
    if (ranks > 1) {
      const auto slots = layer.slots.valid() ? read_rows(layer.slots) : router.rows;
      const auto of_rank = static_cast<std::ptrdiff_t>(slots.size()) / ranks;
      for (auto slot = slots.begin(); slot != slots.end(); slot += of_rank) {
        router.rank_rows.push_back(std::accumulate(slot, slot + of_rank, int64_t{0}));
      }
    }
    const int32_t uses = identity_.model.uses_of(layer.layer);
    const int64_t tokens = layer.tokens.valid() ? static_cast<int64_t>(read(layer.tokens))
                                                : uses * int64_t{batch_size_} * identity_.sequence;
    router.slots = tokens * identity_.model.moe_router_topk;
    router.entropy = read(layer.entropy);
    metrics.layers.push_back(std::move(router));
  }
}

void StepRunner::read_codes(StepMetrics& metrics) const {
  if (!now_->code_metrics[0].valid()) return;
  for (const ParameterSpec& parameter : session_.state().model->parameters()) {
    CodeShares map{.layer = parameter.layer, .map = parameter.name};
    bool is_counted = false;
    for (size_t i = 0; i < kOperandNames.size(); ++i) {
      const double* counts = running_->view(now_->code_metrics[i]).as<double>() +
                             int64_t{parameter.number()} * kCountsOfCodes;
      if (counts[0] == 0) continue;
      map.operands[i] = {.saturated = counts[1] / counts[0], .zero = counts[2] / counts[0]};
      is_counted = true;
    }
    if (is_counted) metrics.codes.push_back(std::move(map));
  }
}

}  // namespace troupe
