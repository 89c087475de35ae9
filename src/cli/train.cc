// `troupe train`.
#include "cli/command.h"
#include "train/interrupt.h"
#include "train/trainer.h"

namespace troupe {

ExitStatus run_train(const Options& options) {
  install_interrupt_handlers();
  Trainer trainer(options);
  return trainer.run();
}

}  // namespace troupe
