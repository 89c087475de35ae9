// `troupe bench`: where the time of a training step goes, operation kind by operation kind.
//
// Runs the step that `train` would run with the same flags, on random tokens, with a clock around
// every operation, and prints medians over several runs beside the machine's limits.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/random.h"
#include "base/units.h"
#include "cli/command.h"
#include "train/initialize.h"
#include "train/layout_options.h"
#include "train/model_options.h"
#include "train/step_profile.h"
#include "train/trainer.h"

namespace troupe {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRuns = 7;

double seconds(Clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

void write_random_batch(const Interpreter& interpreter, const BatchValues& batch,
                        int32_t vocab_size) {
  const int64_t tokens = static_cast<int64_t>(batch.batch) * batch.sequence;
  for (int64_t i = 0; i < tokens; ++i) {
    const auto draw = [&](uint32_t stream) {
      return static_cast<int32_t>(random_below(static_cast<uint64_t>(vocab_size), /*seed=*/1,
                                               RandomStream::test, stream,
                                               static_cast<uint64_t>(i)));
    };
    interpreter.view(batch.tokens).as<int32_t>()[i] = draw(0);
    interpreter.view(batch.labels).as<int32_t>()[i] = draw(1);
    const TensorView mask = interpreter.view(batch.mask);
    if (mask.dtype == DType::f64) {
      mask.as<double>()[i] = 1.0;
    } else {
      mask.as<float>()[i] = 1.0F;
    }
  }
}

}  // namespace

ExitStatus run_bench(const Options& options) {
  ThreadPool pool(thread_count(options));
  const ModelConfig config = load_model_config(options);
  const DType dtype = compute_dtype_of(options);
  const TrainingStepOptions step_options = training_step_options(options, config);
  const ModelPart part{.run = std::make_shared<const RunLayout>(run_layout_of(options, config))};
  const ModelState state = declare_model_state(config, dtype, /*trained=*/true, part);
  const TrainingStep step = build_training_step(config, state, step_options);
  const Program& program = *step.program;
  const Device device = device_of(options);
  const bool on_gpu = device == Device::cuda;
  const MemoryPlan plan = plan_memory(program, pool.threads(), device);
  require_memory(plan.total_bytes(), device, describe_memory(plan, 0));
  if (on_gpu) require_memory(plan.host_bytes(), Device::cpu, describe_memory(plan, 0));
  const ProfileLimits limits = measure_limits(dtype, pool, device);

  const uint64_t free_before = on_gpu ? available_device_bytes() : 0;
  const StateStorage storage(state.table, device);
  const auto interpreter = make_interpreter(program, plan, storage, pool, Communicators{},
                                            {.capture = captures_graph(options), .profile = true});
  initialize_parameters(state, storage, static_cast<uint64_t>(options.seed), pool);
  storage.to_device();
  for (const BatchValues& batch : step.micro_batches) {
    write_random_batch(*interpreter, batch, config.vocab_size);
  }
  *interpreter->view(step.update_number).as<int64_t>() = 1;
  if (step.step_number.valid()) *interpreter->view(step.step_number).as<int64_t>() = 0;

  interpreter->run();  // touches all memory
  interpreter->run();  // captures the step as a graph, where that is asked for
  std::vector<double> whole;
  for (int run = 0; run < kRuns; ++run) {
    const auto start = Clock::now();
    interpreter->run();
    whole.push_back(seconds(Clock::now() - start));
  }
  StepProfile profile(program);
  for (int run = 0; run < kRuns; ++run) profile.add(interpreter->run_profiled());

  std::nth_element(whole.begin(), whole.begin() + kRuns / 2, whole.end());
  const double step_time = whole[kRuns / 2];
  const uint64_t allocated =
      storage.bytes() + (on_gpu ? 0 : storage.host_bytes()) + interpreter->allocated_bytes();
  // What the driver, libraries and the graph hold, too.
  const uint64_t others = on_gpu ? free_before - available_device_bytes() - allocated : 0;
  const double samples = static_cast<double>(step_options.micro_batch_size) *
                         static_cast<double>(step_options.micro_batches);
  const double model_flops = config.training_flops_per_sequence(step_options.sequence) * samples;
  const double tokens_per_s = samples * step_options.sequence / step_time;
  if (options.profile) {
    const std::string path = profile_path(options, /*rank=*/0, /*step=*/1);
    profile.write_timeline(path, /*rank=*/0);
    fmt::print(stderr, "timeline: {}\n", path);
  }
  if (options.json) {
    nlohmann::ordered_json document = {{"threads", pool.threads()},
                                       {"matmul_limit_flops_per_s", limits.flops},
                                       {"copy_limit_bytes_per_s", limits.copy_bytes},
                                       {"step_time_s", step_time},
                                       {"tokens_per_s", tokens_per_s},
                                       {"tflops_per_gpu", model_flops / step_time / 1e12},
                                       {"operations", program.op_count()},
                                       {"planned_bytes", plan.total_bytes()},
                                       {"planned_host_bytes", plan.host_bytes()},
                                       {"allocated_bytes", allocated}};
    if (on_gpu) document["other_device_bytes"] = others;
    for (const KindTime& kind : profile.kinds()) {
      if (kind.kind.find(options.op) == std::string::npos) continue;
      document["kinds"].push_back({{"kind", kind.kind},
                                   {"count", kind.count},
                                   {"time_s", kind.seconds},
                                   {"flops_per_s", kind.flops / kind.seconds},
                                   {"bytes_per_s", kind.bytes / kind.seconds}});
    }
    const StepTimes times = profile.times();
    document["profiled_step_s"] = times.seconds;
    document["idle_s"] = times.seconds - times.busy_s;
    document["largest_gap_s"] = times.largest_gap_s;
    fmt::print("{}\n", document.dump(2));
    return ExitStatus::done;
  }
  fmt::print("limits on {}: {}flop/s in matrix products, {}/s copying\n",
             on_gpu ? "the GPU" : fmt::format("{} threads", pool.threads()),
             format_count(limits.flops), format_bytes(static_cast<uint64_t>(limits.copy_bytes)));
  fmt::print(
      "step {} (median of {}), {} tokens/s, {:.1f} model TFLOP/s, {:.0f}% of the matmul limit\n",
      format_duration(step_time), kRuns, format_count(tokens_per_s), model_flops / step_time / 1e12,
      100.0 * model_flops / step_time / limits.flops);
  fmt::print("memory planned {}{}, allocated {}{}\n\n", format_bytes(plan.total_bytes()),
             plan.host_bytes() > 0
                 ? fmt::format(" ({} {} on the host)", on_gpu ? "beside" : "of it",
                               format_bytes(plan.host_bytes()))
                 : "",
             format_bytes(allocated),
             on_gpu ? fmt::format("; {} beside it for the driver, libraries and the graph",
                                  format_bytes(others))
                    : "");
  fmt::print("{}", describe_profile(profile, limits, options.op));
  return ExitStatus::done;
}

}  // namespace troupe
