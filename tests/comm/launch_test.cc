// What the variables of launchers say of this process.
#include "comm/launch.h"

#include <gtest/gtest.h>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace troupe {
namespace {

using Environment = std::map<std::string, std::string>;

// `kind`: of the launcher of MPI that has started the process; untouched: none has.
std::optional<Launch> launch_of(const Environment& environment, bool has_mpi = true,
                                std::optional<MpiKind>* kind = nullptr) {
  return find_launch(
      [&](const char* name) -> const char* {
        const auto found = environment.find(name);
        return found == environment.end() ? nullptr : found->second.c_str();
      },
      [&](MpiKind asked) {
        if (kind != nullptr) *kind = asked;
        return has_mpi;
      });
}

const Environment kByHand = {{"RANK", "2"},
                             {"WORLD_SIZE", "4"},
                             {"LOCAL_RANK", "0"},
                             {"MASTER_ADDR", "node7"},
                             {"MASTER_PORT", "29500"}};
const Environment kMpirun = {{"OMPI_COMM_WORLD_SIZE", "2"}, {"OMPI_COMM_WORLD_RANK", "1"}};
const Environment kSrun = {{"SLURM_PROCID", "0"},
                           {"SLURM_STEP_NUM_TASKS", "8"},
                           {"SLURM_STEP_NODELIST", "gpu[04-05,9]"},
                           {"SLURM_JOB_ID", "17"},
                           {"SLURM_STEP_ID", "0"}};

Environment with(Environment environment, const Environment& more) {
  for (const auto& [name, value] : more) environment[name] = value;
  return environment;
}

Environment torchrun(const Environment& more = {}) {
  return with(with(kByHand, {{"TORCHELASTIC_RUN_ID", "a"},
                             {"TORCHELASTIC_RESTART_COUNT", "0"},
                             {"TORCHELASTIC_USE_AGENT_STORE", "True"}}),
              more);
}

TEST(Launch, IsAloneWithoutALauncher) {
  EXPECT_FALSE(launch_of({}));
  EXPECT_FALSE(launch_of({{"RANK", "0"}, {"WORLD_SIZE", "1"}}));
  EXPECT_FALSE(launch_of({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "2"}}));
  EXPECT_FALSE(launch_of({{"OMPI_COMM_WORLD_SIZE", "1"}, {"OMPI_COMM_WORLD_RANK", "0"}}));
}

// Every field that a launch has, or its problem, in one line.
std::string text_of(const std::optional<Launch>& launch) {
  if (!launch) return "alone";
  if (launch->is_of_mpi()) return "MPI" + launch->problem;
  const RendezvousPoint& point = *launch->point;
  std::string text = std::to_string(point.rank) + " of " + std::to_string(point.size);
  if (!launch->problem.empty()) return text + ": " + launch->problem;
  text += " at " + point.address + ":" + std::to_string(point.ports.front());
  if (point.ports.size() > 1) {
    text += " and " + std::to_string(point.ports.size() - 1) + " more to " +
            std::to_string(point.ports.back());
  }
  text += ", run '" + point.run + "'";
  if (point.may_serve) text += ", may serve";
  if (point.serves_only_at_address) text += ", only there";
  if (point.is_on_one_machine) text += ", on one machine";
  return text;
}

