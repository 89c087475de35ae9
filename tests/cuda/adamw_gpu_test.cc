// AdamW with gradients in bf16 and moments in 8 bits on a GPU: what the CPU makes of the same
// state.
#include <cmath>
#include <cstdlib>
#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/random.h"
#include "cuda/gpu.h"
#include "ops/optimizer/adamw/adamw.h"
#include "ops/optimizer/adamw/moment_blocks.h"
#include "passes/memory_plan.h"
#include "runtime/make_interpreter.h"

namespace troupe::testing {
namespace {

struct Kept {
  std::vector<float> master;
  std::vector<int> mean, square;  // codes; empty with moments in another dtype
  std::vector<int> scales;
};

struct Dtypes {
  DType gradient;
  DType exp_avg;
  DType exp_avg_sq;
};

std::vector<int> bytes_of(const TensorView& view) {
  const auto* bytes = static_cast<const uint8_t*>(view.data);
  return {bytes, bytes + view.shape.elements()};
}

// Three updates of rows of whole blocks and a part, from normals.
Kept update(const Dtypes& dtypes, int64_t columns, Device device) {
  const Shape shape{37, columns};
  auto table = std::make_shared<StateTable>();
  const auto add = [&](const char* name, DType dtype, const Shape& of, Role role) {
    return table->add({.name = name, .dtype = dtype, .shape = of, .role = role});
  };
  const StateId weight = add("w", DType::bf16, shape, Role::parameter);
  const StateId gradient = add("d_w", dtypes.gradient, shape, Role::gradient);
  const StateId master = add("master", DType::f32, shape, Role::optimizer);
  const auto moment = [&](const char* name, DType dtype) {
    const StateId id = add(name, dtype, shape, Role::optimizer);
    if (dtype != DType::f8e4m3) return std::pair(id, StateId{});
    return std::pair(id, add(name, DType::u8, moment_scales_shape(shape), Role::optimizer));
  };
  const auto [mean, mean_scale] = moment("mean", dtypes.exp_avg);
  const auto [square, square_scale] = moment("square", dtypes.exp_avg_sq);

  Program program(table);
  Builder builder(program);
  const auto state = [&](StateId id) { return id.valid() ? builder.state(id) : ValueId{}; };
  const AdamWScalars scalars{.learning_rate = builder.input("learning_rate", DType::f64, {1}),
                             .weight_decay = builder.input("weight_decay", DType::f64, {1}),
                             .step = builder.input("step", DType::i64, {1}),
                             .coefficient = builder.input("coefficient", DType::f64, {1}),
                             .skip = builder.input("skip", DType::i32, {1})};
  adamw(builder,
        {.parameter = state(weight),
         .gradient = state(gradient),
         .exp_avg = state(mean),
         .exp_avg_sq = state(square),
         .master = state(master),
         .exp_avg_scale = state(mean_scale),
         .exp_avg_sq_scale = state(square_scale)},
        scalars, {}, "w");
  ThreadPool pool(1);
  const StateStorage storage(table, device);
  const auto interpreter =
      make_interpreter(program, plan_memory(program, 1, device), storage, pool);
  *interpreter->view(scalars.learning_rate).as<double>() = 0.01;
  *interpreter->view(scalars.weight_decay).as<double>() = 0.1;
  *interpreter->view(scalars.coefficient).as<double>() = 0.5;
  *interpreter->view(scalars.skip).as<int32_t>() = 0;
  for (int64_t step = 1; step <= 3; ++step) {
    *interpreter->view(scalars.step).as<int64_t>() = step;
    for (int64_t i = 0; i < shape.elements(); ++i) {
      const double value = random_normal(1, RandomStream::test, static_cast<uint32_t>(step),
                                         static_cast<uint64_t>(i)) *
                           (i % 5 == 1 ? 1e-4 : 1);
      if (dtypes.gradient == DType::bf16) {
        storage.view(gradient).as<bf16>()[i] = bf16(value);
      } else {
        storage.view(gradient).as<float>()[i] = static_cast<float>(value);
      }
    }
    storage.to_device();
    interpreter->run();
    storage.to_host();
  }
  Kept kept;
  const auto* masters = storage.view(master).as<float>();
  kept.master.assign(masters, masters + shape.elements());
  for (const auto& [codes, scale, found] :
       {std::tuple(mean, mean_scale, &kept.mean), std::tuple(square, square_scale, &kept.square)}) {
    if (!scale.valid()) continue;
    *found = bytes_of(storage.view(codes));
    for (const int each : bytes_of(storage.view(scale))) kept.scales.push_back(each);
  }
  return kept;
}

// Where a code stands among all, by the number that it is of: both zeros at the same place.
int place_of(int code) {
  return code < 128 ? code : 128 - code;
}

// A code differs where an element, a few roundings of f32 off, lies that close to where its draw
// changes: some of a million. It is then the next one.
void expect_same_codes(const std::vector<int>& found, const std::vector<int>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  size_t others = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    ASSERT_LE(std::abs(place_of(found[i]) - place_of(expected[i])), 1) << i;
    others += found[i] != expected[i] ? 1 : 0;
  }
  EXPECT_LE(others, found.size() / 1000);
}

TEST(CudaAdamW, InFewerBitsIsThatOfTheCpu) {
  TROUPE_NEED_GPU();
  constexpr DType kF8 = DType::f8e4m3;
  for (const DType gradient : {DType::f32, DType::bf16}) {
    for (const auto& [mean, square] :
         {std::pair(DType::f32, DType::f32), std::pair(DType::bf16, DType::bf16),
          std::pair(kF8, kF8), std::pair(DType::bf16, kF8), std::pair(kF8, DType::f32)}) {
      for (const int64_t columns : {64, 100}) {
        SCOPED_TRACE(std::string(name_of(gradient)) + " " + std::string(name_of(mean)) + " " +
                     std::string(name_of(square)) + " " + std::to_string(columns));
        const Kept expected = update({gradient, mean, square}, columns, Device::cpu);
        const Kept found = update({gradient, mean, square}, columns, Device::cuda);
        ASSERT_EQ(found.scales, expected.scales);
        expect_same_codes(found.mean, expected.mean);
        expect_same_codes(found.square, expected.square);
        // An update moves an element by some 0.01. Where a moment became another code, or its bf16
        // rounding fell to the other side, the next update is up to an eighth of that off.
        size_t others = 0;
        for (size_t i = 0; i < found.master.size(); ++i) {
          ASSERT_NEAR(found.master[i], expected.master[i], 0.01) << i;
          others += std::abs(found.master[i] - expected.master[i]) > 1e-6F ? 1 : 0;
        }
        EXPECT_LE(others, found.master.size() / 200);
      }
    }
  }
}

}  // namespace
}  // namespace troupe::testing
