// What the tests of the train room share: a small MoE model that exercises everything, a training
// step of it that is ready to run, the bytes and numbers of its state, and folders that clean up
// after themselves.
#pragma once

#include <cstring>
#include <functional>
#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <vector>

#include "base/random.h"
#include "passes/step_programs.h"
#include "program/test_models.h"
#include "program/verify.h"
#include "runtime/make_interpreter.h"
#include "support/adamw_state.h"
#include "support/files.h"
#include "train/initialize.h"

namespace troupe::testing {

// Two layers, four experts, top-2, norms of queries and keys, both auxiliary losses.
inline ModelConfig trained_model() {
  ModelConfig config = moe_model(2);
  config.qk_layernorm = true;
  return config;
}

inline double element(const TensorView& view, int64_t i) {
  switch (view.dtype) {
    case DType::f64:
      return view.as<double>()[i];
    case DType::f32:
      return view.as<float>()[i];
    default:
      return view.as<bf16>()[i];
  }
}

inline void set_element(const TensorView& view, int64_t i, double value) {
  switch (view.dtype) {
    case DType::f64:
      view.as<double>()[i] = value;
      break;
    case DType::f32:
      view.as<float>()[i] = static_cast<float>(value);
      break;
    default:
      view.as<bf16>()[i] = bf16(value);
      break;
  }
}

inline std::vector<double> elements(const TensorView& view) {
  std::vector<double> values;
  for (int64_t i = 0; i < view.shape.elements(); ++i) values.push_back(element(view, i));
  return values;
}

inline std::string bytes_of(const TensorView& view) {
  const auto size = static_cast<size_t>(view.shape.elements()) * size_of(view.dtype);
  return {static_cast<const char*>(view.data), size};
}

// The bytes of every state tensor, or of all but the gradients, by StateId.
inline std::vector<std::string> state_bytes(const StateStorage& storage,
                                            bool with_gradients = true) {
  std::vector<std::string> all;
  for (int32_t i = 0; i < storage.table().size(); ++i) {
    if (!with_gradients && storage.table()[StateId{i}].role == Role::gradient) continue;
    all.push_back(bytes_of(storage.view(StateId{i})));
  }
  return all;
}

// Names the first tensor that differs.
inline void expect_same_state(const StateStorage& a, const StateStorage& b) {
  for (int32_t i = 0; i < a.table().size(); ++i) {
    ASSERT_EQ(bytes_of(a.view(StateId{i})), bytes_of(b.view(StateId{i})))
        << a.table()[StateId{i}].name;
  }
}

// What of a bf16 model's state is kept in fewer bits.
struct NarrowState {
  DType main_gradients = DType::f32;
  DType exp_avg = DType::f32;
  DType exp_avg_sq = DType::f32;
};

// One of `ranks` ranks that all hold the whole model.
inline ModelPart data_parallel_part(int32_t layers, int32_t ranks, int32_t rank,
                                    const NarrowState& narrow = {}, double optimizer_offload = 0,
                                    int32_t mtp_layers = 0) {
  RunLayout run = layout_of_one_rank(layers, mtp_layers);
  run.main_gradients = narrow.main_gradients;
  run.optimizer = adamw_of(narrow.exp_avg, narrow.exp_avg_sq);
  run.optimizer_offload = optimizer_offload;
  run.layout = Layout({.world_size = ranks, .embedding_places = {0}});
  return {.run = std::make_shared<const RunLayout>(std::move(run)), .rank = rank};
}

struct StepRunOptions {
  DType dtype = DType::f64;
  int threads = 1;
  bool oracle = false;
  int32_t micro_batch_size = 1;
  int32_t micro_batches = 1;
  int32_t sequence = 12;
  uint64_t seed = 1;
  int32_t data_parallel_size = 1;  // ranks that share the steps, this one being number
  int32_t data_parallel_rank = 0;
  NarrowState narrow = {};
  RecomputeOptions recompute = {};
  int32_t loss_chunk_tokens = 0;
  OffloadOptions offload = {};
  double optimizer_offload = 0;                           // RunLayout::optimizer_offload
  std::function<void(TrainingStepOptions&)> change = {};  // to the step's other options
  Communicators communicators = {};
  Device device = Device::cpu;
  bool capture = false;  // on a GPU
};

// A model with its training step, planned and initialised. Samples are numbered: the same number
// is the same tokens, labels and mask, wherever in the step it is put.
class StepRun {
 public:
  StepRun(const ModelConfig& model, const StepRunOptions& run)
      : config(model),
        options(run),
        pool(run.threads),
        state(declare_model_state(
            config, run.dtype, /*trained=*/true,
            data_parallel_part(config.num_layers, run.data_parallel_size, run.data_parallel_rank,
                               run.narrow, run.optimizer_offload, config.mtp_num_layers))),
        step(build_training_step(config, state, step_options(run))),
        storage(state.table, run.device),
        own_interpreter(make_interpreter(*step.program, plan(*step.program, run), storage, pool,
                                         run.communicators, {.capture = run.capture})),
        interpreter(*own_interpreter) {
    initialize_parameters(state, storage, run.seed, pool);
    storage.to_device();
    set_learning_rate(1e-3);
    *interpreter.view(step.weight_decay).as<double>() = 0.1;
    write_samples(0);
  }