// Which launcher counts among several, and all that is taken from its variables.
TEST(Launch, IsAllThatTheVariablesSay) {
  struct Case {
    Environment environment;
    std::string expected;
    bool has_mpi = true;
  };
  const std::string alone = " Without these variables the process is a run of its own.";
  const std::vector<Case> cases = {
      {kByHand, "2 of 4 at node7:29500, run 'torch node7 29500 '"},
      {with(kByHand, {{"RANK", "0"}, {"MASTER_ADDR", "::1"}}),
       "0 of 4 at ::1:29500, run 'torch ::1 29500 ', may serve, on one machine"},
      {with(kByHand, {{"TORCHELASTIC_USE_AGENT_STORE", "True"}}),
       "2 of 4 at node7:29500, run 'torch node7 29500 '"},
      {with(kByHand, {{"WORLD_SIZE", "65536"}, {"RANK", "65535"}}),
       "65535 of 65536 at node7:29500, run 'torch node7 29500 '"},
      {torchrun(),
       "2 of 4 at node7:25671 and 15 more to 26808, run 'torch node7 29500 a', may serve, only "
       "there"},
      {torchrun({{"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "4"}}),
       "2 of 4 at node7:25671 and 15 more to 26808, run 'torch node7 29500 a', only there, on one "
       "machine"},
      {torchrun({{"TORCHELASTIC_USE_AGENT_STORE", "False"}, {"RANK", "0"}}),
       "0 of 4 at node7:29500, run 'torch node7 29500 a', may serve"},
      {torchrun({{"WORLD_SIZE", "1"}, {"RANK", "0"}}), "alone"},
      {torchrun({{"WORLD_SIZE", "two"}, {"RANK", "three"}}),
       "0 of 1: WORLD_SIZE=two is set in the environment: the number of ranks is a number from 1 "
       "to 65536." +
           alone},
      {kSrun,
       "0 of 8 at gpu04:21117 and 15 more to 18566, run 'slurm gpu[04-05,9] 17 0 ', may serve"},
      {with(kSrun,
            {{"SLURM_PROCID", "7"}, {"SLURM_STEP_NUM_NODES", "1"}, {"SLURM_RESTART_COUNT", "2"}}),
       "7 of 8 at gpu04:16045 and 15 more to 24054, run 'slurm gpu[04-05,9] 17 0 2', on one "
       "machine"},
      {with(kSrun, {{"SLURM_STEP_NODELIST", ""}, {"SLURM_NODELIST", "n[1,2]"}}),
       "0 of 8 at n1:19951 and 15 more to 27904, run 'slurm n[1,2] 17 0 ', may serve"},
      {with(kSrun, {{"SLURM_STEP_NODELIST", ""}}),
       "0 of 8: SLURM_PROCID=0 of SLURM_STEP_NUM_TASKS=8 is set in the environment, but not "
       "SLURM_STEP_NODELIST, on whose first host the ranks find each other." +
           alone},
      {with(kSrun, {{"SLURM_STEP_NUM_TASKS", "1"}}), "alone"},
      {{{"SLURM_STEP_NUM_TASKS", "2"}},
       "0 of 2: SLURM_STEP_NUM_TASKS=2 is set in the environment, but not SLURM_PROCID." + alone},
      {{{"SLURM_STEP_NUM_TASKS", "1"}}, "alone"},
      {{{"SLURM_PROCID", "0"}}, "alone"},
      {with(kSrun, kMpirun), "MPI"},
      {with(kSrun, kMpirun), "alone", false},
      {with(kSrun, {{"PMI_SIZE", "1"}}), "alone"},
      {{{"PMI_SIZE", "2"}}, "MPI"},
      {{{"PMI_SIZE", "1"}, {"PMIX_RANK", "0"}}, "alone"},
      {{{"OMPI_COMM_WORLD_SIZE", "1"}, {"PMI_SIZE", "2"}}, "alone"},
      {{{"OMPI_COMM_WORLD_SIZE", "0"}, {"PMI_SIZE", "2"}}, "MPI"},
      {{{"PMIX_RANK", "0"}}, "MPI"},
      {{{"PMIX_RANK", "0"}}, "alone", false},
      {with(kByHand, kMpirun), "2 of 4 at node7:29500, run 'torch node7 29500 '", false},
      {{{"RANK", "0"}}, "0 of 1: RANK=0 is set in the environment, but not WORLD_SIZE." + alone},
      {{{"RANK", "0"}, {"WORLD_SIZE", "1"}}, "alone"},
      {{{"WORLD_SIZE", "0"}},
       "0 of 1: WORLD_SIZE=0 is set in the environment: the number of ranks is a number from 1 to "
       "65536." +
           alone},
      {with(kByHand, {{"WORLD_SIZE", "3"}, {"RANK", "3"}, {"MASTER_PORT", "x"}}),
       "0 of 3: RANK=3 is set in the environment: with WORLD_SIZE=3, a rank is a number from 0 to "
       "2." +
           alone},
      {with(kByHand, {{"MASTER_PORT", "x"}, {"LOCAL_RANK", "9"}}),
       "2 of 4: MASTER_PORT=x is set in the environment: a port is a number from 1 to 65535." +
           alone},
      {with(kByHand, {{"LOCAL_WORLD_SIZE", "0"}}),
       "2 of 4: LOCAL_WORLD_SIZE=0 is set in the environment: the number of a host's ranks is a "
       "number from 1 to 4." +
           alone},
      {with(kByHand, {{"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "1"}}),
       "2 of 4: LOCAL_RANK=1 is set in the environment: the number of a rank on its host is a "
       "number from 0 to 0." +
           alone},
  };
  for (const Case& each : cases) {
    EXPECT_EQ(text_of(launch_of(each.environment, each.has_mpi)), each.expected);
  }
}

TEST(Launch, MeetsAtThePortThatWasGivenByHand) {
  const std::optional<Launch> launch = launch_of(kByHand);
  ASSERT_TRUE(launch && launch->point);
  EXPECT_EQ(launch->problem, "");
  EXPECT_EQ(launch->point->rank, 2);
  EXPECT_EQ(launch->point->size, 4);
  EXPECT_EQ(launch->point->address, "node7");
  EXPECT_EQ(launch->point->ports, std::vector<uint16_t>{29500});
  EXPECT_FALSE(launch->point->may_serve);  // rank 0 is the server, wherever it is
  EXPECT_TRUE(launch_of(with(kByHand, {{"RANK", "0"}}))->point->may_serve);
}

TEST(Launch, LeavesTorchrunItsPort) {
  const std::optional<Launch> launch = launch_of(torchrun());
  ASSERT_TRUE(launch && launch->point);
  const std::vector<uint16_t>& ports = launch->point->ports;
  EXPECT_EQ(std::set<uint16_t>(ports.begin(), ports.end()).size(), 16U);
  for (const uint16_t port : ports) {
    EXPECT_GE(port, 15'000);
    EXPECT_LT(port, 29'000);
  }
  // The first rank of the machine that has the address.
  EXPECT_TRUE(launch->point->may_serve);
  EXPECT_TRUE(launch->point->serves_only_at_address);
  EXPECT_FALSE(launch_of(torchrun({{"LOCAL_RANK", "1"}}))->point->may_serve);
  // The same for all ranks, another one for another run. Hosts may count restarts differently.
  EXPECT_EQ(launch_of(torchrun({{"RANK", "3"}, {"LOCAL_RANK", "1"}}))->point->ports, ports);
  EXPECT_NE(launch_of(torchrun({{"TORCHELASTIC_RUN_ID", "b"}}))->point->run, launch->point->run);
  EXPECT_NE(launch_of(torchrun({{"TORCHELASTIC_RUN_ID", "b"}}))->point->ports, ports);
  EXPECT_EQ(launch_of(torchrun({{"TORCHELASTIC_RESTART_COUNT", "1"}}))->point->run,
            launch->point->run);
  // Without a service on it the port is free.
  EXPECT_EQ(launch_of(torchrun({{"TORCHELASTIC_USE_AGENT_STORE", "False"}}))->point->ports,
            std::vector<uint16_t>{29500});
}

TEST(Launch, MeetsOnTheFirstHostOfAStep) {
  const std::optional<Launch> launch = launch_of(kSrun);
  ASSERT_TRUE(launch && launch->point);
  EXPECT_EQ(launch->point->rank, 0);
  EXPECT_EQ(launch->point->size, 8);
  EXPECT_EQ(launch->point->address, "gpu04");
  EXPECT_TRUE(launch->point->may_serve);
  EXPECT_NE(launch_of(with(kSrun, {{"SLURM_STEP_ID", "1"}}))->point->run, launch->point->run);
}

TEST(Launch, PrefersTheInnermostLauncher) {
  EXPECT_TRUE(launch_of(kMpirun)->is_of_mpi());
  EXPECT_TRUE(launch_of(with(kSrun, {{"PMIX_RANK", "0"}}))->is_of_mpi());
  EXPECT_FALSE(launch_of(with(kSrun, {{"PMIX_RANK", "0"}}), /*has_mpi=*/false)->is_of_mpi());
  EXPECT_TRUE(launch_of(with(kByHand, kMpirun))->is_of_mpi());
  EXPECT_FALSE(launch_of(with(torchrun(), kMpirun))->is_of_mpi());
  EXPECT_EQ(launch_of(with(torchrun(), kSrun))->point->address, "node7");
  EXPECT_FALSE(launch_of(kMpirun, /*has_mpi=*/false));
  std::optional<MpiKind> kind;
  launch_of(kByHand, true, &kind);
  launch_of(with(torchrun(), kMpirun), true, &kind);
  EXPECT_FALSE(kind) << "MPI is loaded for another launcher";
  launch_of(kMpirun, true, &kind);
  EXPECT_EQ(kind, MpiKind::open_mpi);
  launch_of({{"PMI_SIZE", "2"}, {"PMI_RANK", "0"}}, true, &kind);
  EXPECT_EQ(kind, MpiKind::mpich);
  // What mpirun starts in a step.
  EXPECT_FALSE(launch_of(with(kSrun, {{"OMPI_COMM_WORLD_SIZE", "1"}})));
}

TEST(Launch, SaysWhatIsWrong) {
  const auto problem_of = [](const Environment& environment) {
    return launch_of(environment)->problem;
  };
  EXPECT_NE(
      problem_of({{"RANK", "0"}, {"WORLD_SIZE", "2"}}).find("not MASTER_ADDR and MASTER_PORT"),
      std::string::npos);
  EXPECT_NE(problem_of(with(kByHand, {{"MASTER_PORT", "70000"}})).find("MASTER_PORT"),
            std::string::npos);
  EXPECT_EQ(problem_of(with(kByHand, {{"RANK", "4"}})),
            "RANK=4 is set in the environment: with WORLD_SIZE=4, a rank is a number from 0 to 3. "
            "Without "
            "these variables the process is a run of its own.");
  EXPECT_NE(problem_of(with(kSrun, {{"SLURM_STEP_NODELIST", ""}})).find("SLURM_STEP_NODELIST"),
            std::string::npos);
}

// Each process would be a run of its own otherwise, and all would write to one folder.
TEST(Launch, RefusesNumbersThatAreNone) {
  const auto problem_of = [](const Environment& environment) {
    const std::optional<Launch> launch = launch_of(environment);
    return launch ? launch->problem : "(alone)";
  };
  const std::string without = " Without these variables the process is a run of its own.";
  EXPECT_EQ(problem_of(with(kByHand, {{"WORLD_SIZE", "two"}})),
            "WORLD_SIZE=two is set in the environment: the number of ranks is a number from 1 to "
            "65536." +
                without);
  for (const char* size : {"0", "-1", "2x", " 2", "", "1e3", "99999999999", "65537"}) {
    EXPECT_NE(problem_of(with(kByHand, {{"WORLD_SIZE", size}})).find("WORLD_SIZE="),
              std::string::npos)
        << size;
  }
  for (const char* rank : {"one", "-1", "4", "0x1", "1.0", ""}) {
    EXPECT_NE(problem_of(with(kByHand, {{"RANK", rank}})).find("RANK="), std::string::npos) << rank;
  }
  for (const char* port : {"http", "0", "-5", "65536", "29500 "}) {
    EXPECT_NE(problem_of(with(kByHand, {{"MASTER_PORT", port}})).find("MASTER_PORT="),
              std::string::npos)
        << port;
  }
  EXPECT_NE(problem_of(with(kByHand, {{"LOCAL_RANK", "first"}})).find("LOCAL_RANK=first"),
            std::string::npos);
  // At most the last of its host, or of all where nothing says how many are there.
  EXPECT_EQ(problem_of(with(kByHand, {{"LOCAL_RANK", "3"}})), "");
  EXPECT_NE(problem_of(with(kByHand, {{"LOCAL_RANK", "4"}})).find("LOCAL_RANK=4"),
            std::string::npos);
  EXPECT_NE(problem_of(with(kByHand, {{"LOCAL_RANK", "2"}, {"LOCAL_WORLD_SIZE", "2"}}))
                .find("LOCAL_RANK=2"),
            std::string::npos);
  EXPECT_NE(problem_of(with(kByHand, {{"LOCAL_WORLD_SIZE", "5"}})).find("LOCAL_WORLD_SIZE=5"),
            std::string::npos);
  EXPECT_NE(problem_of(with(kSrun, {{"SLURM_PROCID", "8"}})).find("SLURM_PROCID=8"),
            std::string::npos);
  EXPECT_EQ(problem_of({{"WORLD_SIZE", "2"}}),
            "WORLD_SIZE=2 is set in the environment, but not RANK." + without);
  EXPECT_EQ(problem_of({{"RANK", "1"}}),
            "RANK=1 is set in the environment, but not WORLD_SIZE." + without);
  EXPECT_EQ(problem_of({{"WORLD_SIZE", "1"}}), "(alone)");
}

// All ranks of a run must draw the same ones, of whatever version of the compiler they are.
TEST(Launch, DrawsThePortsOfAStepFromItsName) {
  EXPECT_EQ(launch_of(kSrun)->point->ports,
            (std::vector<uint16_t>{21117, 21592, 24119, 26282, 16977, 19180, 19243, 18446, 18501,
                                   16720, 19199, 21938, 23833, 25252, 22355, 18566}));
}

TEST(Launch, TakesTheFirstOfAllNumbers) {
  EXPECT_EQ(launch_of(with(kByHand, {{"MASTER_PORT", "1"}}))->problem, "");
  EXPECT_EQ(launch_of(with(kByHand, {{"MASTER_PORT", "65535"}}))->problem, "");
  EXPECT_EQ(launch_of(with(kByHand, {{"LOCAL_WORLD_SIZE", "1"}}))->problem, "");
  for (const char* name : {"MASTER_ADDR", "MASTER_PORT"}) {
    Environment environment = kByHand;
    environment.erase(name);
    EXPECT_EQ(launch_of(environment)->problem,
              "RANK=2 of WORLD_SIZE=4 is set in the environment, but not MASTER_ADDR and "
              "MASTER_PORT, where the ranks find each other: the address of rank 0 and a port that "
              "is free there. torchrun sets them. Without these variables the process is a run of "
              "its own.")
        << name;
  }
}

// Of launchers that are not of this build's MPI.
TEST(Launch, NamesTheProcessesThatNoMpiJoins) {
  const auto found = [](const Environment& environment) {
    const std::optional<ForeignLaunch> launch =
        find_foreign_launch([&](const char* name) -> const char* {
          const auto at = environment.find(name);
          return at == environment.end() ? nullptr : at->second.c_str();
        });
    return launch ? launch->source + ", " + std::to_string(launch->processes) : "none";
  };
  EXPECT_EQ(found({}), "none");
  EXPECT_EQ(found(kMpirun), "OMPI_COMM_WORLD_RANK=1 of OMPI_COMM_WORLD_SIZE=2, 2");
  EXPECT_EQ(found(with(kMpirun, {{"OMPI_COMM_WORLD_SIZE", "1"}})), "none");
  EXPECT_EQ(found({{"OMPI_COMM_WORLD_SIZE", "2"}}), "none");
  EXPECT_EQ(found({{"PMI_RANK", "0"}, {"PMI_SIZE", "3"}}), "PMI_RANK=0 of PMI_SIZE=3, 3");
  EXPECT_EQ(found(kSrun), "SLURM_PROCID=0 of SLURM_STEP_NUM_TASKS=8, 8");
  EXPECT_EQ(found(with(kSrun, {{"PMI_SIZE", "1"}})), "none") << "mpirun of one within a step";
}

TEST(Launch, KnowsWhenAllRanksAreOnOneMachine) {
  EXPECT_FALSE(launch_of(kByHand)->point->is_on_one_machine);
  EXPECT_TRUE(launch_of(with(kByHand, {{"LOCAL_WORLD_SIZE", "4"}}))->point->is_on_one_machine);
  EXPECT_FALSE(launch_of(with(kByHand, {{"LOCAL_WORLD_SIZE", "2"}}))->point->is_on_one_machine);
  EXPECT_TRUE(launch_of(with(kByHand, {{"MASTER_ADDR", "localhost"}}))->point->is_on_one_machine);
  EXPECT_FALSE(launch_of(kSrun)->point->is_on_one_machine);
  EXPECT_TRUE(launch_of(with(kSrun, {{"SLURM_STEP_NUM_NODES", "1"}}))->point->is_on_one_machine);
}

TEST(Launch, FindsTheFirstHost) {
  EXPECT_EQ(first_host("node01"), "node01");
  EXPECT_EQ(first_host("node3,node1"), "node3");
  EXPECT_EQ(first_host("node[01-04,07],gpu3"), "node01");
  EXPECT_EQ(first_host("node[7,9]"), "node7");
  EXPECT_EQ(first_host("a[1]b-c,d"), "a1b-c");
  EXPECT_EQ(first_host("rack[2-3]node[10-12].example,other"), "rack2node10.example");
  EXPECT_EQ(first_host(""), "");
}

}  // namespace
}  // namespace troupe
