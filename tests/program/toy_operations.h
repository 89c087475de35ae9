// A handful of small operations for the tests of programs, of their derivatives and of their
// memory: they have rules but no kernels, so programs made of them can be built, planned and
// printed, not run.
#pragma once

#include <string>
#include <vector>

#include "program/builder.h"
#include "program/derivative.h"

namespace troupe::testing {

struct ToyAttributes {
  int64_t rows = 0;
};

struct ToyAccumulate {
  bool accumulate = false;
};

// make() {rows}: a new f32 [rows, 4].
inline void infer_toy_make(InferContext& context) {
  context.output("", DType::f32, {context.attributes<ToyAttributes>().rows, 4});
}
inline std::string print_toy_make(const Attributes& attributes) {
  return "rows=" + std::to_string(attributes.as<ToyAttributes>().rows);
}
inline const OpSpec kToyMake{
    .name = "make", .infer = infer_toy_make, .cpu = {}, .print_attributes = print_toy_make};

// halve(x): of x's type; its derivative is itself. May be stored over x.
inline void infer_toy_halve(InferContext& context) {
  const Value& x = context.input(0);
  context.output("", x.dtype, x.shape, x.rows);
}
inline void differentiate_toy_halve(DerivativeContext& context);
inline const OpSpec kToyHalve{.name = "halve",
                              .infer = infer_toy_halve,
                              .differentiate = differentiate_toy_halve,
                              .cpu = {},
                              .in_place = {.output = 0, .input = 0}};
inline void differentiate_toy_halve(DerivativeContext& context) {
  context.add_gradient(
      0, context.builder().emit(kToyHalve, Attributes(NoAttributes()), {context.output_gradient(0)},
                                "d_" + context.input_name(0))[0]);
}

// mix(a, b, c): sums of two or three tensors of one type, and a second output, the difference.
inline void infer_toy_mix(InferContext& context) {
  const Value& a = context.input(0);
  TROUPE_CHECK(a.shape == context.input(1).shape, "mix of different shapes");
  context.output("", a.dtype, a.shape);
  context.output("difference", a.dtype, a.shape);
}
inline const OpSpec kToyMix{.name = "mix", .infer = infer_toy_mix, .cpu = {}};

// scale(x, w): x [n, 4] times the parameter w [4] by column.
//   scale_data_gradient(dy, w), scale_weight_gradient(dy, x, target)
inline void infer_toy_scale(InferContext& context) {
  const Value& x = context.input(0);
  TROUPE_CHECK(context.input(1).shape == Shape({4}), "scale by another shape");
  context.output("", x.dtype, x.shape, x.rows);
}
inline const OpSpec kToyScaleDataGradient{
    .name = "scale_data_gradient", .infer = infer_toy_scale, .cpu = {}};
inline void infer_toy_scale_weight_gradient(InferContext& context) {
  declare_weight_gradient(context, 2, "", context.input(1).dtype, {4});
}
inline std::string print_toy_accumulate(const Attributes& attributes) {
  return attributes.as<ToyAccumulate>().accumulate ? "accumulate=1" : "";
}
inline uint64_t toy_workspace(const OpView& op) {
  return op.input(0).bytes();
}
inline const OpSpec kToyScaleWeightGradient{.name = "scale_weight_gradient",
                                            .infer = infer_toy_scale_weight_gradient,
                                            .cpu = {.workspace = toy_workspace},
                                            .print_attributes = print_toy_accumulate};
inline void differentiate_toy_scale(DerivativeContext& context) {
  Builder& builder = context.builder();
  const ValueId dy = context.output_gradient(0);
  if (context.wants(0)) {
    context.add_gradient(0, builder.emit(kToyScaleDataGradient, Attributes(NoAttributes()),
                                         {dy, context.input(1)}, "d_" + context.input_name(0))[0]);
  }
  if (context.wants(1)) {
    const auto target = context.weight_target(1);
    context.add_weight_gradient(
        1, builder.emit(kToyScaleWeightGradient,
                        Attributes(ToyAccumulate{.accumulate = target.accumulate}),
                        {dy, context.input(0), target.target}, "d_" + context.input_name(1))[0]);
  }
}
inline Cost toy_scale_cost(const OpView& op) {
  return {.flops = static_cast<double>(op.input(0).shape.elements()),
          .bytes = static_cast<double>(op.input(0).bytes() + op.output(0).bytes())};
}
inline const OpSpec kToyScale{.name = "scale",
                              .infer = infer_toy_scale,
                              .differentiate = differentiate_toy_scale,
                              .cost = toy_scale_cost,
                              .cpu = {}};

// count(x): i32 [3], without derivative.
inline void infer_toy_count(InferContext& context) {
  context.output("", DType::i32, {3});
}
inline const OpSpec kToyCount{.name = "count", .infer = infer_toy_count, .cpu = {}};

// choose(x, counts): the first counts[1] rows of x, ragged.
inline void infer_toy_choose(InferContext& context) {
  const Value& x = context.input(0);
  context.output("", x.dtype, x.shape, {.counter = context.input_id(1), .element = 1});
}
inline const OpSpec kToyChoose{.name = "choose", .infer = infer_toy_choose, .cpu = {}};

// collect(metric, x) {accumulate}: stores or adds the mean of x in a metric.
inline void infer_toy_collect(InferContext& context) {
  context.mutates(0);
}
inline const OpSpec kToyCollect{.name = "collect",
                                .infer = infer_toy_collect,
                                .cpu = {},
                                .print_attributes = print_toy_accumulate};

inline ValueId toy_make(Builder& builder, int64_t rows, const std::string& name) {
  return builder.emit(kToyMake, Attributes(ToyAttributes{.rows = rows}), {}, name)[0];
}
inline ValueId toy_halve(Builder& builder, ValueId x, const std::string& name) {
  return builder.emit(kToyHalve, Attributes(NoAttributes()), {x}, name)[0];
}
inline std::vector<ValueId> toy_mix(Builder& builder, ValueId a, ValueId b,
                                    const std::string& name) {
  return builder.emit(kToyMix, Attributes(NoAttributes()), {a, b, ValueId{}}, name);
}
inline ValueId toy_scale(Builder& builder, ValueId x, ValueId w, const std::string& name) {
  return builder.emit(kToyScale, Attributes(NoAttributes()), {x, w}, name)[0];
}
inline void toy_collect(Builder& builder, ValueId metric, ValueId x, bool accumulate) {
  builder.emit(kToyCollect, Attributes(ToyAccumulate{.accumulate = accumulate}), {metric, x},
               "collected");
}

// A state table of `count` parameters w0, w1, ... (f32 [4]) of layers 0, 1, ... with main
// gradients, and one without ("frozen").
struct ToyState {
  std::shared_ptr<const StateTable> table;
  std::vector<StateId> parameters;
  std::vector<StateId> gradients;
  StateId frozen;
};
inline ToyState make_toy_state(int count) {
  auto table = std::make_shared<StateTable>();
  ToyState state;
  for (int i = 0; i < count; ++i) {
    const std::string name = "layers." + std::to_string(i) + ".w";
    state.parameters.push_back(
        table->add({.name = name, .dtype = DType::f32, .shape = {4}, .role = Role::parameter}));
    state.gradients.push_back(table->add(
        {.name = "grad." + name, .dtype = DType::f32, .shape = {4}, .role = Role::gradient}));
    table->at(state.parameters.back()).gradient = state.gradients.back();
  }
  state.frozen =
      table->add({.name = "frozen", .dtype = DType::f32, .shape = {4}, .role = Role::parameter});
  state.table = std::move(table);
  return state;
}

}  // namespace troupe::testing
