// A polite end on Ctrl-C (SIGINT), SIGTERM, SIGHUP (the terminal is gone), and SIGUSR1, which
// mpirun passes on and then waits: the first signal asks, the second one ends the process at once
// with status 130. SIGHUP only asks, however often it comes.
//
// Commands that can stop cleanly look at interrupt_requested() between their steps, save, and
// return ExitStatus::interrupted. All functions may be called from any thread.
#pragma once

#include <atomic>

namespace troupe {

// True once a signal has come.
std::atomic<bool>& interrupt_requested();

// Until this is called, a signal ends the process as usual. `quiet`: the first signal prints
// nothing. A SIGHUP that is ignored when this is called (nohup) stays so. Calling it again changes
// nothing.
void install_interrupt_handlers(bool quiet = false);

// For commands that write nothing but their result, at their end: each of these signals ends the
// process at once, with status 130. `quiet`: without a line that says so.
void end_at_once_when_interrupted(bool quiet);

// A reader that has gone (`train ... | head`) ends nothing: what is written for it is lost.
void ignore_broken_pipes();

}  // namespace troupe
