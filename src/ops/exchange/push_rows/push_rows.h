// Pushed rows: this rank's tokens, written by itself into places of its own on the ranks of a group
// that a dispatch plan names. Where a row goes follows from this rank's choices alone, so nothing
// has to be agreed on before, and the receiver always has room. T tokens on every rank, n ranks,
// any number of tensors x_j at once: what goes along with a row is under way together with it.
//
// Kinds
//   push_rows (slots i32 [T, n], counts i32 [n], x_j [T, w_j] ...) -> received i32 [n],
//                                                                     y_j [n T, w_j] ...
//       received[s] = how many rows rank s has pushed here
//       y_j[s T + i] = row i of those of rank s, which is x_j of its token t with
//       slots_s[t, here] = i, for i < received[s]. All other rows are unspecified. Any dtype.
//   push_rows_back (slots, counts, received, y_j [n T, w_j] ...) -> x_j [T, w_j] ...
//       x_j[t] = sum over ranks r with slots[t, r] >= 0, in ascending order, of the row of r's y_j
//       that lies where this rank would have pushed x_j[t]; in the accumulation dtype, rounded
//       once. Rows that were not received are not read. A token that went nowhere gets zeros.
//       Floating-point.
// counts and slots are those of dispatch_plan. The kinds are each other's derivative.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "ops/routing/dispatch_plan/dispatch_plan.h"
#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct PushRowsAttributes {
  RankGroup group = RankGroup::etp_ep;
  // How many rows come to a rank and leave it on average, which costs count; 0: all n T.
  int64_t expected_received = 0;
};

struct PushedRows {
  ValueId received;
  std::vector<ValueId> rows;  // by tensor
};

// Both are emitted on the group's queue.
PushedRows push_rows(Builder& builder, std::span<const ValueId> tensors, const DispatchPlan& plan,
                     const PushRowsAttributes& attributes, const std::string& name);
ValueId push_rows_back(Builder& builder, ValueId rows, const DispatchPlan& plan, ValueId received,
                       const PushRowsAttributes& attributes, const std::string& name);

extern const OpSpec kPushRows;
extern const OpSpec kPushRowsBack;

}  // namespace troupe
