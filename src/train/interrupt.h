// A polite end on Ctrl-C (SIGINT), SIGTERM, and SIGUSR1, which mpirun passes on and then waits: the
// first signal asks, the second one ends the process at once with status 130.
//
// Commands that can stop cleanly look at interrupt_requested() between their steps, save, and
// return ExitStatus::interrupted. Both functions may be called from any thread.
#pragma once

#include <atomic>

namespace troupe {

// True once a signal has come.
std::atomic<bool>& interrupt_requested();

// Until this is called, a signal ends the process as usual. `quiet`: the first signal prints
// nothing. Calling it again changes nothing.
void install_interrupt_handlers(bool quiet = false);

}  // namespace troupe
