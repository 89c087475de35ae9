// Muon's momentum and update on a GPU: what the CPU makes of the same state, and nothing when the
// update is skipped.
#include <gtest/gtest.h>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/random.h"
#include "cuda/gpu.h"
#include "ops/optimizer/muon/muon.h"
#include "passes/memory_plan.h"
#include "runtime/make_interpreter.h"

namespace troupe::testing {
namespace {

constexpr int64_t kRows = 37;
constexpr int64_t kColumns = 1003;
constexpr int64_t kSkipped = 4;  // the number of the update that is skipped

struct Options {
  DType dtype;  // of the parameter
  DType gradient;
  bool nesterov;
};

double number(int64_t step, int64_t i) {
  const double value =
      random_normal(1, RandomStream::test, static_cast<uint32_t>(step), static_cast<uint64_t>(i));
  return static_cast<double>(bf16(value));
}

void write(const TensorView& view, int64_t stream) {
  for (int64_t i = 0; i < view.shape.elements(); ++i) {
    const double value = stream < 0 ? std::numeric_limits<double>::quiet_NaN() : number(stream, i);
    if (view.dtype == DType::f64) view.as<double>()[i] = value;
    if (view.dtype == DType::f32) view.as<float>()[i] = static_cast<float>(value);
    if (view.dtype == DType::bf16) view.as<bf16>()[i] = bf16(value);
  }
}

std::vector<double> read(const TensorView& view) {
  std::vector<double> values;
  for (int64_t i = 0; i < view.shape.elements(); ++i) {
    if (view.dtype == DType::f64) values.push_back(view.as<double>()[i]);
    if (view.dtype == DType::f32) values.push_back(static_cast<double>(view.as<float>()[i]));
    if (view.dtype == DType::bf16) values.push_back(static_cast<double>(view.as<bf16>()[i]));
  }
  return values;
}

// Momentum, master or parameter, and parameter after each of four updates by u itself; the last is
// skipped, with NaN as its gradient.
std::vector<std::vector<double>> run_updates(const Options& options, Device device) {
  const DType wide = accumulation_dtype(options.dtype);
  const Shape shape{kRows, kColumns};
  auto table = std::make_shared<StateTable>();
  const auto add = [&](const char* name, DType dtype, Role role) {
    return table->add({.name = name, .dtype = dtype, .shape = shape, .role = role});
  };
  const StateId weight = add("w", options.dtype, Role::parameter);
  const StateId gradient = add("d_w", options.gradient, Role::gradient);
  const StateId momentum = add("momentum", wide, Role::optimizer);
  const bool has_master = options.dtype == DType::bf16;
  const StateId master = has_master ? add("master", wide, Role::optimizer) : weight;

  Program program(table);
  Builder builder(program);
  const ValueId learning_rate = builder.input("learning_rate", DType::f64, {1});
  const ValueId weight_decay = builder.input("weight_decay", DType::f64, {1});
  const ValueId coefficient = builder.input("coefficient", DType::f64, {1});
  const ValueId skip = builder.input("skip", DType::i32, {1});
  const ValueId u = muon_momentum(builder,
                                  {.gradient = builder.state(gradient),
                                   .momentum = builder.state(momentum),
                                   .coefficient = coefficient,
                                   .skip = skip},
                                  {.beta = 0.95, .nesterov = options.nesterov}, "u");
  muon_update(builder,
              {.update = u,
               .parameter = builder.state(weight),
               .master = has_master ? builder.state(master) : ValueId{},
               .learning_rate = learning_rate,
               .weight_decay = weight_decay,
               .skip = skip},
              {.scale = 3}, "w");
  ThreadPool pool(1);
  const StateStorage storage(table, device);
  const auto interpreter =
      make_interpreter(program, plan_memory(program, 1, device), storage, pool);
  *interpreter->view(learning_rate).as<double>() = 0.01;
  *interpreter->view(weight_decay).as<double>() = 0.1;
  *interpreter->view(coefficient).as<double>() = 0.5;
  write(storage.view(weight), 0);
  write(storage.view(master), 0);
  std::vector<std::vector<double>> found;
  for (int64_t step = 1; step <= kSkipped; ++step) {
    *interpreter->view(skip).as<int32_t>() = step == kSkipped ? 1 : 0;
    write(storage.view(gradient), step == kSkipped ? -1 : step);
    storage.to_device();
    interpreter->run();
    storage.to_host();
    for (const StateId id : {momentum, master, weight}) found.push_back(read(storage.view(id)));
  }
  return found;
}

TEST(CudaMuon, MomentumAndUpdateAreThoseOfTheCpu) {
  TROUPE_NEED_GPU();
  for (const auto& [dtype, gradient] :
       {std::pair(DType::f64, DType::f64), std::pair(DType::f32, DType::f32),
        std::pair(DType::bf16, DType::f32), std::pair(DType::bf16, DType::bf16)}) {
    for (const bool nesterov : {false, true}) {
      SCOPED_TRACE(std::string(name_of(dtype)) + " " + std::string(name_of(gradient)) +
                   (nesterov ? " nesterov" : ""));
      const auto expected = run_updates({dtype, gradient, nesterov}, Device::cpu);
      const auto found = run_updates({dtype, gradient, nesterov}, Device::cuda);
      ASSERT_EQ(found.size(), expected.size());
      for (size_t which = 0; which < found.size(); ++which) {
        // A few roundings of numbers under 8; a bf16 parameter may round to the other side.
        const bool is_narrow = which % 3 == 2 && dtype == DType::bf16;
        const double wide_tolerance = dtype == DType::f64 ? 1e-14 : 3e-6;
        const double tolerance = is_narrow ? 0.04 : wide_tolerance;
        for (size_t i = 0; i < found[which].size(); ++i) {
          ASSERT_NEAR(found[which][i], expected[which][i], tolerance) << which << " " << i;
        }
      }
      for (size_t which = 3 * (kSkipped - 1); which < found.size(); ++which) {
        EXPECT_EQ(found[which], found[which - 3]) << "a skipped update changed " << which;
      }
    }
  }
}

}  // namespace
}  // namespace troupe::testing
