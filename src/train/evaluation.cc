#include "train/evaluation.h"

#include <algorithm>
#include <utility>

#include "program/verify.h"
#include "train/batch_feed.h"

namespace troupe {

EvaluationPlan plan_evaluation(const ModelConfig& config, const ModelState& state,
                               const SampleSource& source, int32_t batch, int64_t samples,
                               int threads) {
  const int64_t available = source.num_samples();
  const auto rows = static_cast<int32_t>(std::min<int64_t>(batch, available));
  EvaluationPlan plan;
  plan.step = build_evaluation_step(config, state, rows,
                                    static_cast<int32_t>(source.options().sequence_length));
  verify_program(*plan.step.program);
  plan.memory = plan_memory(*plan.step.program, threads);
  plan.batches = std::max<int64_t>(1, std::min(samples, available) / rows);
  return plan;
}

Evaluation::Evaluation(EvaluationPlan plan, const StateStorage& storage, ThreadPool& pool,
                       const SampleSource& source)
    : source_(source),
      plan_(std::move(plan)),
      interpreter_(*plan_.step.program, plan_.memory, storage, pool) {}

EvaluationResult Evaluation::run() {
  BatchFeed feed(source_);
  const BatchValues& batch = plan_.step.batch;
  double sum = 0;
  int64_t tokens = 0;
  for (int64_t i = 0; i < plan_.batches; ++i) {
    const int64_t counted = feed.write(interpreter_, batch, i * batch.batch);
    interpreter_.run();
    sum += *interpreter_.view(plan_.step.loss).as<double>() * static_cast<double>(counted);
    tokens += counted;
  }
  return {tokens > 0 ? sum / static_cast<double>(tokens) : 0.0, tokens};
}

}  // namespace troupe
