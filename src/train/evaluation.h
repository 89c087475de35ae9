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

// Owns its program and memory; shares the weights. Borrows all arguments. One thread.
class Evaluation {
 public:
  // `samples` sequences are evaluated, in batches of `batch`; at most one pass over the split.
  Evaluation(const ModelConfig& config, const ModelState& state, const StateStorage& storage,
             ThreadPool& pool, const SampleSource& source, int32_t batch, int64_t samples);

  EvaluationResult run();

  const CpuInterpreter& interpreter() const { return interpreter_; }

 private:
  const SampleSource& source_;
  InferenceStep step_;
  CpuInterpreter interpreter_;
  int64_t batches_;
};

}  // namespace troupe
