// Faults on purpose, one for each run: drills FAULT, by a launcher, with three processes or
// more. tests/processes/drills_test.py says how each must end. Any further argument is ignored: it
// marks the processes.
#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <unistd.h>

#include "parallel/group_schedule.h"
#include "parallel/layout.h"
#include "processes/started_processes.h"
#include "support/rank_program.h"

namespace troupe {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLimit{3000};
// Where a rank or the launcher is to notice at once: no test waits for this long.
constexpr milliseconds kPatient{60'000};

struct Drill {
  ProcessGroup& group;
  int rank;
  RankProgram program = RankProgram({7});

  void step() { step(program); }
  void step(const RankProgram& mine) { Rank(group, rank, mine).interpreter.run(); }
  void verify(const Program& mine) {
    LayoutOptions options;
    options.world_size = group.size();
    verify_collectives(group, rank, mine, Layout(options));
  }
};

// What the ranks do after they have run a step together.
struct Fault {
  const char* name;
  void (*body)(Drill& drill);
};

constexpr std::array kFaults = {
    Fault{"none", [](Drill& drill) { drill.step(); }},
    Fault{"delayed",
          [](Drill& drill) {
            if (drill.rank == 1) std::this_thread::sleep_for(kLimit * 3);
            drill.step();
          }},
    Fault{"stopped",
          [](Drill& drill) {
            if (drill.rank == 1) raise(SIGSTOP);
            drill.step();
          }},
    Fault{"stopped_between_steps",
          [](Drill& drill) {
            if (drill.rank == 1) raise(SIGSTOP);
            drill.group.exchange(drill.rank, 0);
          }},
    Fault{"slow_between_steps",
          [](Drill& drill) {
            if (drill.rank == 1) std::this_thread::sleep_for(kLimit * 2);
            drill.group.exchange(drill.rank, 0);
          }},
    Fault{"killed",
          [](Drill& drill) {
            if (drill.rank == 1) raise(SIGKILL);
            drill.step();
          }},
    Fault{"first_killed",
          [](Drill& drill) {
            if (drill.rank == 0) raise(SIGKILL);
            drill.step();
          }},
    Fault{"gone",
          [](Drill& drill) {
            if (drill.rank == 1) _exit(0);
            drill.step();
          }},
    Fault{"throws",
          [](Drill& drill) {
            if (drill.rank == 1) throw std::runtime_error("the disk of rank 1 is full.");
            drill.step();
          }},
    Fault{"refuses",
          [](Drill& drill) {
            if (drill.rank == 1) throw_bad_request("rank 1 has no such file.");
            drill.group.exchange(drill.rank, 0);
          }},
    Fault{"all_refuse", [](Drill& /*drill*/) { throw_bad_request("no rank has such a file."); }},
    Fault{"ends_early",
          [](Drill& drill) {
            if (drill.rank != 1) drill.step();
          }},
    Fault{"other_size",
          [](Drill& drill) { drill.step(drill.rank == 1 ? RankProgram({8}) : drill.program); }},
    Fault{"left_out",
          [](Drill& drill) {
            drill.step(drill.rank == 1 ? RankProgram({7}, /*scan=*/false) : drill.program);
          }},
    Fault{"left_out_and_verified",
          [](Drill& drill) {
            const RankProgram other({7}, /*scan=*/false);
            drill.verify(drill.rank == 1 ? other.program : drill.program.program);
            std::fprintf(stderr, "launched\n");
          }},
    Fault{"other_size_and_verified",
          [](Drill& drill) {
            const RankProgram other({8});
            drill.verify(drill.rank == 1 ? other.program : drill.program.program);
            std::fprintf(stderr, "launched\n");
          }},
    Fault{"step_ends_earlier",
          [](Drill& drill) {
            if (drill.rank == 1) drill.step();
            drill.group.exchange(drill.rank, 0);
          }},
    Fault{"message_not_sent",
          [](Drill& drill) {
            double number = 0;
            const TensorView view{.data = &number, .dtype = DType::f64, .shape = Shape({1})};
            if (drill.rank != 0) return drill.step();
            drill.group.member(0).receive({}, view, 1);
          }},
    Fault{"stopped_behind_another",  // rank 0 waits for rank 2, which waits for rank 1
          [](Drill& drill) {
            double number = 0;
            const TensorView view{.data = &number, .dtype = DType::f64, .shape = Shape({1})};
            if (drill.rank == 1) raise(SIGSTOP);
            if (drill.rank > 2) return drill.step();
            drill.group.member(drill.rank).receive({}, view, drill.rank == 0 ? 2 : 1);
          }},
    Fault{"message_of_other_size",
          [](Drill& drill) {
            std::array<double, 2> numbers{};
            const TensorView view{
                .data = numbers.data(), .dtype = DType::f64, .shape = Shape({2 - drill.rank})};
            Communicator& all = drill.group.member(drill.rank);
            if (drill.rank == 1) all.send({}, view, 0);
            if (drill.rank == 0) all.receive({}, view, 1);
            drill.step();
          }},
};

int run(Processes& processes, std::string_view name) {
  ProcessGroup& group = processes.group(name == "killed" || name == "first_killed" ||
                                                name == "gone" || name == "ends_early"
                                            ? kPatient
                                            : kLimit);
  for (const Fault& fault : kFaults) {
    if (name != fault.name) continue;
    run_ranks(group, [&](int rank) {
      Drill drill{group, rank};
      drill.verify(drill.program.program);
      drill.step();
      fault.body(drill);
    });
    processes.finish();
    return 0;
  }
  throw_bad_request("no such drill: " + std::string(name));
}

}  // namespace
}  // namespace troupe

int main(int argc, char** argv) {
  const std::unique_ptr<troupe::Processes> processes = troupe::join_started_processes();
  try {
    return troupe::run(*processes, argc > 1 ? argv[1] : "");
  } catch (const troupe::UserError& error) {
    processes->fail(error.status(), error.what());
  } catch (const std::exception& error) {
    processes->fail(troupe::ExitStatus::failed, error.what());
  }
}
