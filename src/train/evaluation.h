// Evaluation: mean cross-entropy over the first samples of a split. Always the same samples, so
// that values of one run can be compared.
#pragma once

#include <cstdint>

#include "data/sampler.h"
#include "passes/step_programs.h"
#include "runtime/cpu/cpu_interpreter.h"

namespace troupe {

struct EvaluationResult {
  double loss = 0;     // nats per token, over all counted tokens
  int64_t tokens = 0;  // counted
};

// What an evaluation will run, before anything is allocated for it.
struct EvaluationPlan {
  InferenceStep step;
  MemoryPlan memory;
  int64_t batches = 0;

  // Without the weights, which are the training run's.
  uint64_t own_bytes() const { return memory.total_bytes() - memory.state_bytes; }
};

// `samples` sequences are evaluated, in batches of at most `batch`; fewer if the source has fewer.
EvaluationPlan plan_evaluation(const ModelConfig& config, const ModelState& state,
                               const SampleSource& source, int32_t batch, int64_t samples,
                               int threads);

// Owns its program and memory; shares the weights. Borrows all other arguments. One thread.
class Evaluation {
 public:
  Evaluation(EvaluationPlan plan, const StateStorage& storage, ThreadPool& pool,
             const SampleSource& source);

  EvaluationResult run();

  // Of one evaluation.
  int64_t num_samples() const { return plan_.batches * plan_.step.batch.batch; }

 private:
  const SampleSource& source_;
  EvaluationPlan plan_;
  CpuInterpreter interpreter_;
};

}  // namespace troupe
