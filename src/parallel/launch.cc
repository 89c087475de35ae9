#include "parallel/launch.h"

#include <cstdint>
#include <cstdlib>
#include <fmt/format.h>
#include <string_view>
#include <vector>

namespace troupe {
namespace {

// Where the launcher names no free port: the first of this many that is free, of these that neither
// the system nor usual services hand out.
constexpr int kPorts = 16;
constexpr uint32_t kFirstPort = 15'000;
constexpr uint32_t kPortRange = 14'000;

std::string text_of(const Variables& variables, const char* name) {
  const char* const text = variables(name);
  return text == nullptr ? std::string() : text;
}

// 0: there is none.
int number_of(const Variables& variables, const char* name) {
  return std::atoi(text_of(variables, name).c_str());
}

std::vector<uint16_t> ports_of(std::string_view run) {
  uint32_t number = 0x811c9dc5;
  for (const char c : run) number = (number ^ static_cast<unsigned char>(c)) * 0x01000193;
  std::vector<uint16_t> ports;
  for (int i = 0; i < kPorts; ++i) {
    ports.push_back(static_cast<uint16_t>(kFirstPort + number % kPortRange));
    number = number * 1'664'525 + 1'013'904'223;
  }
  return ports;
}

// The pair of variables, where it names several processes.
std::optional<ForeignLaunch> named_launch(const Variables& variables, const char* rank,
                                          const char* size) {
  const int processes = number_of(variables, size);
  if (variables(rank) == nullptr || processes <= 1) return std::nullopt;
  return ForeignLaunch{
      fmt::format("{}={} of {}={}", rank, number_of(variables, rank), size, processes), processes};
}

// What a launcher of MPI says of how many processes it has started: mpirun of Open MPI and of
// MPICH. 0: nothing.
int announced_processes(const Variables& variables) {
  const int size = number_of(variables, "OMPI_COMM_WORLD_SIZE");
  return size > 0 ? size : number_of(variables, "PMI_SIZE");
}

// Launchers of MPI say so in the environment; srun with PMIx does not say how many.
bool is_launched_by_mpi(const Variables& variables) {
  const int announced = announced_processes(variables);
  return announced > 0 ? announced > 1 : variables("PMIX_RANK") != nullptr;
}

constexpr std::string_view kOrAlone = " Without these variables the process is a run of its own.";

Launch launch_at(const MeetingPlace& place, const std::string& source) {
  Launch launch{.place = place, .problem = {}};
  if (place.rank < 0 || place.rank >= place.size) {
    launch.problem = fmt::format("{} is set in the environment: the ranks of so many are 0 to {}.",
                                 source, place.size - 1);
  }
  return launch;
}

Launch torch_launch(const Variables& variables, const ForeignLaunch& named, bool by_torchrun) {
  const std::string address = text_of(variables, "MASTER_ADDR");
  const int port = number_of(variables, "MASTER_PORT");
  MeetingPlace place{.rank = number_of(variables, "RANK"),
                     .size = named.processes,
                     .address = address,
                     .ports = {static_cast<uint16_t>(port)},
                     .run = fmt::format("torch {} {} {}", address, port,
                                        text_of(variables, "TORCHELASTIC_RUN_ID"))};
  if (address.empty() || port < 1 || port > UINT16_MAX) {
    return {
        .place = place,
        .problem = fmt::format(
            "{} is set in the environment, but not MASTER_ADDR and MASTER_PORT, where the ranks "
            "meet: the address of rank 0 and a port that is free there. torchrun sets them.{}",
            named.source, kOrAlone)};
  }
  place.may_host = place.rank == 0;
  // torchrun has a service of its own on the port, on the machine with the address, which need not
  // be that of rank 0.
  if (by_torchrun && text_of(variables, "TORCHELASTIC_USE_AGENT_STORE") == "True") {
    place.ports = ports_of(place.run);
    place.may_host = number_of(variables, "LOCAL_RANK") == 0;
    place.hosts_only_at_address = true;
  }
  return launch_at(place, named.source);
}

Launch slurm_launch(const Variables& variables, const ForeignLaunch& named) {
  std::string nodes = text_of(variables, "SLURM_STEP_NODELIST");
  if (nodes.empty()) nodes = text_of(variables, "SLURM_NODELIST");
  MeetingPlace place{
      .rank = number_of(variables, "SLURM_PROCID"),
      .size = named.processes,
      .address = first_host(nodes),
      .ports = {},
      .run = fmt::format("slurm {} {} {} {}", nodes, text_of(variables, "SLURM_JOB_ID"),
                         text_of(variables, "SLURM_STEP_ID"),
                         text_of(variables, "SLURM_RESTART_COUNT"))};
  if (place.address.empty()) {
    return {
        .place = place,
        .problem = fmt::format(
            "{} is set in the environment, but not SLURM_STEP_NODELIST, on whose first host the "
            "ranks meet.{}",
            named.source, kOrAlone)};
  }
  place.ports = ports_of(place.run);
  place.may_host = place.rank == 0;
  return launch_at(place, named.source);
}

}  // namespace

std::string first_host(const std::string& host_list) {
  std::string host;
  bool in_brackets = false;
  bool is_taken = true;  // the first number in brackets
  for (const char c : host_list) {
    if (c == '[') {
      in_brackets = true;
    } else if (c == ']') {
      in_brackets = false;
      is_taken = true;
    } else if (c == ',' && !in_brackets) {
      break;
    } else if (in_brackets && (c == '-' || c == ',')) {
      is_taken = false;
    } else if (is_taken) {
      host += c;
    }
  }
  return host;
}

std::optional<Launch> find_launch(const Variables& variables, bool has_mpi) {
  const auto torch = named_launch(variables, "RANK", "WORLD_SIZE");
  const bool by_torchrun = torch && variables("TORCHELASTIC_RUN_ID") != nullptr;
  if (by_torchrun) return torch_launch(variables, *torch, by_torchrun);
  if (has_mpi && is_launched_by_mpi(variables)) return Launch{};
  if (torch) return torch_launch(variables, *torch, by_torchrun);
  // What mpirun starts may carry the numbers of the step that carries mpirun's own helpers.
  if (announced_processes(variables) > 0) return std::nullopt;
  const auto slurm = named_launch(variables, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS");
  return slurm ? std::optional(slurm_launch(variables, *slurm)) : std::nullopt;
}

std::optional<ForeignLaunch> find_foreign_launch(const Variables& variables) {
  if (auto open_mpi = named_launch(variables, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")) {
    return open_mpi;
  }
  if (auto mpich = named_launch(variables, "PMI_RANK", "PMI_SIZE")) return mpich;
  if (announced_processes(variables) > 0) return std::nullopt;
  return named_launch(variables, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS");
}

}  // namespace troupe
