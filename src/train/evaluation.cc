#include "train/evaluation.h"

#include <algorithm>

#include "base/error.h"
#include "train/batch_feed.h"

namespace troupe {

Evaluation::Evaluation(const ModelConfig& config, const ModelState& state,
                       const StateStorage& storage, ThreadPool& pool, const SampleSource& source,
                       int32_t batch, int64_t samples)
    : source_(source),
      step_(build_evaluation_step(
          config, state, static_cast<int32_t>(std::min<int64_t>(batch, source.samples_per_epoch())),
          static_cast<int32_t>(source.options().sequence_length))),
      interpreter_(*step_.program, plan_memory(*step_.program, pool.threads()), storage, pool),
      batches_(std::max<int64_t>(
          1, std::min(samples, source.samples_per_epoch()) / step_.batch.batch)) {}

EvaluationResult Evaluation::run() {
  BatchFeed feed(source_);
  double sum = 0;
  int64_t tokens = 0;
  for (int64_t i = 0; i < batches_; ++i) {
    const int64_t counted = feed.write(interpreter_, step_.batch, i * step_.batch.batch);
    interpreter_.run();
    sum += *interpreter_.view(step_.loss).as<double>() * static_cast<double>(counted);
    tokens += counted;
  }
  return {tokens > 0 ? sum / static_cast<double>(tokens) : 0.0, tokens};
}

}  // namespace troupe
