// The folder of a run that was not told where to save: runs/MODEL-DATE-TIME below the working
// directory. One thread. Errors are UserErrors.
#pragma once

#include <string>

#include "comm/process_group.h"

namespace troupe {

// `model`: as --model says it. Makes a new folder and returns its name, the same on all ranks; all
// processes of a launcher must call it at once. `processes`: null for a run of one process.
std::string make_run_folder(const std::string& model, ProcessGroup* processes);

// Removes a folder of make_run_folder() in which nothing was written.
void remove_if_empty(const std::string& folder);

}  // namespace troupe
