// A small program with collectives of all ranks, and one rank that runs it: for what process groups
// do when ranks fail each other.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/process_group.h"
#include "ops/exchange/all_reduce/all_reduce.h"
#include "ops/exchange/prefix_sum/prefix_sum.h"
#include "program/builder.h"
#include "program/verify.h"
#include "runtime/cpu/cpu_interpreter.h"

namespace troupe {

inline Communicators of_all_ranks(ProcessGroup& group, int rank) {
  Communicators communicators;
  communicators.members.fill(&group.member(rank));
  return communicators;
}

// A program of one rank: metrics (f64 [sizes[t]] each) that are reduced, and i32 counts that are
// summed up to the rank.
struct RankProgram {
  explicit RankProgram(const std::vector<int64_t>& sizes, bool scan = true)
      : table(std::make_shared<const StateTable>()), program(table) {
    Builder builder(program);
    builder.place.layer = 2;
    builder.place.micro_batch = 1;
    for (const int64_t size : sizes) {
      metrics.push_back(builder.metric("metric", DType::f64, {size}));
    }
    counts = builder.input("counts", DType::i32, {5});
    previous = builder.input("previous", DType::i32, {5});
    if (scan) {
      const PrefixSumResult first = prefix_sum(builder, counts, {}, {}, "first");
      const PrefixSumResult second = prefix_sum(builder, counts, previous, {}, "second");
      sums = {first.running, first.total, second.running, second.total};
      for (const ValueId id : sums) program.add_result(id);
    }
    all_reduce(builder, metrics, {});
    verify_program(program);
  }

  std::shared_ptr<const StateTable> table;
  Program program;
  std::vector<ValueId> metrics;
  ValueId counts;
  ValueId previous;
  std::vector<ValueId> sums;
};

// One rank's interpreter.
struct Rank {
  Rank(ProcessGroup& group, int rank, const RankProgram& program, int threads = 1)
      : storage(program.table),
        pool(threads),
        interpreter(program.program, plan_memory(program.program, threads), storage, pool,
                    of_all_ranks(group, rank)) {}
  StateStorage storage;
  ThreadPool pool;
  CpuInterpreter interpreter;
};

}  // namespace troupe
