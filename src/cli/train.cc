// `troupe train`.
#include <fmt/format.h>

#include "cli/command.h"
#include "train/interrupt.h"
#include "train/rank_run.h"
#include "train/run_folder.h"
#include "train/terminal.h"
#include "train/trainer.h"

namespace troupe {
namespace {

// In a folder of its own below runs/, which is removed again where the run does not come about.
ExitStatus train_in_new_folder(Options options, ProcessGroup* processes, bool leads) {
  options.save = make_run_folder(options.model, processes);
  if (leads && !options.quiet) {
    print_note(fmt::format("Saving to {} (--save DIR chooses another folder, --no-save none).",
                           options.save));
  }
  try {
    return train(options, processes);
  } catch (...) {
    if (leads) remove_if_empty(options.save);
    throw;
  }
}

}  // namespace

ExitStatus run_train(const Options& options, ProcessGroup* processes) {
  if (options.fake_process_group) return run_plan(options);
  const bool leads_all = leads(processes);
  install_interrupt_handlers(/*quiet=*/!leads_all);
  ignore_broken_pipes();
  if (options.save.empty() && !options.no_save) {
    return train_in_new_folder(options, processes, leads_all);
  }
  return train(options, processes);
}

}  // namespace troupe
