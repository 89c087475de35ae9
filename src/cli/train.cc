// `troupe train`.
#include "cli/command.h"
#include "train/interrupt.h"
#include "train/trainer.h"

namespace troupe {

ExitStatus run_train(const Options& options, ProcessGroup* processes) {
  if (options.fake_process_group) return run_plan(options);
  const bool leads = processes == nullptr || processes->own_ranks().front() == 0;
  install_interrupt_handlers(/*quiet=*/!leads);
  return train(options, processes);
}

}  // namespace troupe
