// Our matrix products against OpenBLAS left to itself, on the shapes of a training step: the model
// of the quickstart (2,048 tokens, hidden 192, 8 experts) and a layer of OLMoE (1,024 tokens,
// hidden 2,048, 64 experts), experts with even loads.
//
// Both use the same number of threads. Ours run as operations, through the interpreter: pool
// threads call BLAS single-threaded on tiles, so that results do not depend on their number.
// OpenBLAS splits each product its own way, and gets the experts one after the other. An iteration
// measures ten runs of each; "ours" and "OpenBLAS" are Gflop/s of the medians,
// "share" is their quotient.
#include <algorithm>
#include <benchmark/benchmark.h>
#include <cblas.h>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "operation_run.h"
#include "ops/experts/grouped_linear/grouped_linear.h"
#include "ops/products/linear/linear.h"

namespace troupe {
namespace {

enum class Phase : uint8_t { forward, data_gradient, weight_gradient };

// y [rows, outputs] = x [rows, inputs] W^T for each expert; 0 experts: a dense product.
struct Product {
  const char* name;
  Phase phase;
  int64_t experts;
  int64_t rows;  // of all experts
  int64_t inputs;
  int64_t outputs;
};

constexpr Product kProducts[] = {
    {"quickstart qkv", Phase::forward, 0, 2048, 192, 320},
    {"quickstart head", Phase::forward, 0, 2048, 192, 272},
    {"quickstart experts up", Phase::forward, 8, 4096, 192, 768},
    {"quickstart experts down", Phase::forward, 8, 4096, 384, 192},
    {"quickstart experts up, data gradient", Phase::data_gradient, 8, 4096, 192, 768},
    {"quickstart experts down, data gradient", Phase::data_gradient, 8, 4096, 384, 192},
    {"quickstart experts up, weight gradient", Phase::weight_gradient, 8, 4096, 192, 768},
    {"quickstart experts down, weight gradient", Phase::weight_gradient, 8, 4096, 384, 192},
    {"olmoe qkv", Phase::forward, 0, 1024, 2048, 6144},
    {"olmoe qkv, data gradient", Phase::data_gradient, 0, 1024, 2048, 6144},
    {"olmoe qkv, weight gradient", Phase::weight_gradient, 0, 1024, 2048, 6144},
    {"olmoe experts up", Phase::forward, 64, 8192, 2048, 2048},
    {"olmoe experts down", Phase::forward, 64, 8192, 1024, 2048},
};

int32_t emit(Builder& builder, const Product& p, ValueId& offsets) {
  const auto tensor = [&](const char* name, const Shape& shape) {
    return builder.input(name, DType::f32, shape);
  };
  const bool grouped = p.experts > 0;
  if (grouped) offsets = builder.input("offsets", DType::i32, {p.experts + 1});
  const auto weight = [&] {
    return tensor("weight",
                  grouped ? Shape{p.experts, p.outputs, p.inputs} : Shape{p.outputs, p.inputs});
  };
  const auto x = [&] { return tensor("x", {p.rows, p.inputs}); };
  const auto dy = [&] { return tensor("dy", {p.rows, p.outputs}); };
  switch (p.phase) {
    case Phase::forward:
      if (grouped) {
        grouped_linear(builder, x(), weight(), offsets, "y");
      } else {
        linear(builder, x(), weight(), {}, "y");
      }
      break;
    case Phase::data_gradient:
      if (grouped) {
        builder.emit(kGroupedLinearDataGradient, {}, {dy(), weight(), offsets}, "dx");
      } else {
        builder.emit(kLinearDataGradient, {}, {dy(), weight()}, "dx");
      }
      break;
    case Phase::weight_gradient:
      if (grouped) {
        builder.emit(kGroupedLinearWeightGradient,
                     Attributes(GroupedLinearWeightGradientAttributes{}),
                     {dy(), x(), offsets, ValueId{}}, "dw");
      } else {
        builder.emit(kLinearWeightGradient, Attributes(LinearWeightGradientAttributes{}),
                     {dy(), x(), ValueId{}}, "dw");
      }
      break;
  }
  return 0;
}

// The same products as calls of OpenBLAS.
class OpenBlasRun {
 public:
  explicit OpenBlasRun(const Product& p)
      : p_(p),
        experts_(std::max<int64_t>(1, p.experts)),
        x_(filled(p.rows * p.inputs)),
        dy_(filled(p.rows * p.outputs)),
        weight_(filled(experts_ * p.outputs * p.inputs)) {}