  // Fills the whole step with samples `first`, `first` + 1, ...
  void write_samples(int64_t first) {
    for (size_t i = 0; i < step.micro_batches.size(); ++i) {
      write_micro_batch(i, first);
      first += options.micro_batch_size;
    }
  }
  // Fills one micro-batch of the step in the same way.
  void write_micro_batch(size_t index, int64_t first) {
    const BatchValues& batch = step.micro_batches[index];
    for (int32_t row = 0; row < batch.batch; ++row) write_sample(batch, row, first++);
  }

  // Runs update `number` (from 1).
  void update(int64_t number = 1) {
    *interpreter.view(step.update_number).as<int64_t>() = number;
    if (step.step_number.valid()) set_step_number(number);
    interpreter.run();
  }

  void set_step_number(int64_t number) {
    *interpreter.view(step.step_number).as<int64_t>() = number;
  }
  void set_learning_rate(double rate) { *interpreter.view(step.learning_rate).as<double>() = rate; }
  double loss() const { return *interpreter.view(step.loss).as<double>(); }
  double grad_norm() const { return *interpreter.view(step.grad_norm).as<double>(); }
  bool skipped() const { return *interpreter.view(step.skipped).as<int32_t>() != 0; }

  // What a step minimises: cross-entropy and auxiliary losses with their coefficients.
  double objective() const {
    double sum = loss();
    for (const ValueId each : step.mtp_losses) {
      sum += config.mtp_loss_scaling_factor / config.mtp_num_layers *
             *interpreter.view(each).as<double>();
    }
    for (const LayerMetrics& layer : step.layers) {
      for (const LayerMetrics::Loss& auxiliary : layer.losses) {
        sum += config.uses_of(layer.layer) * coefficient_of(auxiliary.kind, config, layer.layer) *
               *interpreter.view(auxiliary.value).as<double>();
      }
    }
    return sum;
  }

  std::vector<double> expert_counts() const {
    std::vector<double> counts;
    for (const LayerMetrics& layer : step.layers) {
      if (!layer.counts.valid()) continue;
      for (const double count : elements(interpreter.view(layer.counts))) counts.push_back(count);
    }
    return counts;
  }

  const std::string& name(const Parameter& parameter) const {
    return (*state.table)[parameter.value].name;
  }

  ModelConfig config;
  StepRunOptions options;
  ThreadPool pool;
  ModelState state;
  TrainingStep step;
  StateStorage storage;
  std::unique_ptr<Interpreter> own_interpreter;
  Interpreter& interpreter;

 private:
  static TrainingStepOptions step_options(const StepRunOptions& run) {
    TrainingStepOptions options{.micro_batch_size = run.micro_batch_size,
                                .micro_batches = run.micro_batches,
                                .sequence = run.sequence,
                                .seed = run.seed,
                                .loss_chunk_tokens = run.loss_chunk_tokens,
                                .recompute = run.recompute,
                                .offload = run.offload};
    if (run.change) run.change(options);
    return options;
  }
  static MemoryPlan plan(const Program& program, const StepRunOptions& run) {
    verify_program(program);
    return run.oracle ? plan_oracle(program, run.threads, run.device)
                      : plan_memory(program, run.threads, run.device);
  }

  void write_sample(const BatchValues& batch, int32_t row, int64_t sample) {
    const auto vocabulary = static_cast<uint64_t>(config.vocab_size);
    const auto draw = [&](uint32_t what, int64_t position) {
      return random_below(vocabulary, options.seed, RandomStream::test, what,
                          static_cast<uint64_t>(sample * batch.sequence + position));
    };
    // Whether there is a token at that position, and what.
    const auto write = [&](int64_t at, int64_t i, const BatchValues::Shifted& to) {
      const bool exists = i < batch.sequence;
      const auto id = [&](uint32_t what) {
        return exists ? static_cast<int32_t>(draw(what, i)) : 0;
      };
      interpreter.view(to.tokens).as<int32_t>()[at] = id(0);
      interpreter.view(to.labels).as<int32_t>()[at] = id(1);
      set_element(interpreter.view(to.mask), at, exists && i % 5 != 3 ? 1.0 : 0.0);
    };
    for (int32_t i = 0; i < batch.sequence; ++i) {
      const int64_t at = static_cast<int64_t>(row) * batch.sequence + i;
      write(at, i, {batch.tokens, batch.labels, batch.mask});
      for (size_t depth = 1; depth <= batch.shifted.size(); ++depth) {
        write(at, i + static_cast<int64_t>(depth), batch.shifted[depth - 1]);
      }
    }
  }
};

}  // namespace troupe::testing
