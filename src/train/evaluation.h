// Evaluation: mean cross-entropy over the first samples of one or several data sets. Always the
// same samples, so that values of one run can be compared.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "data/sampler.h"
#include "passes/step_programs.h"
#include "runtime/cpu/cpu_interpreter.h"
#include "train/options.h"

namespace troupe {

struct EvaluationSet {
  std::string name;  // empty: the validation share of --data-path
  std::unique_ptr<SampleSource> source;
};

// The sets that --valid-data-path names, or else the validation share of --data-path: of `dataset`,
// or opened here when that is null. `common` says what all samples of the run share; its split and
// sequences are not used. A name given twice, or ids outside of `common`'s vocabulary, are bad
// requests.
std::vector<EvaluationSet> open_evaluation_sets(const Options& options, const SampleOptions& common,
                                                std::shared_ptr<const IndexedDataset> dataset);

struct EvaluationResult {
  std::string name;    // of the set
  double loss = 0;     // nats per token, over all counted tokens
  int64_t tokens = 0;  // counted
};

// What an evaluation will run, before anything is allocated for it.
struct EvaluationPlan {
  InferenceStep step;
  MemoryPlan memory;
  std::vector<int64_t> batches;  // of each set

  // Without the weights, which are the training run's.
  uint64_t own_bytes() const { return memory.total_bytes() - memory.state_bytes; }
};

// `samples` sequences of each set are evaluated, at most one pass over it, all with one program: in
// batches of at most `batch`, and of no more than the smallest set has. `sets` is not empty, and
// its sequences are of one length.
EvaluationPlan plan_evaluation(const ModelConfig& config, const ModelState& state,
                               std::span<const EvaluationSet> sets, int32_t batch, int64_t samples,
                               int threads);

// Owns its program and memory; shares the weights. Borrows all other arguments. One thread.
class Evaluation {
 public:
  Evaluation(EvaluationPlan plan, const StateStorage& storage, ThreadPool& pool,
             std::span<const EvaluationSet> sets);

  // One result for each set, in their order.
  std::vector<EvaluationResult> run();

 private:
  std::span<const EvaluationSet> sets_;
  EvaluationPlan plan_;
  CpuInterpreter interpreter_;
};

}  // namespace troupe
