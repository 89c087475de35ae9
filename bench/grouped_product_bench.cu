// The products of experts on a GPU, in bf16, through the operations' own kernels: forward, gradient
// of the data, gradient of the weights, of both matrices of the expert blocks of known models.
//
// Usage: grouped_product_bench [MODEL]     (one of kModels; otherwise all)
//
// For each product a line: rows of an expert, on average; median time of seven runs after two; the
// rate; its share of what cuBLASLt reaches on 8192 x 8192 x 8192 in the same minute; and for
// weight gradients the rate when they are added to what is there. "skewed": the largest expert has
// some four times the rows of the average. Operands are random: zeros run faster. Before it is
// timed, every product is compared with plain sums at 65,536 places; exit status 1 if one is off.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/random.h"
#include "ops/cuda/context.h"
#include "ops/experts/grouped_linear/grouped_linear.h"
#include "program/builder.h"
#include "program/cuda/device.cuh"
#include "runtime/device_memory.h"

namespace troupe {
namespace {

struct Model {
  const char* name;
  int64_t experts;
  int64_t rows;
  int64_t hidden;
  int64_t inner;  // of an expert, whose first matrix has twice as many outputs
};

// Rows as of 8,192 tokens, or of the ranks that share the experts.
constexpr Model kModels[] = {
    {"mixtral-8x7b", 8, 16384, 4096, 14336},   {"mixtral-8x22b", 8, 16384, 6144, 16384},
    {"qwen3-30b", 128, 65536, 2048, 768},      {"qwen3-30b-ep4", 32, 65536, 2048, 768},
    {"qwen3-235b-ep8", 16, 65536, 4096, 1536}, {"deepseek-v3-ep8", 32, 65536, 7168, 2048},
    {"olmoe", 64, 65536, 2048, 1024},
};

enum class Product { forward, data_gradient, weight_gradient };

constexpr uint32_t kPlaces = 1 << 16;
constexpr int kWarmUps = 2;
constexpr int kRuns = 7;

class DeviceArray {
 public:
  explicit DeviceArray(int64_t bytes) {
    check_cuda(cudaMalloc(&data_, static_cast<size_t>(bytes)), "asking for memory");
  }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
};

__device__ uint32_t mix(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdULL;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ULL;
  return static_cast<uint32_t>(x >> 32);
}

// Sums of two uniform numbers, between -scale and scale.
__global__ void fill_kernel(Bf16* data, int64_t elements, uint32_t seed, float scale) {
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += threads) {
    const uint32_t bits = mix(static_cast<uint64_t>(i) * 2654435761ULL + seed);
    const auto sum = static_cast<float>((bits & 0xffff) + (bits >> 16));
    data[i] = __float2bfloat16_rn((sum / 65535.0F - 1.0F) * scale);
  }
}

// Where the elements of the operands lie, so that one kernel can check all products: the sum over k
// of left[row * left_row + k * left_depth] right[e * matrix + column * right_column + k *
// right_depth].
struct Strides {
  int64_t left_row;
  int64_t left_depth;
  int64_t right_matrix;
  int64_t right_column;
  int64_t right_depth;
};

// A warp checks a place: the largest difference over the sum of magnitudes.
__global__ void check_kernel(const Bf16* left, const Bf16* right, const int32_t* offsets,
                             const void* out, int experts, int64_t rows, int64_t columns,
                             int64_t depth, Strides strides, bool depth_grouped, float* worst) {
  const uint32_t place = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t column = mix(place * 3ULL) % columns;
  int64_t row = mix(place * 3ULL + 1) % rows;
  int64_t at = row * columns + column;
  int expert = 0;
  int64_t begin = 0;
  int64_t end = depth;
  if (depth_grouped) {
    expert = static_cast<int>(mix(place * 3ULL + 2) % static_cast<uint32_t>(experts));
    at += expert * rows * columns;
    begin = offsets[expert];
    end = offsets[expert + 1];
  } else {
    while (offsets[expert + 1] <= row) ++expert;
  }
  float sum = 0;
  float magnitude = 0;
  for (int64_t k = begin + lane; k < end; k += 32) {
    const float product = widen(left[row * strides.left_row + k * strides.left_depth]) *
                          widen(right[(depth_grouped ? 0 : expert) * strides.right_matrix +
                                      column * strides.right_column + k * strides.right_depth]);
    sum += product;
    magnitude += fabsf(product);
  }
  sum = warp_sum(sum);
  magnitude = warp_sum(magnitude);
  if (lane != 0) return;
  const float result =
      depth_grouped ? static_cast<const float*>(out)[at] : widen(static_cast<const Bf16*>(out)[at]);
  const float rounding = depth_grouped ? 0.0F : 0.004F * fabsf(sum);  // of the result
  const float off = fmaxf(fabsf(result - sum) - rounding, 0.0F) / fmaxf(magnitude, 1e-30F);
  // Bits of numbers that are not negative are ordered as the numbers are, and NaN comes last.
  atomicMax(reinterpret_cast<int*>(worst), __float_as_int(off));
}

// What sums of some thousand terms in fp32 may be off, as a share of their magnitudes.
constexpr float kTolerance = 1e-5F;

double median_ms(const std::function<void()>& run) {
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  check_cuda(cudaEventCreate(&begin), "measuring");
  check_cuda(cudaEventCreate(&end), "measuring");
  std::vector<float> times;
  for (int i = 0; i < kWarmUps + kRuns; ++i) {
    check_cuda(cudaEventRecord(begin), "measuring");
    run();
    check_cuda(cudaEventRecord(end), "measuring");
    check_cuda(cudaEventSynchronize(end), "measuring");
    float ms = 0;
    check_cuda(cudaEventElapsedTime(&ms, begin, end), "measuring");
    if (i >= kWarmUps) times.push_back(ms);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::nth_element(times.begin(), times.begin() + kRuns / 2, times.end());
  return times[kRuns / 2];
}

void fill(const DeviceArray& array, int64_t elements, uint32_t seed, float scale) {
  fill_kernel<<<1024, 256>>>(array.as<Bf16>(), elements, seed, scale);
  check_cuda(cudaGetLastError(), "filling memory");
}

// TFLOP/s of cuBLASLt.
double measure_limit() {
  constexpr int64_t kSide = 8192;
  const DeviceArray left(kSide * kSide * 2);
  const DeviceArray right(kSide * kSide * 2);
  const DeviceArray out(kSide * kSide * 2);
  const DeviceArray scratch(static_cast<int64_t>(kProductScratchBytes));
  fill(left, kSide * kSide, 1, 1);
  fill(right, kSide * kSide, 2, 1);
  CudaContext context;
  DenseProduct product{.m = kSide,
                       .n = kSide,
                       .k = kSide,
                       .left = {left.as<void>(), DType::bf16, kSide, false},
                       .right = {right.as<void>(), DType::bf16, kSide, true},
                       .out = out.as<void>(),
                       .out_dtype = DType::bf16};
  const double ms = median_ms([&] {
    if (!context.multiply(product, nullptr, scratch.as<std::byte>())) {
      throw_failed("cuBLASLt does not multiply 8192 x 8192 x 8192.");
    }
  });
  return 2.0 * kSide * kSide * kSide / ms / 1e9;
}

// Offsets of experts whose loads are even within 10 %, or skewed like 1 / sqrt(i).
std::vector<int32_t> draw_offsets(int64_t experts, int64_t rows, bool skewed) {
  std::vector<double> loads;
  double sum = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const auto index = static_cast<uint64_t>(e);
    const double place = static_cast<double>((e * 7 + 3) % experts) + 0.5;
    const double jitter = 0.9 + 0.2 * random_uniform(3, RandomStream::test, 0, index);
    loads.push_back(skewed ? jitter / std::sqrt(place / static_cast<double>(experts) + 0.02)
                           : jitter);
    sum += loads.back();
  }
  std::vector<int32_t> offsets = {0};
  double through = 0;
  for (const double load : loads) {
    through += load;
    offsets.push_back(
        static_cast<int32_t>(std::llround(through / sum * static_cast<double>(rows))));
  }
  return offsets;
}

const char* name_of(Product product) {
  switch (product) {
    case Product::forward:
      return "forward";
    case Product::data_gradient:
      return "data gradient";
    default:
      return "weight gradient";
  }
}

// A program of the one operation, with its kernel bound.
class Operation {
 public:
  Operation(Product product, int64_t experts, int64_t rows, int64_t outputs, int64_t inputs) {
    Builder builder(program_);
    const ValueId offsets = builder.input("offsets", DType::i32, {experts + 1});
    const auto rows_of = [&](const char* name, int64_t width) {
      return builder.input(name, DType::bf16, {rows, width});
    };
    const auto weight = [&] { return builder.input("w", DType::bf16, {experts, outputs, inputs}); };
    const Attributes none{NoAttributes()};
    if (product == Product::forward) {
      builder.emit(kGroupedLinear, none, {rows_of("x", inputs), weight(), offsets}, "out");
    } else if (product == Product::data_gradient) {
      builder.emit(kGroupedLinearDataGradient, none, {rows_of("dy", outputs), weight(), offsets},
                   "out");
    } else {
      builder.emit(kGroupedLinearWeightGradient,
                   Attributes(GroupedLinearWeightGradientAttributes()),
                   {rows_of("dy", outputs), rows_of("x", inputs), offsets, ValueId{}}, "out");
    }
  }

