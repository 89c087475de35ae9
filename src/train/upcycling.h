// Upcycling: the weights of a model with experts from those of a dense one. Every expert starts as
// a copy of its layer's dense feed-forward network, or, with a granularity of g, as one of g equal
// parts of its inner dimension; the router starts at random. All other weights are the dense
// model's. After "Upcycling Large Language Models into Mixture of Experts" (He et al., 2024) and
// Megatron's moe/upcycling_utils.py.
//
// Expert e has part e % g of copy e / g, and the g experts of a copy have the same row of the
// router. So a token that chooses k experts chooses k / g whole copies, and the experts' outputs,
// times what makes up for the split and for router weights that do not sum to 1, are the dense
// network's output. Where the chosen experts' weights have the same sum for every token
// (starts_as_dense), the new model computes what the dense one does; elsewhere that holds for a
// router that prefers no expert. The factor is applied where the network is linear, not inside its
// activation as in Megatron, whose models of granularity 2 and more start elsewhere.
//
// Errors are UserErrors that name the flag or the tensor. One thread.
#pragma once

#include <cstdint>
#include <string>

#include "base/work_report.h"
#include "model/model_state.h"
#include "runtime/state_storage.h"
#include "train/loaded_model.h"

namespace troupe {

// The dense model of which a granularity makes one with this configuration. A bad request when
// there is none: no experts, a shared expert, or numbers that the granularity does not divide.
ModelConfig dense_model_of(const ModelConfig& config, int32_t granularity);

// Do the chosen experts' weights have the same sum for every token?
bool starts_as_dense(const ModelConfig& config);

// Fills the host's storage with the rank's slices of the upcycled model: values and master weights.
// Reads of the dense model's slices what the rank holds, and of each layer with experts the whole
// feed-forward network, one layer at a time. `seed` is that of the router. `report` is in layers
// with experts, after all other weights. A bad request when `dense` is not dense, or has other
// tensors than dense_model_of().
void upcycle(const SavedModel& dense, int32_t granularity, uint64_t seed, const ModelState& state,
             const StateStorage& storage, const WorkReport& report = {});

}  // namespace troupe
