#include "support/weight_gradients.h"

#include <memory>

#include "base/random.h"
#include "ops/experts/grouped_bias/grouped_bias.h"
#include "ops/experts/grouped_linear/grouped_linear.h"
#include "ops/products/embedding/embedding.h"
#include "ops/products/linear/linear.h"
#include "passes/memory_plan.h"
#include "program/verify.h"
#include "runtime/make_interpreter.h"
#include "runtime/state_storage.h"

namespace troupe::testing {

std::vector<GradientCase> gradient_cases() {
  std::vector<GradientCase> cases;
  for (const DType dy : {DType::bf16, DType::f32, DType::f64}) {
    for (const int64_t rows : {37, 9000}) {  // of the latter sums are split
      const std::string name = std::string(name_of(dy)) + "_" + std::to_string(rows);
      cases.push_back(
          {"linear_" + name,
           {19, 24},
           [=](Builder& builder, GradientInputs& inputs, ValueId target, bool accumulate) {
             const LinearWeightGradientAttributes attributes{.accumulate = accumulate};
             builder.emit(
                 kLinearWeightGradient, Attributes(attributes),
                 {inputs.normals(dy, {rows, 19}), inputs.normals(DType::bf16, {rows, 24}), target},
                 "d_w");
           }});
      cases.push_back(
          {"linear_bias_" + name,
           {19},
           [=](Builder& builder, GradientInputs& inputs, ValueId target, bool accumulate) {
             const LinearBiasGradientAttributes attributes{.bias_dtype = DType::bf16,
                                                           .accumulate = accumulate};
             builder.emit(kLinearBiasGradient, Attributes(attributes),
                          {inputs.normals(dy, {rows, 19}), target}, "d_w");
           }});
    }
  }
  const std::vector<double> offsets = {0, 7, 7, 700};  // the second expert has no rows
  cases.push_back(
      {"grouped_linear",
       {3, 21, 18},
       [=](Builder& builder, GradientInputs& inputs, ValueId target, bool accumulate) {
         const GroupedLinearWeightGradientAttributes attributes{.accumulate = accumulate};
         builder.emit(kGroupedLinearWeightGradient, Attributes(attributes),
                      {inputs.normals(DType::bf16, {700, 21}),
                       inputs.normals(DType::bf16, {700, 18}), inputs.integers(offsets), target},
                      "d_w");
       }});
  cases.push_back({"grouped_bias",
                   {3, 300},
                   [=](Builder& builder, GradientInputs& inputs, ValueId target, bool accumulate) {
                     const GroupedBiasWeightGradientAttributes attributes{.accumulate = accumulate};
                     builder.emit(kGroupedBiasWeightGradient, Attributes(attributes),
                                  {inputs.normals(DType::bf16, {700, 300}),
                                   inputs.integers(offsets), ValueId{}, ValueId{}, target},
                                  "d_w");
                   }});
  cases.push_back({"embedding",
                   {7, 1100},
                   [](Builder& builder, GradientInputs& inputs, ValueId target, bool accumulate) {
                     const EmbeddingWeightGradientAttributes attributes{.vocabulary = 7,
                                                                        .accumulate = accumulate};
                     builder.emit(kEmbeddingWeightGradient, Attributes(attributes),
                                  {inputs.normals(DType::bf16, {9, 1100}),
                                   inputs.integers({0, 3, 3, 6, 3, 0, 5, 3, 6}), target},
                                  "d_w");
                   }});
  return cases;
}

std::vector<float> run_gradient(const GradientCase& test, DType dtype, bool accumulate, int threads,
                                Device device) {
  auto table = std::make_shared<StateTable>();
  const StateId gradient =
      table->add({.name = "d_w", .dtype = dtype, .shape = test.shape, .role = Role::gradient});
  Program program(table);
  Builder builder(program);
  GradientInputs inputs(builder);
  test.emit(builder, inputs, builder.state(gradient), accumulate);
  verify_program(program);
  ThreadPool pool(threads);
  StateStorage storage(table, device);
  const auto interpreter =
      make_interpreter(program, plan_memory(program, threads, device), storage, pool, {}, {});
  inputs.write(*interpreter);
  const TensorView view = storage.view(gradient);
  std::vector<float> values;
  for (int64_t i = 0; i < view.shape.elements(); ++i) {
    const bf16 before(random_normal(1, RandomStream::test, 10, static_cast<uint64_t>(i)));
    if (dtype == DType::bf16) {
      view.as<bf16>()[i] = before;
    } else {
      view.as<float>()[i] = before;
    }
  }
  storage.to_device();
  interpreter->run();
  storage.to_host();
  storage.gradients_to_host();
  for (int64_t i = 0; i < view.shape.elements(); ++i) {
    values.push_back(dtype == DType::bf16 ? static_cast<float>(view.as<bf16>()[i])
                                          : view.as<float>()[i]);
  }
  return values;
}

}  // namespace troupe::testing
