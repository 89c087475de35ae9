// `troupe train`.
#include "cli/command.h"
#include "train/interrupt.h"
#include "train/trainer.h"

namespace troupe {

ExitStatus run_train(const Options& options) {
  if (options.fake_process_group) return run_plan(options);
  install_interrupt_handlers();
  return train(options);
}

}  // namespace troupe