  OpView view() const { return {program_, program_.op(0)}; }
  KernelChoice kernel() const { return view().op.spec->cuda(view(), device_traits(0)); }

 private:
  Program program_{std::make_shared<const StateTable>()};
};

bool measure(const Model& model, Product product, bool second, bool skewed, double limit) {
  const int64_t outputs = second ? model.hidden : 2 * model.inner;
  const int64_t inputs = second ? model.inner : model.hidden;
  const Operation operation(product, model.experts, model.rows, outputs, inputs);
  const OpView op = operation.view();
  const bool weights = product == Product::weight_gradient;

  const DeviceArray left(static_cast<int64_t>(op.input(0).bytes()));
  const DeviceArray right(static_cast<int64_t>(op.input(1).bytes()));
  const DeviceArray offsets(static_cast<int64_t>(op.input(2).bytes()));
  const DeviceArray out(static_cast<int64_t>(op.output(0).bytes()));
  const DeviceArray worst(sizeof(float));
  fill(left, op.input(0).shape.elements(), 1, 1.0F);
  fill(right, op.input(1).shape.elements(), 2, weights ? 1.0F : 0.05F);
  const std::vector<int32_t> drawn = draw_offsets(model.experts, model.rows, skewed);
  check_cuda(cudaMemcpy(offsets.as<void>(), drawn.data(), drawn.size() * sizeof(int32_t),
                        cudaMemcpyHostToDevice),
             "copying to the GPU");
  check_cuda(cudaMemset(worst.as<void>(), 0, sizeof(float)), "clearing memory");

  const std::array<CudaTensor, 4> operands = {
      CudaTensor{left.as<void>(), DType::bf16, op.input(0).shape},
      CudaTensor{right.as<void>(), DType::bf16, op.input(1).shape},
      CudaTensor{offsets.as<void>(), DType::i32, op.input(2).shape}, CudaTensor{}};
  const std::array<CudaTensor, 1> results = {
      CudaTensor{out.as<void>(), op.output(0).dtype, op.output(0).shape}};
  CudaKernelArguments args;
  args.inputs = operands;
  args.outputs = results;
  const KernelChoice kernel = operation.kernel();
  args.multiprocessors = kernel.multiprocessors;
  const auto run = [&](bool accumulate) {
    const Attributes attributes(GroupedLinearWeightGradientAttributes{.accumulate = accumulate});
    args.attributes = &attributes;
    kernel.function(args);
  };

  run(false);
  Strides strides{inputs, 1, outputs * inputs, inputs, 1};
  int64_t rows = model.rows;
  int64_t columns = outputs;
  int64_t depth = inputs;
  if (product == Product::data_gradient) {
    strides = {outputs, 1, outputs * inputs, 1, inputs};
    columns = inputs;
    depth = outputs;
  } else if (weights) {
    strides = {1, outputs, 0, 1, inputs};
    rows = outputs;
    columns = inputs;
  }
  check_kernel<<<kPlaces / 8, 256>>>(left.as<Bf16>(), right.as<Bf16>(), offsets.as<int32_t>(),
                                     out.as<void>(), static_cast<int>(model.experts), rows, columns,
                                     depth, strides, weights, worst.as<float>());
  check_cuda(cudaGetLastError(), "checking");
  float off = 0;
  check_cuda(cudaMemcpy(&off, worst.as<void>(), sizeof(off), cudaMemcpyDeviceToHost), "checking");

  const double flops = 2.0 * static_cast<double>(model.rows) * static_cast<double>(outputs) *
                       static_cast<double>(inputs);
  const double ms = median_ms([&] { run(false); });
  std::printf("%-16s %-15s %d %-7s %6lld %8.3f ms %6.0f TFLOP/s %4.0f %%", model.name,
              name_of(product), second ? 2 : 1, skewed ? "skewed" : "even",
              static_cast<long long>(model.rows / model.experts), ms, flops / ms / 1e9,
              100 * flops / ms / 1e9 / limit);
  if (weights) {
    std::printf(", added %6.0f TFLOP/s", flops / median_ms([&] { run(true); }) / 1e9);
  }
  const bool right_sums = off <= kTolerance;
  std::printf("%s\n", right_sums ? "" : " WRONG");
  std::fflush(stdout);
  return right_sums;
}

int run_all(const char* only) {
  const double limit = measure_limit();
  std::printf("cuBLASLt: %.0f TFLOP/s\n", limit);
  bool correct = true;
  for (const Model& model : kModels) {
    if (only != nullptr && std::strcmp(only, model.name) != 0) continue;
    for (const bool skewed : {false, true}) {
      for (const Product product :
           {Product::forward, Product::data_gradient, Product::weight_gradient}) {
        for (const bool second : {false, true}) {
          correct = measure(model, product, second, skewed, limit) && correct;
        }
      }
    }
  }
  return correct ? 0 : 1;
}

}  // namespace
}  // namespace troupe

int main(int argc, char** argv) {
  try {
    return troupe::run_all(argc > 1 ? argv[1] : nullptr);
  } catch (const troupe::UserError& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
