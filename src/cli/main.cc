// The program: reads the command line, runs the command, and turns errors into one line and an exit
// status.
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <unistd.h>
#include <vector>

#include "cli/command.h"
#include "parallel/launch.h"
#include "parallel/processes.h"
#include "train/command_line.h"

namespace troupe {
namespace {

const char* variable(const char* name) {
  return std::getenv(name);
}

// Processes that MPI should have joined: each would believe to be the whole run.
void refuse_foreign_launch(const Options& options) {
  const std::optional<ForeignLaunch> launch = find_foreign_launch(variable);
  if (!launch || !runs_on_ranks(options.command) || options.fake_process_group) return;
  const std::string command = "troupe " + std::string(info_of(options.command).name);
  const std::string count = std::to_string(launch->processes);
  throw_bad_request(
      launch->source + " is set in the environment, but " +
      (has_mpi() ? "MPI has started this process alone" : "this build has no MPI") +
      ", and each process would be a run of its own. Start the ranks with the mpirun of " +
      (has_mpi() ? "the MPI that troupe doctor names" : "an MPI that Troupe was built with") +
      ", or without MPI: under Slurm with srun --mpi=none " + command +
      " ..., with torchrun --no-python --nproc-per-node " + count + " " + command +
      " ..., or as threads of one process, without these variables: " + command + " --ranks " +
      count + " ...");
}

// Do ranks do the command's work? If not, each process does it as if it were alone. Mistakes in the
// command line are said once, by all.
bool works_on_ranks(const std::vector<std::string>& arguments) {
  try {
    const CommandLine line = parse_command_line(arguments);
    return line.text.empty() && runs_on_ranks(line.options.command) &&
           !line.options.fake_process_group;
  } catch (const UserError&) {
    return true;
  }
}

// Null: this process is alone.
std::unique_ptr<Processes> join_others(const std::vector<std::string>& arguments) {
  const std::optional<Launch> launch = find_launch(variable, has_mpi());
  if (!launch || (!launch->is_of_mpi() && !works_on_ranks(arguments))) return nullptr;
  return join_processes(*launch);
}

// What CUDA reads from the environment when it starts. NVLink's multicast stays off, whoever uses
// NCCL in this process. Where ranks that share a GPU wait for each other in kernels, or a GPU for
// several ranks at once (messages through NCCL), each wait needs a queue of its own.
void prepare_for_several_gpus(bool wait_at_once) {
  setenv("NCCL_NVLS_ENABLE", "0", /*overwrite=*/1);
  if (!wait_at_once) return;
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/1);
}

// Ends all ranks, if there are several. No message: another one says it.
ExitStatus report(Processes* processes, ExitStatus status, const char* message) {
  if (processes != nullptr) processes->fail(status, message);
  if (*message != '\0') std::fprintf(stderr, "troupe: %s\n", message);
  return status;
}

// Mapped files whose end is gone raise SIGBUS where they are read. Nothing can be gone back to.
void handle_bus_error(int) {
  static constexpr std::string_view kMessage =
      "troupe: a data or model file became shorter while it was read, or its disk fails. "
      "Checkpoints are intact.\n";
  // There is nobody to tell when standard error is closed.
  [[maybe_unused]] const auto written = write(STDERR_FILENO, kMessage.data(), kMessage.size());
  _exit(static_cast<int>(ExitStatus::failed));
}

void install_file_signal_handlers() {
  struct sigaction action = {};
  sigemptyset(&action.sa_mask);
  action.sa_handler = handle_bus_error;
  sigaction(SIGBUS, &action, nullptr);
  // A file beyond the limit of its size is then an error of the write, as a full disk is.
  action.sa_handler = SIG_IGN;
  sigaction(SIGXFSZ, &action, nullptr);
}

// What is still in the buffer must reach its reader before the program may claim success.
ExitStatus flush_output(ExitStatus status) {
  const bool failed = std::fflush(stdout) != 0 || std::ferror(stdout) != 0;
  if (!failed || status != ExitStatus::done) return status;
  throw_failed("standard output cannot be written (is the disk full?).");
}

ExitStatus run(const std::vector<std::string>& arguments, Processes* processes) {
  const bool leads = processes == nullptr || processes->rank() == 0;
  const CommandLine command_line =
      parse_command_line(arguments, processes == nullptr ? 1 : processes->size());
  if (!command_line.text.empty()) {
    if (leads) std::fputs(command_line.text.c_str(), stdout);
    return flush_output(ExitStatus::done);
  }
  const Options& options = command_line.options;
  if (processes == nullptr || processes->size() == 1) refuse_foreign_launch(options);
  if (options.device == "cuda" && options.ranks > 1) {
    prepare_for_several_gpus(options.ranks_per_gpu > 1 || options.gpu_exchange == "nccl" ||
                             processes != nullptr);
  }
  if (leads && !options.quiet) {
    for (const std::string& note : command_line.notes) std::fprintf(stderr, "%s\n", note.c_str());
  }
  ProcessGroup* const group =
      processes == nullptr ? nullptr
                           : &processes->group(std::chrono::seconds(options.collective_timeout_s));
  return flush_output(run_command(options, group));
}

ExitStatus run_and_report(const std::vector<std::string>& arguments) {
  std::unique_ptr<Processes> processes;
  try {
    processes = join_others(arguments);
    const ExitStatus status = run(arguments, processes.get());
    if (processes != nullptr) processes->finish();
    return status;
  } catch (const UserError& error) {
    return report(processes.get(), error.status(), error.what());
  } catch (const std::bad_alloc&) {
    return report(processes.get(), ExitStatus::failed, "out of memory.");
  } catch (const std::exception& error) {
    return report(processes.get(), ExitStatus::failed, error.what());
  }
}

}  // namespace
}  // namespace troupe

int main(int argc, char** argv) {
  troupe::install_file_signal_handlers();
  const std::vector<std::string> arguments(argv + (argc > 0 ? 1 : 0), argv + argc);
  return static_cast<int>(troupe::run_and_report(arguments));
}
