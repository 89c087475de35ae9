#include "comm/launch.h"

#include <charconv>
#include <cstdint>
#include <fmt/format.h>
#include <string_view>
#include <system_error>
#include <vector>

#include "base/text.h"

namespace troupe {
namespace {

// Where the launcher names no free port: the first of this many that is free, of these that neither
// the system nor usual services use.
constexpr int kPorts = 16;
constexpr uint32_t kFirstPort = 15'000;
constexpr uint32_t kPortRange = 14'000;

// More is a slip of the hand.
constexpr int kMostRanks = 65'536;

std::string variable_text(const Variables& variables, const char* name) {
  const char* const text = variables(name);
  return text == nullptr ? std::string() : text;
}

// All of the text as a number from `least` to `most`; none: it is no such number.
std::optional<int> number_in(const std::string& text, int least, int most) {
  int number = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || stop != end || number < least || number > most) return std::nullopt;
  return number;
}

// Of launchers of MPI, which read them themselves. 0: there is none.
int number_of(const Variables& variables, const char* name) {
  return number_in(variable_text(variables, name), 0, kMostRanks).value_or(0);
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

// Of what mpirun or srun has started: only the launchers of MPICH and its relatives set PMI's.
MpiKind kind_of_launcher(const Variables& variables) {
  return variables("PMI_SIZE") != nullptr && variables("OMPI_COMM_WORLD_SIZE") == nullptr
             ? MpiKind::mpich
             : MpiKind::open_mpi;
}

// Launchers of MPI say so in the environment; srun with PMIx does not say how many.
bool is_launched_by_mpi(const Variables& variables) {
  const int announced = announced_processes(variables);
  return announced > 0 ? announced > 1 : variables("PMIX_RANK") != nullptr;
}

constexpr std::string_view kOrAlone = " Without these variables the process is a run of its own.";

// Reads numbers of a launch and remembers the first one that is wrong.
class NumberReader {
 public:
  explicit NumberReader(const Variables& variables) : variables_(variables) {}

  bool is_set(const char* name) const { return variables_(name) != nullptr; }
  const std::string& problem() const { return problem_; }

  // The variable must be set.
  int take(const char* name, int least, int most, std::string_view what) {
    const std::string text = variable_text(variables_, name);
    const std::optional<int> number = number_in(text, least, most);
    if (!number && problem_.empty()) {
      problem_ = fmt::format("{}={} is set in the environment: {} is a number from {} to {}.{}",
                             name, printable(text), what, least, most, kOrAlone);
    }
    return number.value_or(least);
  }

 private:
  const Variables& variables_;
  std::string problem_;
};

// The numbers of ranks; none where there is one rank, or none.
struct Ranks {
  int rank = 0;
  int size = 1;
  std::string problem;
};

std::optional<Ranks> ranks_in(const Variables& variables, const char* rank, const char* size) {
  NumberReader numbers(variables);
  if (!numbers.is_set(rank) && !numbers.is_set(size)) return std::nullopt;
  Ranks ranks;
  if (numbers.is_set(size)) {
    ranks.size = numbers.take(size, 1, kMostRanks, "the number of ranks");
  }
  if (numbers.is_set(rank) && numbers.is_set(size) && numbers.problem().empty()) {
    ranks.rank =
        numbers.take(rank, 0, ranks.size - 1, fmt::format("with {}={}, a rank", size, ranks.size));
  }
  ranks.problem = numbers.problem();
  // The number of ranks alone may be there for other programs, if it is one.
  if (ranks.problem.empty() && (!numbers.is_set(rank) || !numbers.is_set(size)) &&
      (ranks.size > 1 || !numbers.is_set(size))) {
    const bool has_rank = numbers.is_set(rank);
    ranks.problem =
        fmt::format("{}={} is set in the environment, but not {}.{}", has_rank ? rank : size,
                    printable(variable_text(variables, has_rank ? rank : size)),
                    has_rank ? size : rank, kOrAlone);
  }
  if (ranks.size == 1 && ranks.problem.empty()) return std::nullopt;
  return ranks;
}

Launch torch_launch(const Variables& variables, const Ranks& ranks, bool by_torchrun) {
  RendezvousPoint point{.rank = ranks.rank,
                        .size = ranks.size,
                        .address = variable_text(variables, "MASTER_ADDR"),
                        .ports = {},
                        .run = {}};
  if (!ranks.problem.empty()) return {.point = point, .problem = ranks.problem};
  NumberReader numbers(variables);
  if (point.address.empty() || !numbers.is_set("MASTER_PORT")) {
    return {.point = point,
            .problem = fmt::format(
                "RANK={} of WORLD_SIZE={} is set in the environment, but not MASTER_ADDR and "
                "MASTER_PORT, where the ranks find each other: the address of rank 0 and a port "
                "that is free there. torchrun sets them.{}",
                ranks.rank, ranks.size, kOrAlone)};
  }
  const int port = numbers.take("MASTER_PORT", 1, UINT16_MAX, "a port");
  int local_size = 0;
  if (numbers.is_set("LOCAL_WORLD_SIZE")) {
    local_size = numbers.take("LOCAL_WORLD_SIZE", 1, ranks.size, "the number of a host's ranks");
  }
  int local_rank = 0;
  if (numbers.is_set("LOCAL_RANK")) {
    local_rank = numbers.take("LOCAL_RANK", 0, (local_size == 0 ? ranks.size : local_size) - 1,
                              "the number of a rank on its host");
  }
  point.ports = {static_cast<uint16_t>(port)};
  point.run = fmt::format("torch {} {} {}", point.address, port,
                          variable_text(variables, "TORCHELASTIC_RUN_ID"));
  point.may_serve = point.rank == 0;
  point.is_on_one_machine =
      local_size == ranks.size || point.address == "localhost" || is_loopback(point.address);
  // torchrun has a service of its own on the port, on the machine with the address, which need not
  // be that of rank 0.
  if (by_torchrun && variable_text(variables, "TORCHELASTIC_USE_AGENT_STORE") == "True") {
    point.ports = ports_of(point.run);
    point.may_serve = local_rank == 0;
    point.serves_only_at_address = true;
  }
  return {.point = point, .problem = numbers.problem()};
}

Launch slurm_launch(const Variables& variables, const Ranks& ranks) {
  std::string nodes = variable_text(variables, "SLURM_STEP_NODELIST");
  if (nodes.empty()) nodes = variable_text(variables, "SLURM_NODELIST");
  RendezvousPoint point{
      .rank = ranks.rank,
      .size = ranks.size,
      .address = first_host(nodes),
      .ports = {},
      .run = fmt::format("slurm {} {} {} {}", nodes, variable_text(variables, "SLURM_JOB_ID"),
                         variable_text(variables, "SLURM_STEP_ID"),
                         variable_text(variables, "SLURM_RESTART_COUNT"))};
  if (!ranks.problem.empty()) return {.point = point, .problem = ranks.problem};
  if (point.address.empty()) {
    return {.point = point,
            .problem = fmt::format(
                "SLURM_PROCID={} of SLURM_STEP_NUM_TASKS={} is set in the environment, but not "
                "SLURM_STEP_NODELIST, on whose first host the ranks find each other.{}",
                ranks.rank, ranks.size, kOrAlone)};
  }
  point.ports = ports_of(point.run);
  point.may_serve = point.rank == 0;
  point.is_on_one_machine = variable_text(variables, "SLURM_STEP_NUM_NODES") == "1";
  return {.point = point, .problem = {}};
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

std::optional<Launch> find_launch(const Variables& variables,
                                  const std::function<bool(MpiKind)>& has_mpi) {
  const auto torch = ranks_in(variables, "RANK", "WORLD_SIZE");
  const bool by_torchrun = torch && variables("TORCHELASTIC_RUN_ID") != nullptr;
  if (by_torchrun) return torch_launch(variables, *torch, by_torchrun);
  if (is_launched_by_mpi(variables) && has_mpi(kind_of_launcher(variables))) return Launch{};
  if (torch) return torch_launch(variables, *torch, by_torchrun);
  // What mpirun starts may carry the numbers of the step that carries mpirun's own helpers.
  if (announced_processes(variables) > 0) return std::nullopt;
  // A batch script has the first of these alone.
  if (variables("SLURM_STEP_NUM_TASKS") == nullptr) return std::nullopt;
  const auto slurm = ranks_in(variables, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS");
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
