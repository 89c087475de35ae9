// Samples: small complete uses of an operation, written once in the operation's folder and turned
// into tests by the generic harness. A sample is built several times in different dtypes, so it
// asks for `dtype()` and draws its data from SampleBuilder, which keeps it equal (up to rounding)
// in all.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "program/builder.h"

namespace troupe {

class SampleBuilder {
 public:
  SampleBuilder(Builder& builder, DType dtype) : builder_(builder), dtype_(dtype) {}

  Builder& builder() { return builder_; }
  // The compute type of this build of the sample: f64, f32 or bf16.
  DType dtype() const { return dtype_; }

  struct Options {
    double mean = 0;
    double deviation = 1;        // standard normal by default
    bool differentiable = true;  // a gradient is needed and checked
    bool accumulation = false;   // the tensor has the accumulation type of dtype()
    ValueId rows = {};           // i32 counter tensor: dimension 0 is ragged
    int32_t rows_element = 0;
    std::optional<DType> dtype = {};  // the tensor has this type in every build
  };
  // A tensor of random normal numbers. Rows beyond the live count are poisoned by the harness.
  ValueId tensor(const std::string& name, const Shape& shape, const Options& options);
  ValueId tensor(const std::string& name, const Shape& shape) {
    return tensor(name, shape, Options());
  }
  // A tensor of the given numbers, of the compute type unless the options say otherwise.
  ValueId values(const std::string& name, const Shape& shape, const std::vector<double>& values,
                 const Options& options);
  // An i32 tensor of the given numbers (counters, indices, token ids).
  ValueId integers(const std::string& name, const Shape& shape, const std::vector<int32_t>& values);
  // An i64 tensor of the given numbers, each under 2^53 (step numbers).
  ValueId integers64(const std::string& name, const Shape& shape,
                     const std::vector<int64_t>& values);

  // Declares a result of the sample: compared between runs, and for float results the place where a
  // random gradient enters when derivatives are checked.
  void result(ValueId id);
  // A result that is compared but through which no gradient enters.
  void result_without_gradient(ValueId id);

  struct InputData {
    ValueId id;
    std::vector<double> data;  // integers are exact in double
    bool differentiable = false;
  };
  struct Result {
    ValueId id;
    bool gradient = false;
  };
  const std::vector<InputData>& inputs() const { return inputs_; }
  const std::vector<Result>& results() const { return results_; }

 private:
  Builder& builder_;
  DType dtype_;
  std::vector<InputData> inputs_;
  std::vector<Result> results_;
};

}  // namespace troupe
