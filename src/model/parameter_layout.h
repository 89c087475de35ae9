// How the parameters of a model are spread over the ranks of a layout: which slice of each a rank
// holds, by the cuts that the parameter declares (parameter_spec.h).
//
// Pure functions and plain values; any thread. A model that the layout cannot cut is refused
// with the rule and the nearest values that keep it.
#pragma once

#include <cstdint>
#include <optional>

#include "model/context_parallel.h"
#include "model/model_config.h"
#include "model/parameter_slice.h"
#include "model/parameter_spec.h"
#include "ops/exchange/slices/slices.h"
#include "parallel/layout.h"
#include "parallel/pipeline_partition.h"
#include "program/rank_group.h"

namespace troupe {

// Refuses a layout that cannot cut this model into equal parts, or these sequences, or whose
// exchange between the ranks of cp cannot.
[[nodiscard]] std::optional<Refusal> check_layout(const ModelConfig& config, const Layout& layout,
                                                  int64_t sequence,
                                                  ContextExchange exchange = ContextExchange::p2p);

// Refuses a layout that cuts the blocks in which moments in f8e4m3 share a scale
// (ops/optimizer/adamw/moment_blocks.h); `moments`: the setting that asks for these. A layout that
// check_layout() passes.
[[nodiscard]] std::optional<Refusal> check_moment_blocks(const ModelConfig& config,
                                                         const Layout& layout, Setting moments);

// The slice of a parameter that `rank` holds if its stage holds the parameter at all.
ParameterSlice slice_of(const ParameterSpec& parameter, const Layout& layout, int32_t rank);

// How the matrices of a parameter, each expert's by itself, are cut over ranks, as `rank` sees it;
// one rank where they are whole.
struct MatrixCut {
  RankGroup group = RankGroup::tp;
  SliceCut slices;
};
MatrixCut matrix_cut_of(const ParameterSpec& parameter, const Layout& layout, int32_t rank);

// Whether the stages of pipeline rank `place` hold the parameter.
bool holds(const PipelinePartition& partition, int32_t place, const ParameterSpec& parameter);

}  // namespace troupe
