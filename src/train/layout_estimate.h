// About how fast a layout is and what it takes, in microseconds of work: so that a search plans
// only those that may win.
//
// What a layer and the rest of a micro-batch cost is found once for each way in which a layer can
// be spread and computed, from the programs of two short models on one stage of a pipeline. The
// pipeline is then a formula: its fullest stage works through all micro-batches, and the others
// fill and empty it once. Bytes of state are exact, those of activations are a layer's for each
// micro-batch in flight.
//
// LayoutEstimator: its const functions from any thread. What the model or the flags do not allow is
// a UserError.
#pragma once

#include <cstdint>
#include <memory>
#include <tuple>
#include <vector>

#include "model/model.h"
#include "plan/gpu_cluster.h"
#include "train/layout_choice.h"

namespace troupe {

// Of one micro-batch on one rank that has all layers, and of what is done once in a step.
struct UnitCosts {
  double layer = 0;        // seconds of a layer, of the kind that most are
  double dense_layer = 0;  // of the first layers of some models, which have no experts
  double mtp_layer = 0;    // of a layer of multi-token prediction, without its head
  double head = 0;         // of embedding, head and loss
  double update_of_layer = 0;
  double update_of_rest = 0;
  double layer_bytes = 0;  // kept from forward to backward
  double rest_bytes = 0;   // what is live beside that
};

class LayoutEstimator {
 public:
  LayoutEstimator(const LayoutSpace& space, const ModelConfig& config, const GpuCluster& cluster);

  // All that the costs of a layer depend on.
  using Unit = std::tuple<int32_t, int32_t, int32_t, int32_t, int32_t, int32_t, RecomputeChoice,
                          TokenDispatcher>;
  Unit unit_of(const LayoutChoice& choice) const;
  // Plans four short steps, with multi-token prediction five.
  UnitCosts measure(const LayoutChoice& choice) const;

  // Of a rank's weights and gradients, and what it keeps for the optimizer, at the least: without
  // building anything.
  double least_state_bytes(const LayoutChoice& choice) const;

  // Seconds of a step; cuts the pipeline into stages that take about equally long.
  double seconds(const UnitCosts& costs, LayoutChoice& choice) const;
  // Of the ranks that may be the fullest.
  struct Bytes {
    uint64_t state = 0;
    uint64_t all = 0;
  };
  Bytes bytes(const UnitCosts& costs, const LayoutChoice& choice) const;

 private:
  // What the stages of a pipeline are cut between.
  struct Part {
    double seconds = 0;
    int32_t layers = 0;  // of the decoder
    int32_t mtp_layers = 0;
  };
  std::vector<Part> parts_of(const UnitCosts& costs) const;

  const LayoutSpace& space_;
  const ModelConfig& config_;
  GpuCluster cluster_;  // with the same load in all layers, as those of short models stand for all
  std::shared_ptr<const Model> model_;
  double expert_parameters_ = 0;
  double other_parameters_ = 0;
  int32_t dense_layers_ = 0;  // at the beginning
  int32_t period_ = 1;        // of the kinds of layers after these
};

}  // namespace troupe
