// Evaluation: mean cross-entropy over the first samples of one or several data sets. Always the
// same samples, so that values of one run can be compared.
//
// Of several ranks all evaluate together: the batches are divided among the dp coordinates, and the
// results are the same on every rank, bit for bit. The losses of batches are summed in the order of
// the batches, so the number of dp coordinates changes no bit of them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/work_report.h"
#include "options/data_options.h"
#include "passes/inference_programs.h"
#include "runtime/interpreter.h"
#include "train/data_sets.h"
#include "train/rank_session.h"

namespace troupe {

struct EvaluationSet {
  std::string name;  // empty: the validation share of --data-path
  std::unique_ptr<SampleSource> source;
  // Its files, unless they are those of --data-path.
  std::vector<std::shared_ptr<const IndexedDataset>> files = {};
  bool is_test = false;  // evaluated once, when the run is over; the last set
};

// `data`: the run's, of which `split` leaves a share to validation; read where the spec says so.
// `common` says what all samples of the run share; its split is not used, and samples come in an
// order that does not depend on how many are asked for. Ids outside of `common`'s vocabulary are a
// bad request.
std::vector<EvaluationSet> open_evaluation_sets(const ValidationSpec& spec, SampleOptions common,
                                                const DataSets& data, std::string_view split);

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
  uint64_t own_bytes() const { return step.program == nullptr ? 0 : memory.own_bytes(); }
};

// `samples` sequences of each set are evaluated, fewer where a set has fewer, all with one program:
// in batches of at most `batch`, and of no more than the smallest set has. `sets` is not empty, and
// its sequences are of one length.
EvaluationPlan plan_evaluation(const ModelConfig& config, const RankSession& session,
                               std::span<const EvaluationSet> sets, int32_t batch, int64_t samples,
                               int32_t loss_chunk_tokens, const PrecisionOptions& precision);

// Owns its program and memory; shares the weights. Borrows session and sets. One thread per rank.
class Evaluation {
 public:
  Evaluation(EvaluationPlan plan, RankSession& session, std::span<const EvaluationSet> sets);

  // One result for each set for validation, or for each one for the end of the run (`test`), in
  // their order. All ranks must run at the same time. `report` counts batches of all those sets.
  std::vector<EvaluationResult> run(const WorkReport& report = {}, bool test = false);
  bool has_test() const { return sets_.back().is_test; }

  // Of one evaluation on the set at this index.
  int64_t num_samples(size_t set) const { return plan_.batches[set] * plan_.step.batch.batch; }

 private:
  // `report`: of the batches of this set that are done.
  EvaluationResult run(const EvaluationSet& set, int64_t batches,
                       const std::function<void(int64_t)>& report);
  // What each rank has, by rank.
  std::vector<double> of_ranks(double own) const;

  RankSession& session_;
  std::span<const EvaluationSet> sets_;
  EvaluationPlan plan_;
  std::unique_ptr<Interpreter> interpreter_;
};

}  // namespace troupe
