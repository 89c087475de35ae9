// `troupe bench`: where the time of a training step goes, operation kind by operation kind.
//
// Runs the step that `train` would run with the same flags, on random tokens, with a clock around
// every operation, and prints medians over several runs beside the machine's limits.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fmt/format.h>
#include <map>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/random.h"
#include "base/units.h"
#include "cli/command.h"
#include "program/op_spec.h"
#include "runtime/cpu/copy_limit.h"
#include "runtime/device_limits.h"
#include "train/initialize.h"
#include "train/matmul_limit.h"
#include "train/model_options.h"
#include "train/trainer.h"

namespace troupe {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRuns = 7;

double seconds(Clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

struct KindTime {
  int64_t count = 0;
  double seconds = 0;  // sum of the medians of its operations
  double flops = 0;
  double bytes = 0;
};

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
  const ModelState state = declare_model_state(config, dtype, /*trained=*/true);
  const TrainingStep step = build_training_step(config, state, step_options);
  const Program& program = *step.program;
  const Device device = device_of(options);
  const bool on_gpu = device == Device::cuda;
  const StateStorage storage(state.table, device);
  const auto interpreter =
      make_interpreter(program, plan_memory(program, pool.threads(), device), storage, pool);
  initialize_parameters(state, storage, static_cast<uint64_t>(options.seed), pool);
  storage.to_device();
  for (const BatchValues& batch : step.micro_batches) {
    write_random_batch(*interpreter, batch, config.vocab_size);
  }
  *interpreter->view(step.update_number).as<int64_t>() = 1;
  if (step.step_number.valid()) *interpreter->view(step.step_number).as<int64_t>() = 0;

  const double flop_limit = measure_matmul_limit(dtype, pool, device);
  const double copy_limit = on_gpu ? measure_device_copy_limit() : measure_copy_limit(pool);

  interpreter->run();  // touches all memory
  std::vector<double> whole;
  for (int run = 0; run < kRuns; ++run) {
    const auto start = Clock::now();
    interpreter->run();
    whole.push_back(seconds(Clock::now() - start));
  }
  std::vector<std::vector<double>> times(static_cast<size_t>(program.op_count()));
  for (int run = 0; run < kRuns; ++run) {
    auto last = Clock::now();
    interpreter->run_observed([&](int32_t op) {
      const auto now = Clock::now();
      times[static_cast<size_t>(op)].push_back(seconds(now - last));
      last = Clock::now();
    });
  }

  std::map<std::string, KindTime> kinds;
  double sum = 0;
  for (int32_t i = 0; i < program.op_count(); ++i) {
    const Op& op = program.op(i);
    const Cost cost = op.spec->cost(OpView{program, op});
    const double time = median(times[static_cast<size_t>(i)]);
    KindTime& kind = kinds[op.spec->name];
    kind.count += 1;
    kind.seconds += time;
    kind.flops += cost.flops;
    kind.bytes += cost.bytes;
    sum += time;
  }
  std::vector<std::pair<std::string, KindTime>> rows(kinds.begin(), kinds.end());
  std::erase_if(rows,
                [&](const auto& row) { return row.first.find(options.op) == std::string::npos; });
  std::sort(rows.begin(), rows.end(),
            [](const auto& a, const auto& b) { return a.second.seconds > b.second.seconds; });

  const double step_time = median(whole);
  const double samples = static_cast<double>(step_options.micro_batch_size) *
                         static_cast<double>(step_options.micro_batches);
  const double model_flops = config.training_flops_per_sequence(step_options.sequence) * samples;
  const double tokens_per_s = samples * step_options.sequence / step_time;
  if (options.json) {
    nlohmann::ordered_json document = {{"threads", pool.threads()},
                                       {"matmul_limit_flops_per_s", flop_limit},
                                       {"copy_limit_bytes_per_s", copy_limit},
                                       {"step_time_s", step_time},
                                       {"tokens_per_s", tokens_per_s},
                                       {"tflops_per_gpu", model_flops / step_time / 1e12},
                                       {"operations", program.op_count()}};
    for (const auto& [name, kind] : rows) {
      document["kinds"].push_back({{"kind", name},
                                   {"count", kind.count},
                                   {"time_s", kind.seconds},
                                   {"flops_per_s", kind.flops / kind.seconds},
                                   {"bytes_per_s", kind.bytes / kind.seconds}});
    }
    fmt::print("{}\n", document.dump(2));
    return ExitStatus::done;
  }
  fmt::print("limits on {}: {}flop/s in matrix products, {}/s copying\n",
             on_gpu ? "the GPU" : fmt::format("{} threads", pool.threads()),
             format_count(flop_limit), format_bytes(static_cast<uint64_t>(copy_limit)));
  fmt::print("step {} (median of {}), {} tokens/s, {:.0f}% of the matmul limit\n\n",
             format_duration(step_time), kRuns, format_count(tokens_per_s),
             100.0 * model_flops / step_time / flop_limit);
  fmt::print("{:<32} {:>5} {:>10} {:>6} {:>10} {:>6} {:>10} {:>6}\n", "operation kind", "count",
             "time", "share", "Gflop/s", "limit", "GB/s", "limit");
  for (const auto& [name, kind] : rows) {
    fmt::print("{:<32} {:>5} {:>10} {:>5.1f}% {:>10.1f} {:>5.0f}% {:>10.1f} {:>5.0f}%\n", name,
               kind.count, format_duration(kind.seconds), 100 * kind.seconds / sum,
               kind.flops / kind.seconds / 1e9, 100 * kind.flops / kind.seconds / flop_limit,
               kind.bytes / kind.seconds / 1e9, 100 * kind.bytes / kind.seconds / copy_limit);
  }
  return ExitStatus::done;
}

}  // namespace troupe
