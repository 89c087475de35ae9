// Precision: products of a step whose operands are in 8 bits (docs/low_precision.md).
//
// A pass (passes/pass_pipeline.h) that rewrites, and the only one that changes numbers. It runs on
// the finished step, forward and backward, before recompute: what is computed again is quantised
// again, to the same bits.
//
// Contract: each product that has a quantised form (OpSpec::quantized) and lies in a layer of those
// that the recipe takes is replaced by it. Its operands are quantised from the values that it read:
//   activations, gradients  once for each direction that has scales of its own, by all that read
//                           them; right after they are made, or by the operation that makes them
//                           (ops/precision/quantize_as_made.h), so that only codes wait
//   weights                 once, at the beginning of the step, where they are state. Gathered ones
//                           (sharded parameters) once in each pass through the layer, so that their
//                           codes are not kept between. Those that are kept as master weights
//                           alone by these (passes/weight_codes.h)
// Gradients pass quantisation as if it were not there: the derivatives are those of the products
// before, taken at the quantised operands.
//
// Where a scale belongs to a whole tensor and ranks have parts of it, its largest element is that
// of all of them: of tp_cp, to which one micro-batch belongs; of experts that are spread over ep,
// etp. With delayed scaling it comes from histories (passes/amax_histories.h), which the state has
// for parameters (StateTensor::amax_history).
#pragma once

#include <cstdint>
#include <vector>

#include "model/code_metric.h"
#include "model/dispatcher.h"
#include "model/model_state.h"
#include "ops/precision/recipe.h"
#include "passes/amax_histories.h"
#include "passes/work_segment.h"
#include "program/module.h"
#include "program/program.h"

namespace troupe {

struct PrecisionOptions {
  Fp8Recipe recipe = Fp8Recipe::none;
  Fp8Format format = Fp8Format::e4m3;
  MessageRounding messages = {};  // with any recipe, or none
  KeptProducts kept = {};
  bool weight_gradients = true;           // else their products keep their precision
  DelayedScaling delayed = {};            // of that recipe
  bool stores_activation_inputs = false;  // of feed-forward blocks, as codes; with any recipe
  bool counts_codes = false;              // measures TrainingStep::code_metrics; not of 4 bits

  bool any() const { return recipe != Fp8Recipe::none; }
  bool operator==(const PrecisionOptions&) const = default;
};

// `segments` of the program; they are moved to the order that is returned. `skip`: says whether the
// step is void (TrainingStep::skipped); invalid: the histories of delayed scaling are read, and do
// not go on. `code_metrics`: where codes in rows are counted.
std::vector<int32_t> lower_precision(Program& program, std::vector<WorkSegment>& segments,
                                     const ModelState& state, const PrecisionOptions& options,
                                     ValueId skip, const CodeMetrics& code_metrics);

}  // namespace troupe
