// Dispatchers: how the tokens of an MoE block reach the ranks that hold their experts, and how the
// experts' results come back. They differ in what is sent; outputs and gradients are the same bits
// with all of them but `hierarchical` (docs/layouts.md).
//
// The ranks of one RankGroup::etp_ep hold one replica of all experts: EP divides the experts, ETP
// divides each of them. Every rank has tokens of its own. A dispatcher lays out rows of tokens, of
// all the group's ranks, for this rank's experts: by source rank, and for each source in the order
// of its tokens. What the experts make of them are partial rows: a token's sum over its experts of
// this rank, ascending, rounded to the type of the activations. A token's result is the sum of its
// partial rows in ascending order of ranks, in the accumulation dtype, rounded once. `hierarchical`
// makes such sums on each node, and then sums and rounds those.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "model/model_config.h"
#include "model/model_part.h"
#include "program/builder.h"

namespace troupe {

enum class TokenDispatcher : uint8_t {
  allgather,  // every rank gets every token
  alltoall,   // a rank gets the tokens that chose its experts, each once
  flex,       // the same tokens, which the source writes into its own section at the receiver
  // A node gets the tokens that chose its experts, each once; there they go on to the ranks as with
  // alltoall. What a node is, LayoutOptions::dispatch_node_ranks says.
  hierarchical,
};
std::string_view name_of(TokenDispatcher dispatcher);

// What of an MoE block is rounded to the 8 bits that a message between ranks then carries
// (ops/exchange/coded_rows), in every layout, also where nothing is sent.
struct MessageRounding {
  bool dispatched = false;         // tokens on their way to the experts
  bool combine_gradients = false;  // gradients of the experts' sums, which take the same way

  bool any() const { return dispatched || combine_gradients; }
  bool operator==(const MessageRounding&) const = default;
};

// What this rank's experts work on. M: a bound of the rows, fixed by the layout.
struct DispatchedTokens {
  ValueId rows;           // [M, hidden]
  ValueId probabilities;  // [M, k]
  // i32 [M, k]: this rank's expert of each slot, or -1: another rank's, none, or no live row. Rows
  // and probabilities without an expert are unspecified.
  ValueId experts;
};

class Dispatcher {
 public:
  virtual ~Dispatcher() = default;

  // `rows` [T, hidden]: this rank's tokens; `probabilities`, `experts` [T, k]: of the experts of
  // all ranks. Called once.
  virtual DispatchedTokens dispatch(ValueId rows, ValueId probabilities, ValueId experts) = 0;
  // `partial` [M, hidden]: the rows that the experts made. Returns [T, hidden].
  virtual ValueId collect(ValueId partial) = 0;
};

// Ranks among which the tokens of an MoE block are exchanged.
int32_t dispatch_ranks(const ModelPart& part);

// To how many ranks a token goes that does not go to all, where loads are even (token_copies.h).
double expected_copies(const ModelConfig& config, int32_t ep, int32_t etp);

// What a dispatcher has to carry.
struct DispatchLoad {
  int64_t experts = 0;  // of all ranks, as many on each: what the choices count
  int64_t tokens = 0;   // of each rank that have experts
  int64_t most_rows =
      0;  // slots of the tokens of all ranks that name an expert of this one at most
};

// Emits nothing at all where the group is one rank. Borrows the builder.
std::unique_ptr<Dispatcher> make_dispatcher(Builder& builder, const ModelConfig& config,
                                            const ModelPart& part, TokenDispatcher kind,
                                            const DispatchLoad& load);

}  // namespace troupe
