// The program: reads the command line, runs the command, and turns errors into one line and an exit
// status.
#include <algorithm>
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
#include <utility>
#include <vector>

#include "base/machine.h"
#include "cli/blas.h"
#include "cli/command.h"
#include "comm/join_processes.h"
#include "comm/launch.h"
#include "comm/post/secret.h"
#include "ops/kernel_level.h"
#include "options/command_line.h"
#include "train/rank_agreement.h"
#include "train/rank_run.h"
#include "train/terminal.h"

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
  const std::string& problem = mpi_problem();
  throw_bad_request(
      launch->source + " is set in the environment, but " +
      (problem.empty() ? "MPI has started this process alone"
                       : "MPI cannot be loaded: " + problem) +
      ", and each process would be a run of its own. Start the ranks with the mpirun of " +
      (problem.empty() ? "the MPI that troupe doctor names" : "such an MPI") +
      ", or without MPI: under Slurm with srun --mpi=none " + command +
      " ..., with torchrun --no-python --nproc-per-node " + count + " " + command +
      " ..., or as threads of one process, without these variables: " + command + " --ranks " +
      count + " ...");
}

// What the command line says, before there are ranks; none where it is not right, as one of
// this many ranks or alone. Mistakes are said later, once for all: the ranks find each other all
// the same.
std::optional<CommandLine> early_command_line(const std::vector<std::string>& arguments,
                                              int32_t ranks) {
  for (const int32_t processes : {1, ranks}) {
    try {
      return parse_command_line(arguments, processes);
    } catch (const UserError&) {
    }
  }
  return std::nullopt;
}

// Do ranks do the command's work? If not, each process does it as if it were alone.
bool works_on_ranks(const CommandLine& line) {
  return line.text.empty() && runs_on_ranks(line.options.command) &&
         !line.options.fake_process_group;
}

// What the user has given the ranks, by flag or variable; empty: nothing.
std::string secret_of(const Options& options) {
  if (!options.rendezvous_secret_file.empty()) {
    return read_secret_file(options.rendezvous_secret_file);
  }
  const char* const secret = variable("TROUPE_RENDEZVOUS_SECRET");
  return secret == nullptr ? std::string() : checked_secret(secret, "TROUPE_RENDEZVOUS_SECRET");
}

// Null: this process is alone. `line`: early_command_line().
std::unique_ptr<Processes> join_others(std::optional<Launch> launch,
                                       const std::optional<CommandLine>& line) {
  if (!launch) return nullptr;
  if (launch->is_of_mpi()) return join_processes(*launch);
  if (line && !works_on_ranks(*line)) return nullptr;
  const Options options = line ? line->options : Options();
  RendezvousPoint& point = *launch->point;
  if (launch->problem.empty()) point.secret = secret_of(options);
  std::unique_ptr<Processes> processes =
      join_processes(*launch, std::chrono::seconds(options.rendezvous_timeout_s));
  if (point.secret.empty() && !point.is_on_one_machine && processes->rank() == 0) {
    std::fprintf(
        stderr,
        "Warning: the ranks found each other without a secret: every host that reaches %s could "
        "take part. Give all ranks --rendezvous-secret-file FILE or "
        "TROUPE_RENDEZVOUS_SECRET.\n",
        point.address.c_str());
  }
  return processes;
}

// What CUDA reads from the environment when it starts. NVLink's multicast stays off, also for
// other users of NCCL in this process. Where ranks that share a GPU wait for each other in kernels,
// or a GPU for several ranks at once (messages through NCCL), each wait needs a queue of its own.
void prepare_for_several_gpus(bool wait_at_once) {
  setenv("NCCL_NVLS_ENABLE", "0", /*overwrite=*/1);
  if (!wait_at_once) return;
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/1);
}

// Ends all ranks, if there are several. No message: another one says it.
ExitStatus report(Processes* processes, ExitStatus status, const char* message) {
  if (processes != nullptr) processes->fail(status, message);
  if (*message != '\0') {
    print_note("troupe: " + std::string(message));
  }
  return status;
}

