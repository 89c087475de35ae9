// How a model is cut into pipeline stages, and where the stages are placed.
//
// Stage j follows stage j - 1 in the model. A rank of the pipeline holds one stage or several, its
// chunks (virtual stages). They are placed in a loop (stage j is chunk j / pp of rank j mod pp), or
// in a V (two chunks: down the ranks and back up), which zb-v needs.
//
// Pure functions; any thread. A partition that cannot be is refused with the rule and, in a text,
// the place.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/refusal.h"

namespace troupe {

enum class StagePlacement : uint8_t { loop, v };

struct StagePlace {
  int32_t rank = 0;  // in the pipeline
  int32_t chunk = 0;
  bool operator==(const StagePlace&) const = default;
};

StagePlace place_of_stage(StagePlacement placement, int32_t ranks, int32_t stage);
int32_t stage_at(StagePlacement placement, int32_t ranks, StagePlace place);

struct PipelineStage {
  int32_t first_layer = 0;  // of the decoder
  int32_t layers = 0;
  int32_t first_mtp_layer = 0;  // of multi-token prediction: the stages before have as many
  int32_t mtp_layers = 0;
  bool embedding = false;
  bool loss = false;  // head and loss
  // With the final norm: before the first MTP layer, or the head.
  bool ends_decoder() const { return first_mtp_layer == 0 && (mtp_layers > 0 || loss); }
  bool operator==(const PipelineStage&) const = default;
};

struct PipelinePartition {
  int32_t ranks = 1;
  int32_t chunks = 1;  // stages of each rank
  StagePlacement placement = StagePlacement::loop;
  std::vector<PipelineStage> stages;

  StagePlace place_of(int32_t stage) const { return place_of_stage(placement, ranks, stage); }
  // The rank of the pipeline whose stages hold this decoder layer, or, numbered after those, MTP
  // layer.
  int32_t rank_of_layer(int32_t layer) const;
  // How many streams of [tokens, hidden] a stage gets from the one before: after MTP layers there
  // is one for each of them, too.
  int32_t streams_into(int32_t stage) const {
    return 1 + stages[static_cast<size_t>(stage)].first_mtp_layer;
  }
  int32_t rank_of_embedding() const;
  int32_t rank_of_final_norm() const;
  int32_t rank_of_loss() const;
  // Those with MTP layers. Ascending.
  std::vector<int32_t> mtp_ranks() const;
  // The ranks of the pipeline that hold the word embedding or a copy of it: with the embedding,
  // with MTP layers, and with the head when it shares the embedding's weights. Ascending.
  std::vector<int32_t> embedding_ranks(bool tied) const;
};

// ranks x chunks stages of equally many layers. Refuses `layers` that cannot be cut so.
OrRefusal<PipelinePartition> even_partition(int32_t layers, int32_t ranks, int32_t chunks,
                                            StagePlacement placement);

// What makes stages uneven without a text that spells them out: Megatron's
// --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers (layers of the first
// and the last rank; 0: as many as each other rank), and
// --account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split (what counts
// as a layer).
struct UnevenStages {
  int32_t first_layers = 0;
  int32_t last_layers = 0;
  bool count_embedding = false;
  bool count_loss = false;

  bool any() const { return first_layers > 0 || last_layers > 0 || count_embedding || count_loss; }
};

// ranks x chunks stages, those that `uneven` does not name equally large. A rank's layers are
// shared equally by its chunks. Refuses layers that cannot be cut so, and layers of a rank together
// with parts that count as layers.
OrRefusal<PipelinePartition> uneven_partition(int32_t layers, int32_t ranks, int32_t chunks,
                                              const UnevenStages& uneven, StagePlacement placement);

// Stages as a text spells them out (Megatron's --pipeline-model-parallel-layout): E embedding, t
// decoder layer, m MTP layer, L loss, | between stages, x*n a symbol n times, (...)*n a group n
// times; commas and blanks mean nothing, and stages may be empty. E stands once, in the first
// stage; L once, in the last; each m after all t; there are `layers` t and `mtp_layers` m; the
// number of stages is a multiple of `ranks`.
OrRefusal<PipelinePartition> parse_partition(std::string_view text, int32_t layers,
                                             int32_t mtp_layers, int32_t ranks,
                                             StagePlacement placement);

// The partition written as parse_partition reads it, repetitions of a symbol shortened:
// "Et*3|t*4|t*4|t*3L".
std::string to_text(const PipelinePartition& partition);

}  // namespace troupe
