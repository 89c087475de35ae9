// What the variables of launchers say of this process.
#include "parallel/launch.h"

#include <gtest/gtest.h>
#include <map>
#include <set>
#include <string>

namespace troupe {
namespace {

using Environment = std::map<std::string, std::string>;

std::optional<Launch> launch_of(const Environment& environment, bool has_mpi = true) {
  return find_launch(
      [&](const char* name) -> const char* {
        const auto found = environment.find(name);
        return found == environment.end() ? nullptr : found->second.c_str();
      },
      has_mpi);
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

TEST(Launch, MeetsAtThePortThatWasGivenByHand) {
  const std::optional<Launch> launch = launch_of(kByHand);
  ASSERT_TRUE(launch && launch->place);
  EXPECT_EQ(launch->problem, "");
  EXPECT_EQ(launch->place->rank, 2);
  EXPECT_EQ(launch->place->size, 4);
  EXPECT_EQ(launch->place->address, "node7");
  EXPECT_EQ(launch->place->ports, std::vector<uint16_t>{29500});
  EXPECT_FALSE(launch->place->may_host);  // rank 0 is the host, wherever it is
  EXPECT_TRUE(launch_of(with(kByHand, {{"RANK", "0"}}))->place->may_host);
}

TEST(Launch, LeavesTorchrunItsPort) {
  const std::optional<Launch> launch = launch_of(torchrun());
  ASSERT_TRUE(launch && launch->place);
  const std::vector<uint16_t>& ports = launch->place->ports;
  EXPECT_EQ(std::set<uint16_t>(ports.begin(), ports.end()).size(), 16U);
  for (const uint16_t port : ports) {
    EXPECT_GE(port, 15'000);
    EXPECT_LT(port, 29'000);
  }
  // The first rank of the machine that has the address.
  EXPECT_TRUE(launch->place->may_host);
  EXPECT_TRUE(launch->place->hosts_only_at_address);
  EXPECT_FALSE(launch_of(torchrun({{"LOCAL_RANK", "1"}}))->place->may_host);
  // The same for all ranks, another one for another run. Hosts may count restarts differently.
  EXPECT_EQ(launch_of(torchrun({{"RANK", "3"}, {"LOCAL_RANK", "1"}}))->place->ports, ports);
  EXPECT_NE(launch_of(torchrun({{"TORCHELASTIC_RUN_ID", "b"}}))->place->run, launch->place->run);
  EXPECT_EQ(launch_of(torchrun({{"TORCHELASTIC_RESTART_COUNT", "1"}}))->place->run,
            launch->place->run);
  // Without a service on it the port is free.
  EXPECT_EQ(launch_of(torchrun({{"TORCHELASTIC_USE_AGENT_STORE", "False"}}))->place->ports,
            std::vector<uint16_t>{29500});
}

TEST(Launch, MeetsOnTheFirstHostOfAStep) {
  const std::optional<Launch> launch = launch_of(kSrun);
  ASSERT_TRUE(launch && launch->place);
  EXPECT_EQ(launch->place->rank, 0);
  EXPECT_EQ(launch->place->size, 8);
  EXPECT_EQ(launch->place->address, "gpu04");
  EXPECT_TRUE(launch->place->may_host);
  EXPECT_NE(launch_of(with(kSrun, {{"SLURM_STEP_ID", "1"}}))->place->run, launch->place->run);
}

TEST(Launch, PrefersTheInnermostLauncher) {
  EXPECT_TRUE(launch_of(kMpirun)->is_of_mpi());
  EXPECT_TRUE(launch_of(with(kSrun, {{"PMIX_RANK", "0"}}))->is_of_mpi());
  EXPECT_FALSE(launch_of(with(kSrun, {{"PMIX_RANK", "0"}}), /*has_mpi=*/false)->is_of_mpi());
  EXPECT_TRUE(launch_of(with(kByHand, kMpirun))->is_of_mpi());
  EXPECT_FALSE(launch_of(with(torchrun(), kMpirun))->is_of_mpi());
  EXPECT_EQ(launch_of(with(torchrun(), kSrun))->place->address, "node7");
  EXPECT_FALSE(launch_of(kMpirun, /*has_mpi=*/false));
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
            "RANK=4 of WORLD_SIZE=4 is set in the environment: the ranks of so many are 0 to 3.");
  EXPECT_NE(problem_of(with(kSrun, {{"SLURM_STEP_NODELIST", ""}})).find("SLURM_STEP_NODELIST"),
            std::string::npos);
}

TEST(Launch, FindsTheFirstHost) {
  EXPECT_EQ(first_host("node01"), "node01");
  EXPECT_EQ(first_host("node3,node1"), "node3");
  EXPECT_EQ(first_host("node[01-04,07],gpu3"), "node01");
  EXPECT_EQ(first_host("node[7,9]"), "node7");
  EXPECT_EQ(first_host("rack[2-3]node[10-12].example,other"), "rack2node10.example");
  EXPECT_EQ(first_host(""), "");
}

}  // namespace
}  // namespace troupe
