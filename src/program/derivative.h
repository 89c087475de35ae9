// What a derivative rule sees: one forward operation, the gradients that arrived at its outputs,
// and the places where the gradients of its inputs are needed. The rule emits operations through
// builder() and hands their results back; the context sums gradients that arrive on several paths.
//
// The phase of each emitted operation (data or weight gradient) is set by what it produces: an
// operation that writes a weight gradient is a weight-gradient operation, every other one a
// data-gradient operation. So that they can be moved apart, a rule emits separate operations.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "base/id_vector.h"
#include "program/builder.h"

namespace troupe {

// What is known while a program is differentiated. Filled by the autodiff pass.
struct GradientTable {
  struct Arrival {
    ValueId value;
    ValueId gradient;
  };
  IdVector<ValueId, ValueId> gradient;  // of each value of the forward pass; invalid: none yet
  IdVector<ValueId, bool> wanted;       // the value depends on a parameter or differentiable input
  IdVector<StateId, bool> gradient_written;  // this main gradient has been stored in the step
  std::vector<Arrival> arrived;              // what the rule that is running has handed over
};

class DerivativeContext {
 public:
  DerivativeContext(Builder& builder, GradientTable& table, int32_t op)
      : builder_(builder), table_(table), op_(op) {}

  Builder& builder() { return builder_; }
  OpView op() const { return {builder_.program(), builder_.program().op(op_)}; }
  // By value: what a rule emits may move the program's operations.
  template <class T>
  T attributes() const {
    return op().attributes<T>();
  }

  ValueId input(int i) const;
  ValueId output(int i) const;
  // Name of input i or output i, for naming gradients: "d_" + input_name(0).
  const std::string& input_name(int i) const;

  // The gradient of output `i`; invalid when nothing that the loss depends on used it. At least one
  // output has a gradient when a rule is called.
  ValueId output_gradient(int i) const;
  // Is the gradient of input `i` needed? False for absent, integer and constant inputs.
  bool wants(int i) const;

  // Hands over the gradient of input `i`, of that input's shape and dtype. May be called once per
  // input; the same value may be handed to several inputs (it is never changed in place).
  void add_gradient(int i, ValueId gradient);

  // Weight gradients: for a parameter, `target` is its main gradient, to be overwritten
  // (accumulate = false, first use in the step) or added to. For any other input `target` is
  // invalid and the operation defines a new value. In both cases the rule emits one operation whose
  // last input is `target` (see declare_weight_gradient below) and hands its result to
  // add_weight_gradient, once.
  struct WeightTarget {
    ValueId target;
    bool accumulate = false;
  };
  WeightTarget weight_target(int i);
  void add_weight_gradient(int i, ValueId gradient);

 private:
  Builder& builder_;
  GradientTable& table_;
  int32_t op_;
};

// For shape rules of weight-gradient operations: declares the output that is either input
// `target_index` changed in place (when present; it must have `shape`, and the dtype of the weight
// or its accumulation dtype: what is added to it is added in that and rounded once) or a new tensor
// in the accumulation dtype of `weight_dtype`.
void declare_weight_gradient(InferContext& context, int target_index, const std::string& suffix,
                             DType weight_dtype, const Shape& shape);

}  // namespace troupe
