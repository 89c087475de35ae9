#include "support/main_gradient.h"

#include <algorithm>
#include <limits>
#include <memory>

#include "passes/autodiff.h"
#include "passes/memory_plan.h"
#include "program/verify.h"
#include "runtime/cpu/cpu_interpreter.h"

namespace troupe::testing {

std::vector<double> main_gradient(
    const Shape& shape, const std::vector<double>& parameter,
    const std::function<void(SampleBuilder&, ValueId parameter)>& build) {
  auto table = std::make_shared<StateTable>();
  const StateId gradient =
      table->add({.name = "d_w", .dtype = DType::f64, .shape = shape, .role = Role::gradient});
  const StateId weight = table->add({.name = "w",
                                     .dtype = DType::f64,
                                     .shape = shape,
                                     .role = Role::parameter,
                                     .gradient = gradient});
  Program program(table);
  Builder builder(program);
  SampleBuilder sample(builder, DType::f64);
  build(sample, builder.state(weight));

  const int32_t forward_ops = program.op_count();
  std::vector<GradientSeed> seeds;
  for (const auto& result : sample.results()) {
    const Value value = builder.value(result.id);
    seeds.push_back({result.id, program.add_value(Value{.name = "d_" + value.name,
                                                        .dtype = value.dtype,
                                                        .shape = value.shape,
                                                        .role = Role::input,
                                                        .rows = value.rows})});
  }
  MainGradients main_gradients(*table);
  append_backward(builder, 0, forward_ops, seeds, {}, main_gradients);
  verify_program(program);

  StateStorage storage(table);
  ThreadPool pool(2);
  CpuInterpreter interpreter(program, plan_memory(program, 2), storage, pool);
  std::copy(parameter.begin(), parameter.end(), storage.view(weight).as<double>());
  const auto elements = static_cast<size_t>(shape.elements());
  auto* const result = storage.view(gradient).as<double>();
  std::fill_n(result, elements, std::numeric_limits<double>::quiet_NaN());
  for (const auto& input : sample.inputs()) {
    const TensorView view = interpreter.view(input.id);
    for (size_t i = 0; i < input.data.size(); ++i) {
      if (view.dtype == DType::i32) {
        view.as<int32_t>()[i] = static_cast<int32_t>(input.data[i]);
      } else {
        view.as<double>()[i] = input.data[i];
      }
    }
  }
  for (const GradientSeed& seed : seeds) {
    const TensorView view = interpreter.view(seed.gradient);
    for (int64_t i = 0; i < view.shape.elements(); ++i) {
      view.as<double>()[i] = static_cast<double>(i + 1);
    }
  }
  interpreter.run();
  return {result, result + elements};
}

}  // namespace troupe::testing
