#include "train/short_step.h"

#include <algorithm>

namespace troupe {

int32_t micro_batches_of_round(const Options& options) {
  return std::max(options.pipeline_model_parallel_size,
                  options.microbatch_group_size_per_virtual_pipeline_stage.value_or(0));
}

Options with_few_micro_batches(Options options, int32_t micro_batches, int32_t rounds) {
  const int32_t few = std::min(micro_batches, rounds * micro_batches_of_round(options));
  options.global_batch_size = few * options.micro_batch_size * data_parallel_size_of(options);
  options.rampup_batch_size.clear();
  options.step_batch_size_schedule.clear();
  return options;
}

}  // namespace troupe
