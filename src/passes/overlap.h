// Overlap: issues independent operations after the exchanges by which tokens reach the experts of
// other ranks and come back, so that there is something to compute while one is under way, and
// leaves multiprocessors to exchanges.
//
// Contract: the functions of orders take operations in an order that is right and return another
// order of the same ones, for Program::select_ops. They never add, remove or change an operation,
// so every value keeps its bits; verify_order() holds the whole program to that. They look at
// nothing but where operations stand (Place), what they read and write, and their kinds' costs,
// which the ranks of a dispatch group share: so these ranks keep the same order of collectives
// among each other, and verify_collectives() confirms it. Messages of a pipeline keep their order
// on each rank.
//
// An exchange is a collective of the MoE block over the dispatch group, forward, backward, or
// recomputed. Exchanges that follow each other directly are one block.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "program/program.h"

namespace troupe {

struct OverlapOptions {
  // Weight gradients are issued after the next exchange of their backward pass.
  bool delay_weight_gradients = false;
  // The shared expert is issued after dispatch and combination, in both directions.
  bool shared_expert = false;
  // Multiprocessors of a GPU for exchanges, which products beside them leave
  // (leave_multiprocessors); 0: each takes all.
  int32_t multiprocessors = 0;

  bool any() const { return delay_weight_gradients || shared_expert; }
};

// See above.
bool is_expert_exchange(const Op& op);

// Orders one pass (a stage's forward or backward of one micro-batch) by the options.
std::vector<int32_t> overlap_within_pass(const Program& program, std::span<const int32_t> order,
                                         const OverlapOptions& options);

// Merges a forward and a backward that do not depend on each other, the backward first, changing
// over after every block of exchanges. Each keeps its own order. Where one has fewer blocks (the
// forward, when exchanges are recomputed) it is also cut between, so that all of the other's are
// covered.
std::vector<int32_t> merge_at_exchanges(const Program& program, std::span<const int32_t> forward,
                                        std::span<const int32_t> backward);

// What there is to compute while the exchange at `index` is under way: the operations of the
// compute queue after it, up to the first that needs its results, directly or through further
// collectives.
std::vector<int32_t> operations_beside(const Program& program, int32_t index);

// Expert exchanges take `count` multiprocessors, and products beside them leave as many: otherwise
// an exchange would wait until a persistent product has ended. Returns the order as it is.
std::vector<int32_t> leave_multiprocessors(Program& program, int32_t count);

// Aborts unless `order` names operations of the program, each at most once, such that each reads
// what it reads in the program as it is: results of the same operations, state and metrics after
// the same changes, changed in the same order; and messages keep their order. What is left out
// must not be read.
void verify_order(const Program& program, std::span<const int32_t> order);

}  // namespace troupe
