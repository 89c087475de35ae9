// Single operations that store a weight gradient or add to it, for tests of what they leave behind.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "base/device.h"
#include "base/random.h"
#include "program/builder.h"
#include "runtime/interpreter.h"

namespace troupe::testing {

// Declares inputs of a program and keeps what they are to hold.
class GradientInputs {
 public:
  explicit GradientInputs(Builder& builder) : builder_(builder) {}

  ValueId normals(DType dtype, const Shape& shape) {
    const auto stream = static_cast<uint32_t>(20 + values_.size());
    std::vector<double> values;
    for (int64_t i = 0; i < shape.elements(); ++i) {
      values.push_back(random_normal(1, RandomStream::test, stream, static_cast<uint64_t>(i)));
    }
    return add(dtype, shape, std::move(values));
  }
  ValueId integers(const std::vector<double>& values) {
    return add(DType::i32, {static_cast<int64_t>(values.size())}, values);
  }

  void write(Interpreter& interpreter) const {
    for (const auto& [id, values] : values_) {
      const TensorView view = interpreter.view(id);
      for (size_t i = 0; i < values.size(); ++i) {
        if (view.dtype == DType::f64) view.as<double>()[i] = values[i];
        if (view.dtype == DType::f32) view.as<float>()[i] = static_cast<float>(values[i]);
        if (view.dtype == DType::bf16) view.as<bf16>()[i] = bf16(values[i]);
        if (view.dtype == DType::i32) view.as<int32_t>()[i] = static_cast<int32_t>(values[i]);
      }
    }
  }

 private:
  ValueId add(DType dtype, const Shape& shape, std::vector<double> values) {
    const ValueId id = builder_.input("input", dtype, shape);
    values_.emplace_back(id, std::move(values));
    return id;
  }

  Builder& builder_;
  std::vector<std::pair<ValueId, std::vector<double>>> values_;
};

struct GradientCase {
  std::string name;
  Shape shape;  // of the gradient
  // Emits the operation that stores in `target`, or adds to it. The weight is bf16.
  std::function<void(Builder&, GradientInputs&, ValueId target, bool accumulate)> emit;
};

// Every kind that may write the main gradient of a bf16 weight, except collectives.
std::vector<GradientCase> gradient_cases();

// The gradient, of dtype f32 or bf16, after the operation; before it holds normals in bf16.
std::vector<float> run_gradient(const GradientCase& test, DType dtype, bool accumulate, int threads,
                                Device device = Device::cpu);

}  // namespace troupe::testing