  double run() {
    openblas_set_num_threads(usable_cores());
    const auto start = std::chrono::steady_clock::now();
    const auto rows = static_cast<int>(p_.rows / experts_);
    const auto inputs = static_cast<int>(p_.inputs);
    const auto outputs = static_cast<int>(p_.outputs);
    for (int64_t e = 0; e < experts_; ++e) {
      float* x = x_.data() + e * rows * inputs;
      float* dy = dy_.data() + e * rows * outputs;
      float* weight = weight_.data() + e * outputs * inputs;
      switch (p_.phase) {
        case Phase::forward:
          cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, rows, outputs, inputs, 1, x, inputs,
                      weight, inputs, 0, dy, outputs);
          break;
        case Phase::data_gradient:
          cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, rows, inputs, outputs, 1, dy,
                      outputs, weight, inputs, 0, x, inputs);
          break;
        case Phase::weight_gradient:
          cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, outputs, inputs, rows, 1, dy,
                      outputs, x, inputs, 0, weight, inputs);
          break;
      }
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    openblas_set_num_threads(1);
    return seconds.count();
  }

 private:
  // Small numbers: repeated products of them do not overflow.
  static std::vector<float> filled(int64_t count) {
    std::vector<float> values(static_cast<size_t>(count));
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = 0.01F * static_cast<float>(i % 17) - 0.1F;
    return values;
  }

  Product p_;
  int64_t experts_;
  std::vector<float> x_;
  std::vector<float> dy_;
  std::vector<float> weight_;
};

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

// Cores that have been idle are slow at first: ten runs count, after 50 ms of others.
template <class Run>
void measure(Run& product, std::vector<double>& seconds) {
  const auto start = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - start < std::chrono::milliseconds(50)) product.run();
  constexpr int kRuns = 10;
  for (int run = 0; run < kRuns; ++run) seconds.push_back(product.run());
}

void compare(benchmark::State& state, const Product& p) {
  ValueId offsets;
  OperationRun ours([&](Builder& builder) { return emit(builder, p, offsets); }, /*integers=*/1);
  for (int64_t e = 0; offsets.valid() && e <= p.experts; ++e) {
    ours.view(offsets).as<int32_t>()[e] = static_cast<int32_t>(e * p.rows / p.experts);
  }
  OpenBlasRun openblas(p);
  std::vector<double> our_seconds;
  std::vector<double> openblas_seconds;
  for (auto _ : state) {
    measure(ours, our_seconds);
    measure(openblas, openblas_seconds);
    // The idle threads of OpenBLAS keep their cores busy for some 25 ms before they sleep.
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    state.SetIterationTime(our_seconds.back());
  }
  const double flops = 2.0 * static_cast<double>(p.rows * p.inputs * p.outputs);
  state.counters["ours"] = flops / median(our_seconds) / 1e9;
  state.counters["OpenBLAS"] = flops / median(openblas_seconds) / 1e9;
  state.counters["share"] = median(openblas_seconds) / median(our_seconds);
}

const bool registered = [] {
  for (const Product& p : kProducts) {
    benchmark::RegisterBenchmark(p.name, [&p](benchmark::State& state) { compare(state, p); })
        ->UseManualTime()
        ->Iterations(5);
  }
  return true;
}();

}  // namespace
}  // namespace troupe
