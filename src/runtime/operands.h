// The operands of all operations of a program, as the kernels of an interpreter see them.
//
// Spans stay valid as long as the object, also when it is moved. One thread at a time may build it;
// any number may read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "program/program.h"

namespace troupe {

// View: TensorView or CudaTensor.
template <class View>
class Operands {
 public:
  Operands() = default;
  // view_of(id): where the value lies. Operands that are absent are a View().
  template <class ViewOf>
  Operands(const Program& program, const ViewOf& view_of) {
    for (int32_t index = 0; index < program.op_count(); ++index) {
      const Op& op = program.op(index);
      begins_.push_back(views_.size());
      for (const ValueId id : program.inputs(op)) {
        views_.push_back(id.valid() ? view_of(id) : View());
      }
      for (const ValueId id : program.outputs(op)) views_.push_back(view_of(id));
    }
  }

  // Of operation `index`.
  std::span<const View> inputs(int32_t index, const Op& op) const {
    return std::span(views_).subspan(begins_[static_cast<size_t>(index)], op.input_count);
  }
  std::span<const View> outputs(int32_t index, const Op& op) const {
    return std::span(views_).subspan(begins_[static_cast<size_t>(index)] + op.input_count,
                                     op.output_count);
  }

 private:
  std::vector<View> views_;
  std::vector<size_t> begins_;  // of an operation's inputs
};

}  // namespace troupe