// Mapped files whose end is gone raise SIGBUS where they are read. Nothing can be gone back to.
void handle_bus_error(int) {
  static constexpr std::string_view kMessage =
      "troupe: a data or model file became shorter while it was read, or its disk fails. "
      "Checkpoints are intact.\n";
  // There is nothing to write to when standard error is closed.
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

// OpenBLAS reads OPENBLAS_CORETYPE when it is loaded, before main(). The program begins once more
// with it where a level of CPU kernels was asked for, which BLAS then follows, and where OpenBLAS
// does not know the processor: it takes kernels for one without AVX then.
void restart_with_blas_kernels(const std::optional<CommandLine>& line, char** argv) {
  constexpr const char* kVariable = "OPENBLAS_CORETYPE";
  if (variable(kVariable) != nullptr) return;
  std::string level = line ? line->options.cpu_kernels : std::string();
  if (level.empty() && blas_processor() == "Prescott") {
    for (const std::string_view each : {"x86-64-v3", "x86-64-v4"}) {
      if (processor_has(each)) level = each;
    }
  }
  const std::string wanted = blas_processor_for(level);
  if (wanted.empty() || blas_processor().empty() || wanted == blas_processor()) return;
  if (!processor_has(level)) return;
  setenv(kVariable, wanted.c_str(), /*overwrite=*/0);
  // By its own name, which ps and pkill show. Where that fails, the program goes on as it is.
  execv(program_file().c_str(), argv);
}

// Processes on several hosts compute with the same instructions, so that what each of them computes
// for itself has the same bits.
void choose_cpu_kernels(const Options& options, ProcessGroup* group, int32_t rank) {
  choose_kernel_level(options.cpu_kernels);
  if (group == nullptr || options.device != Device::cpu) return;
  if (options.cpu_kernels.empty()) {
    const auto levels = kernel_levels();
    const auto level = std::find(levels.begin(), levels.end(), kernel_level()) - levels.begin();
    const std::vector<uint64_t> all = group->exchange(rank, static_cast<uint64_t>(level));
    choose_kernel_level(levels[*std::min_element(all.begin(), all.end())]);
  }
  require_same_facts(group, rank,
                     {{"the processor of its CPU kernels", std::string(kernel_level())},
                      {"the processor of OpenBLAS's kernels (OPENBLAS_CORETYPE in the environment "
                       "sets it)",
                       blas_processor()}});
}

ExitStatus run(CommandLine command_line, Processes* processes) {
  const bool leads = processes == nullptr || processes->rank() == 0;
  if (!command_line.text.empty()) {
    if (leads) std::fputs(command_line.text.c_str(), stdout);
    return flush_output(ExitStatus::done);
  }
  // Where a host has the secret is its own affair.
  command_line.options.rendezvous_secret_file.clear();
  const Options& options = command_line.options;
  if (processes == nullptr || processes->size() == 1) refuse_foreign_launch(options);
  if (options.device == Device::cuda && options.ranks > 1) {
    prepare_for_several_gpus(options.ranks_per_gpu > 1 ||
                             options.gpu_exchange == GpuExchange::nccl || processes != nullptr);
  }
  if (leads && !options.quiet) {
    for (const std::string& note : command_line.notes) {
      print_note(note);
    }
  }
  ProcessGroup* const group =
      processes == nullptr ? nullptr
                           : &processes->group(std::chrono::seconds(options.collective_timeout_s));
  if (group != nullptr) require_same_options(options, *group, processes->rank());
  choose_cpu_kernels(options, group, leads ? 0 : processes->rank());
  return flush_output(run_command(options, group));
}

ExitStatus run_and_report(char** argv, const std::vector<std::string>& arguments) {
  std::unique_ptr<Processes> processes;
  try {
    std::optional<Launch> launch = find_launch(variable, load_mpi);
    const std::optional<CommandLine> line =
        early_command_line(arguments, launch && launch->point ? launch->point->size : 1);
    restart_with_blas_kernels(line, argv);
    processes = join_others(std::move(launch), line);
    const ExitStatus status =
        run(parse_command_line(arguments, processes == nullptr ? 1 : processes->size()),
            processes.get());
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
  return static_cast<int>(troupe::run_and_report(argv, arguments));
}
