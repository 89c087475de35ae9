// The state of a model: which parameters it has, their main gradients and optimizer states, and how
// each parameter starts.
//
// Parameters are told apart by (kind, layer). `number` is the parameter's place in the whole model;
// with the element's index it keys the random initial weights, so they do not depend on how the
// model is spread over ranks.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/shape.h"
#include "model/model_config.h"
#include "model/model_part.h"
#include "program/shard.h"
#include "program/value.h"

namespace troupe {

enum class ParameterKind : uint8_t {
  embedding,                 // [vocab, hidden]
  input_norm,                // [hidden]
  input_norm_bias,           // [hidden], with LayerNorm
  w_qkv,                     // [(heads + 2 groups) d, hidden]: query heads, key heads, value heads
  b_qkv,                     // [(heads + 2 groups) d]
  q_norm,                    // [d]; over the whole projection: [heads d]
  k_norm,                    // [d]; over the whole projection: [groups d]
  w_attention_out,           // [hidden, heads d]
  b_attention_out,           // [hidden]
  post_attention_norm,       // [hidden]
  post_attention_norm_bias,  // [hidden], with LayerNorm
  w_router,                  // [experts, hidden]
  b_router,                  // [experts]
  // The first product: gate rows before linear rows; `rows` is mlp_rows(width).
  w_gate_up,         // dense: [rows, hidden]; experts: [experts, rows, hidden]
  b_gate_up,         // dense: [rows]; experts: [experts, rows]
  w_down,            // dense: [hidden, ffn]; experts: [experts, hidden, ffn]
  b_down,            // dense: [hidden]; experts: [experts, hidden]
  w_shared_gate_up,  // [rows, hidden]
  w_shared_down,     // [hidden, width]
  w_shared_gate,     // [1, hidden]
  final_norm,        // [hidden]
  final_norm_bias,   // [hidden], with LayerNorm
  head,              // [vocab, hidden]
};

// The part of a parameter that one rank holds: in each dimension the indices of its ranges, one
// range after the other.
struct ParameterSlice {
  std::vector<std::vector<IndexRange>> ranges;  // by dimension
  GradientClass gradient = GradientClass::sliced;

  int64_t extent(int dimension) const;
  int64_t elements() const;
};

// A piece of a slice that is one stretch of the rank's memory and a box of the whole tensor.
struct SlicePiece {
  std::array<int64_t, Shape::kMaxRank> offset{};  // of the box in the whole tensor
  Shape shape;                                    // of the box
  int64_t first = 0;                              // its first element in the slice
};

// The slice as few pieces, in the order of the rank's memory.
std::vector<SlicePiece> pieces_of(const ParameterSlice& slice);

// What the shard has of the slice, as few pieces. `first` counts from the shard's first element.
std::vector<SlicePiece> pieces_of(const ParameterSlice& slice, const IndexRange& shard);

// A stretch of a slice that is one stretch of the whole tensor, too, in row-major order.
struct SliceRun {
  int64_t whole = 0;  // its first element in the whole tensor
  int64_t own = 0;    // and in the slice
  int64_t elements = 0;
};

// The slice of a tensor of shape `whole` as few such stretches, ascending in both orders.
std::vector<SliceRun> runs_of(const ParameterSlice& slice, const Shape& whole);

// What lies in elements `part` of the slice; `own` counts in the slice, as before.
std::vector<SliceRun> runs_within(std::vector<SliceRun> runs, const IndexRange& part);

struct Parameter {
  ParameterKind kind;
  int32_t layer = -1;
  uint32_t number = 0;   // in the whole model, which all ranks count alike
  Shape whole_shape;     // in the whole model
  ParameterSlice slice;  // what this rank holds of it
  // Elements of the slice: what this rank keeps the optimizer state of, and updates. All of them
  // unless state is sharded.
  IndexRange shard;
  // Elements of the slice that `value` and `gradient` have: all, or with sharded parameters
  // `shard`.
  IndexRange held;
  StateId value;
  StateId gradient;  // invalid when the model is not trained
  // AdamW moments and fp32 master weights, of the shard (shape_of_shard). Invalid when the model is
  // not trained, or the shard is empty.
  StateId exp_avg;
  StateId exp_avg_sq;
  // Of moments in f8e4m3: the scales of their blocks.
  StateId exp_avg_scale;
  StateId exp_avg_sq_scale;
  StateId master;  // only when `value` is bf16
  // How the elements start: normal with deviation `init_std`, or uniform between -init_bound and
  // init_bound; where both are 0 all are `init_constant`.
  double init_std = 0;
  double init_bound = 0;
  double init_constant = 0;
  bool decay = true;  // weight decay applies (not to norms and biases)
};

struct ModelState {
  ModelPart part;
  DType dtype = DType::f32;  // as declared: that of all weights but those of norms
  bool trained = false;      // there are gradients and optimizer state
  std::shared_ptr<const StateTable> table;
  std::vector<Parameter> parameters;   // those that the rank holds, by number
  std::vector<StateId> expert_biases;  // f32 [experts], by layer; invalid where a layer has none,
                                       // or the rank has not the layer

  // nullptr when the rank has no such parameter.
  const Parameter* search(ParameterKind kind, int32_t layer = -1) const;
  // Aborts when the rank has no such parameter.
  const Parameter& get(ParameterKind kind, int32_t layer = -1) const;
  // Invalid when the rank has no such parameter.
  StateId find(ParameterKind kind, int32_t layer = -1) const;
};

// Declares the state of a rank's part of the model. `dtype` is that of the weights, except those of
// norms, which have its accumulation type, as master weights do, and gradients and moments unless
// part.run says otherwise. `trained` adds gradients and optimizer state. Expert biases are router
// state, fp32 in every model: the step moves them, the optimizer does not. Refuses what
// check_layout refuses of the model.
ModelState declare_model_state(const ModelConfig& config, DType dtype, bool trained,
                               const ModelPart& part);

// Of the whole model, on one rank.
ModelState declare_model_state(const ModelConfig& config, DType dtype, bool trained);

// The initial value of one element, by its number in the whole tensor: a pure function of its
// arguments.
double initial_value(const Parameter& parameter, uint64_t seed, int64_t element);

// values[i] = initial_value(parameter, seed, first + i) for `count` elements, in a fraction of the
// time.
void fill_initial_values(const Parameter& parameter, uint64_t seed, int64_t first, int64_t count,
                         double* values);

}  // namespace troupe
