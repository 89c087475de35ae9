// What goes into the forward pass of one stage for one micro-batch, and what comes out of it: plain
// values that the blocks of a layer (layer_block.h) share with the decoder.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "model/context_parallel.h"
#include "model/dispatcher.h"
#include "model/model_config.h"
#include "ops/losses/router_loss/router_loss.h"
#include "program/value.h"

namespace troupe {

// The token blocks of one micro-batch of `batch` sequences: the rows that this rank and those of
// its tp group have of each.
struct BatchValues {
  int32_t batch = 0;
  int32_t sequence = 0;        // rows of each sequence
  SequenceChunks chunks = {};  // which ones
  ValueId tokens;              // i32 [batch * sequence]; invalid: nothing is embedded
  ValueId labels;              // i32 [batch * sequence]; invalid: no loss is built
  ValueId mask;  // accumulation dtype [batch * sequence]: weight of each token in the loss
  // For multi-token prediction (training only), by depth - 1: the same of the token that is `depth`
  // tokens further. Where there is none in the sequence, or with `shifts_in_documents` in the
  // document, ids are 0 and the mask is 0.
  struct Shifted {
    ValueId tokens;  // with the layers of multi-token prediction
    ValueId labels;  // with the loss, as is the mask
    ValueId mask;
    ValidTokens valid = {};  // as below; what does not exist is none
  };
  std::vector<Shifted> shifted = {};
  bool shifts_in_documents = false;
  // Where attention stays within documents: i32, the position in its sequence at which the document
  // of each row begins. Of the rows whose queries attend here (queries_of_attention).
  ValueId starts;
  SequenceChunks starts_chunks = {};
  // The same of the rows that gated delta nets see here (rows_of_delta_nets), counted from the
  // beginning of the row's chunk of the sequence: negative where the document begins before it.
  // `starts` itself where these are the same numbers.
  ValueId delta_starts;
  SequenceChunks delta_chunks = {};
  // Rows of each sequence that `own` has.
  int32_t rows_of(const SequenceChunks& own) const { return sequence * chunks.ranks / own.ranks; }
  // Where padding is in no loss and count of the routers (training only): the tokens that are none.
  // The mask has the rows that this rank's routers see, which begin at row `first_valid`.
  ValidTokens valid = {};
  int64_t first_valid = 0;

  // Of a depth, 0 for the prediction of the next token.
  ValueId mask_of(size_t depth) const { return depth == 0 ? mask : shifted[depth - 1].mask; }
  const ValidTokens& valid_of(size_t depth) const {
    return depth == 0 ? valid : shifted[depth - 1].valid;
  }
};

// What is minimised beside the cross-entropy, each a mean over micro-batches.
enum class AuxiliaryLossKind : uint8_t {
  load_balancing,
  seq_load_balancing,
  global_load_balancing,
  z,
  indexer
};
// The name in metrics: "load_balancing_loss", "z_loss", ...
std::string_view name_of(AuxiliaryLossKind kind);
// Its coefficient in a layer of this model; 0 when it is not used there. Layers that share a router
// share the weight of its load-balancing losses, not that of other losses, as in Megatron.
double coefficient_of(AuxiliaryLossKind kind, const ModelConfig& config, int32_t layer);
inline constexpr AuxiliaryLossKind kAuxiliaryLossKinds[] = {
    AuxiliaryLossKind::load_balancing, AuxiliaryLossKind::seq_load_balancing,
    AuxiliaryLossKind::global_load_balancing, AuxiliaryLossKind::z, AuxiliaryLossKind::indexer};

// What logits and loss are made of, in chunks of consecutive tokens whose logits need not be there
// at the same time. Without chunks it is one, of all tokens.
struct Head {
  struct Chunk {
    ValueId rows;    // [tokens, hidden], of all ranks of tp
    ValueId labels;  // invalid: no loss is built
    ValueId mask;
  };
  ValueId weight;
  ValueId loss_tokens;  // what the sum of the losses is divided by; invalid: there is no loss
  std::vector<Chunk> chunks;
  std::vector<ValueId> losses = {};  // what build_loss() made of chunks, put here by its callers
};

struct ForwardResult {
  // Of a stage without loss: the residual stream [tokens, hidden] for the next stage, nothing left
  // to be added to it. Of a stage without embedding and layers it is the input itself. After layers
  // of multi-token prediction it is the normed states of the depths so far, one after the other.
  ValueId output;
  // Of the stage with the loss: what build_loss() goes on from. The first is that of the next
  // token, the others, in training, those of multi-token prediction, by depth.
  std::vector<Head> heads;

  // What else is minimised in training, already multiplied by its coefficient; one entry per layer.
  struct AuxiliaryLoss {
    AuxiliaryLossKind kind;
    int32_t layer;
    ValueId value;  // [1]
  };
  std::vector<AuxiliaryLoss> auxiliary_losses;

  // What the router of one layer did, in that layer.
  struct RouterReport {
    int32_t layer;
    ValueId selected;  // i32 [tokens, top-k]: the chosen experts, before any were dropped
    ValueId counts;    // i32 [experts]: rows that each expert received, without padding
    ValueId slots;     // i32: the same by slot, where experts have copies; otherwise invalid
    ValueId entropy;   // [1]: mean entropy of softmax(logits), nats; a rank's part where valid
    ValueId valid;     // BatchValues::valid.count, or invalid
    // Where experts may have too little room: i32 [1], whether they had, and the rows of the ranks'
    // experts where they were most, of which `even` would be each rank's with an even load.
    ValueId over;
    ValueId fullest;
    double even = 0;
  };
  std::vector<RouterReport> routers;
};

// How a forward pass is to be built.
struct ForwardOptions {
  int32_t chunk = 0;   // which of the rank's stages
  ValueId input = {};  // the residual stream from the stage before; unless the stage embeds tokens
  bool training = false;    // adds auxiliary losses, dropout, jitter
  int32_t micro_batch = 0;  // its number in the step, over all ranks: what is drawn or counted does
                            // not depend on who runs it
  // How tokens reach experts of other ranks.
  TokenDispatcher dispatcher = TokenDispatcher::allgather;
  MessageRounding messages = {};
  bool stores_activation_inputs = false;  // in training (ops/elementwise/activation)
  // Where the experts of a rank may have too little room (RunLayout::expert_room): tokens reach
  // them in rounds for which it always suffices.
  bool expert_rounds = false;
  // How attention reaches the rows of each sequence that other ranks have.
  ContextExchange context_exchange = ContextExchange::p2p;
  // What random numbers of the pass are keyed by, with the place that draws them. `step` is an
  // input i64 [1]; it is needed by models whose draws_random_numbers() is true, in training.
  uint64_t seed = 0;
  ValueId step = {};
  // What the sum of the tokens' losses is divided by, [1]: the count of all tokens that share the
  // loss, by depth. Empty: those of the micro-batch that the ranks of cp have.
  std::vector<ValueId> loss_tokens = {};
  // The most tokens of a chunk of the head; 0: all of them are one.
  int32_t loss_chunk_tokens = 0;
  // Router replay: by layer, i32 [tokens, top-k] the experts to be used instead of choosing. Empty,
  // or invalid where a layer has no router.
  std::vector<ValueId> selected = {};
  // By layer: the experts' loads summed over the micro-batches of the step so far, for the global
  // load-balancing loss. Each pass leaves its sums for the next.
  std::vector<ValueId>* running_counts = nullptr;
};

}  // namespace troupe
