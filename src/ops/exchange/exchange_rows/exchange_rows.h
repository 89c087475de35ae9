// Exchange of rows: sends the rows of this rank's tokens to the ranks of a group that a dispatch
// plan names, each row once to each of them, and brings rows back. T tokens on every rank, n ranks.
//
// Kinds
//   exchange_counts (counts i32 [n]) -> offsets i32 [n + 1]
//       offsets[s] is the number of rows that the ranks before s send to this one; the last element
//       counts all.
//   send_rows (x [T, w], slots i32 [T, n], counts, offsets) -> y [M, w], ragged with the last
//   offset
//       y[offsets[s] + i] = row i of those that rank s sends here, which is x_s[t] for its token t
//       with slots_s[t, here] = i. So rows lie by source, and those of a source by token. Any
//       dtype. Where x is ragged, only live rows may have a slot.
//   return_rows (y [M, w], slots, counts, offsets) -> x [T, w]
//       x[t] = sum over ranks r with slots[t, r] >= 0, in ascending order, of the row of y_r that
//       lies where x[t] would have been sent; in the accumulation dtype, rounded once. A token that
//       went nowhere gets zeros. Floating-point.
// counts and slots are those of dispatch_plan. send_rows and return_rows are each other's
// derivative.
#pragma once

#include <cstdint>
#include <string>

#include "ops/routing/dispatch_plan/dispatch_plan.h"
#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct ExchangeRowsAttributes {
  RankGroup group = RankGroup::etp_ep;
  int32_t copies = 1;  // a token goes to as many ranks at most: for what needs room
  // How many rows come to a rank and leave it on average, which costs count; 0: T times the copies.
  int64_t expected_received = 0;
  // M: how many rows come to a rank at most, which the planner of the exchange knows; n T where
  // it is 0.
  int64_t most_received = 0;
};

// What rows are exchanged by.
struct RowExchange {
  DispatchPlan plan;
  ValueId offsets;
  ExchangeRowsAttributes attributes;
};

// Emits exchange_counts. All three run on the group's queue.
RowExchange exchange_counts(Builder& builder, const DispatchPlan& plan,
                            const ExchangeRowsAttributes& attributes, const std::string& name);
ValueId send_rows(Builder& builder, ValueId x, const RowExchange& exchange,
                  const std::string& name);
// `y`: what is at and beyond its live rows is not read, whether or not it is marked as ragged.
ValueId return_rows(Builder& builder, ValueId y, const RowExchange& exchange,
                    const std::string& name);

extern const OpSpec kExchangeCounts;
extern const OpSpec kSendRows;
extern const OpSpec kReturnRows;

}  // namespace troupe
