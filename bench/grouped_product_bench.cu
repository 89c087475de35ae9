// The products of experts on a GPU, in bf16 or 8 bits, through the operations' own kernels:
// forward, gradient of the data, gradient of the weights, of both matrices of the expert blocks of
// known models.
//
// Usage: grouped_product_bench bf16|RECIPE [MODEL]
//   RECIPE  of --fp8-recipe, with e4m3 codes: tensorwise, blockwise or mxfp8
//   MODEL   one of kModels; otherwise all
//
// For each product a line: rows of an expert, on average; median time of seven runs after two; the
// rate; its share of what cuBLASLt reaches on 8192 x 8192 x 8192 in the same minute; and for
// weight gradients the rate when they are added to what is there. In 8 bits also the time that
// quantising each operand takes, which is not in the rate. "skewed": the largest expert has
// some four times the rows of the average. Operands are random: zeros run faster. Before it is
// timed, every product is compared with plain sums at 65,536 places; exit status 1 if one is off.
// For 8 bits operands are numbers that quantisation leaves as they are.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <cuda_fp8.h>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/random.h"
#include "ops/cuda/context.h"
#include "ops/experts/grouped_linear/grouped_linear.h"
#include "ops/precision/quantize/quantize.h"
#include "ops/precision/quantized_grouped_linear/quantized_grouped_linear.h"
#include "ops/precision/quantized_product.h"
#include "ops/precision/recipe.h"
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

// Sums of two uniform numbers, between -scale and scale. `codes`: such that quantisation leaves
// them as they are, codes of e4m3 over 512, of which the largest is in every expert's rows. `scale`
// is a power of two.
__global__ void fill_kernel(Bf16* data, int64_t elements, uint32_t seed, float scale, bool codes) {
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += threads) {
    const uint32_t bits = mix(static_cast<uint64_t>(i) * 2654435761ULL + seed);
    const auto sum = static_cast<float>((bits & 0xffff) + (bits >> 16));
    float number = sum / 65535.0F - 1.0F;
    if (codes) {
      const float code = i % 4093 == 0 ? 448.0F : number * 448.0F;
      number = static_cast<float>(__nv_fp8_e4m3(code)) / 512.0F;
    }
    data[i] = __float2bfloat16_rn(number * scale);
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
// Of codes, tensor cores drop what lies 13 bits below the largest number that they add.
constexpr float kCodesTolerance = 0x1p-13F;

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

void fill(const DeviceArray& array, int64_t elements, uint32_t seed, float scale, bool codes) {
  fill_kernel<<<1024, 256>>>(array.as<Bf16>(), elements, seed, scale, codes);
  check_cuda(cudaGetLastError(), "filling memory");
}

// TFLOP/s of cuBLASLt.
double measure_limit() {
  constexpr int64_t kSide = 8192;
  const DeviceArray left(kSide * kSide * 2);
  const DeviceArray right(kSide * kSide * 2);
  const DeviceArray out(kSide * kSide * 2);
  const DeviceArray scratch(static_cast<int64_t>(kProductScratchBytes));
  fill(left, kSide * kSide, 1, 1, false);
  fill(right, kSide * kSide, 2, 1, false);
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

const OpSpec& kind_of(Product product) {
  switch (product) {
    case Product::forward:
      return kGroupedLinear;
    case Product::data_gradient:
      return kGroupedLinearDataGradient;
    default:
      return kGroupedLinearWeightGradient;
  }
}

// A product in bf16, or both its operands' quantisations and the product of their codes.
class Operations {
 public:
  Operations(Product product, int64_t experts, int64_t rows, int64_t outputs, int64_t inputs,
             Fp8Recipe recipe) {
    Builder builder(program_);
    const bool weights = product == Product::weight_gradient;
    const int64_t depth = product == Product::forward ? inputs : outputs;
    left = builder.input("left", DType::bf16, {rows, depth});
    right = builder.input("right", DType::bf16,
                          weights ? Shape{rows, inputs} : Shape{experts, outputs, inputs});
    offsets = builder.input("offsets", DType::i32, {experts + 1});
    const OpSpec& kind = kind_of(product);
    if (recipe == Fp8Recipe::none) {
      std::vector<ValueId> operands = {left, right, offsets};
      if (weights) operands.emplace_back();
      builder.emit(kind, attributes_of(weights), operands, "out");
      return;
    }
    const QuantizedForm& form = *kind.quantized;
    QuantizedProductAttributes attributes;
    std::array<Codes, 2> codes;
    for (size_t i = 0; i < 2; ++i) {
      const QuantizeAttributes own = quantization_of(form.operands[i], recipe, Fp8Format::e4m3);
      const ValueId value = i == 0 ? left : right;
      const bool by_expert = (i == 0 || weights) && (own.has_transposed() || own.block.rows != 1);
      const Quantized quantized =
          quantize(builder, value, by_expert ? offsets : ValueId{}, {}, own, "codes");
      codes[i] = own.has_transposed() ? quantized.transposed : quantized.rows;
      attributes.operands[i] = {own.block};
      if (own.has_transposed()) {
        attributes.operands[i] = QuantizedProductAttributes::transposed(own.transposed_block,
                                                                        builder.value(value).shape);
      }
    }
    std::vector<ValueId> operands = {codes[0].codes, codes[1].codes, codes[0].scales,
                                     codes[1].scales, offsets};
    if (weights) operands.emplace_back();
    builder.emit(*form.kind, Attributes(attributes), operands, "out");
  }

  const Program& program() const { return program_; }
  int32_t product() const { return program_.op_count() - 1; }

  ValueId left;
  ValueId right;
  ValueId offsets;

 private:
  static Attributes attributes_of(bool weights) {
    if (weights) return Attributes(GroupedLinearWeightGradientAttributes());
    return Attributes(NoAttributes());
  }

  Program program_{std::make_shared<const StateTable>()};
};

// Memory for all values of a program, and its operations' kernels.
class Device {
 public:
  explicit Device(const Program& program) : program_(program) {
    for (int32_t i = 0; i < program.value_count(); ++i) {
      values_.push_back(
          std::make_unique<DeviceArray>(static_cast<int64_t>(program.value(ValueId{i}).bytes())));
    }
    uint64_t scratch = 1;
    for (int32_t i = 0; i < program.op_count(); ++i) {
      kernels_.push_back(
          program.op(i).spec->cuda(OpView{program, program.op(i)}, device_traits(0)));
      scratch = std::max(scratch, kernels_.back().needs.scratch);
    }
    scratch_ = std::make_unique<DeviceArray>(static_cast<int64_t>(scratch));
  }

  const DeviceArray& of(ValueId id) const { return *values_[static_cast<size_t>(id.index)]; }

  void run(int32_t index, const Attributes& attributes) const {
    const Op& op = program_.op(index);
    const auto tensor = [&](ValueId id) {
      if (!id.valid()) return CudaTensor{};
      return CudaTensor{of(id).as<void>(), program_.value(id).dtype, program_.value(id).shape};
    };
    std::vector<CudaTensor> inputs;
    std::vector<CudaTensor> outputs;
    for (const ValueId id : program_.inputs(op)) inputs.push_back(tensor(id));
    for (const ValueId id : program_.outputs(op)) outputs.push_back(tensor(id));
    const KernelChoice& kernel = kernels_[static_cast<size_t>(index)];
    CudaKernelArguments args;
    args.inputs = inputs;
    args.outputs = outputs;
    args.attributes = &attributes;
    args.multiprocessors = kernel.multiprocessors;
    args.scratch = scratch_->as<std::byte>();
    kernel.function(args);
  }
  void run(int32_t index) const { run(index, program_.op(index).attributes); }

 private:
  const Program& program_;
  std::vector<std::unique_ptr<DeviceArray>> values_;
  std::vector<KernelChoice> kernels_;
  std::unique_ptr<DeviceArray> scratch_;
};

// The product's attributes with its result added to what is there.
Attributes adding(const Program& program, int32_t product, Fp8Recipe recipe) {
  if (recipe == Fp8Recipe::none) {
    return Attributes(GroupedLinearWeightGradientAttributes{.accumulate = true});
  }
  auto attributes = program.op(product).attributes.as<QuantizedProductAttributes>();
  attributes.accumulate = true;
  return Attributes(attributes);
}

bool measure(const Model& model, Product product, bool second, bool skewed, Fp8Recipe recipe,
             double limit) {
  const int64_t outputs = second ? model.hidden : 2 * model.inner;
  const int64_t inputs = second ? model.inner : model.hidden;
  const Operations operations(product, model.experts, model.rows, outputs, inputs, recipe);
  const Program& program = operations.program();
  const int32_t last = operations.product();
  const bool weights = product == Product::weight_gradient;
  const bool codes = recipe != Fp8Recipe::none;

  const Device device(program);
  const DeviceArray& left = device.of(operations.left);
  const DeviceArray& right = device.of(operations.right);
  const DeviceArray& offsets = device.of(operations.offsets);
  const DeviceArray& out = device.of(program.outputs(program.op(last))[0]);
  const DeviceArray worst(sizeof(float));
  fill(left, program.value(operations.left).shape.elements(), 1, 1.0F, codes);
  fill(right, program.value(operations.right).shape.elements(), 2, weights ? 1.0F : 0.0625F, codes);
  const std::vector<int32_t> drawn = draw_offsets(model.experts, model.rows, skewed);
  check_cuda(cudaMemcpy(offsets.as<void>(), drawn.data(), drawn.size() * sizeof(int32_t),
                        cudaMemcpyHostToDevice),
             "copying to the GPU");
  check_cuda(cudaMemset(worst.as<void>(), 0, sizeof(float)), "clearing memory");

  for (int32_t i = 0; i <= last; ++i) device.run(i);
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
  const double ms = median_ms([&] { device.run(last); });
  std::printf("%-16s %-15s %d %-7s %6lld %8.3f ms %6.0f TFLOP/s %4.0f %%", model.name,
              name_of(product), second ? 2 : 1, skewed ? "skewed" : "even",
              static_cast<long long>(model.rows / model.experts), ms, flops / ms / 1e9,
              100 * flops / ms / 1e9 / limit);
  if (weights) {
    const Attributes attributes = adding(program, last, recipe);
    std::printf(", added %6.0f TFLOP/s",
                flops / median_ms([&] { device.run(last, attributes); }) / 1e9);
  }
  for (int32_t i = 0; i < last; ++i) {
    std::printf("%s %.3f", i == 0 ? ", quantised in" : " +", median_ms([&] { device.run(i); }));
  }
  const bool right_sums = off <= (codes ? kCodesTolerance : kTolerance);
  std::printf("%s%s\n", codes ? " ms" : "", right_sums ? "" : " WRONG");
  std::fflush(stdout);
  return right_sums;
}

int run_all(Fp8Recipe recipe, const char* only) {
  const double limit = measure_limit();
  std::printf("cuBLASLt: %.0f TFLOP/s\n", limit);
  bool correct = true;
  for (const Model& model : kModels) {
    if (only != nullptr && std::strcmp(only, model.name) != 0) continue;
    for (const bool skewed : {false, true}) {
      for (const Product product :
           {Product::forward, Product::data_gradient, Product::weight_gradient}) {
        for (const bool second : {false, true}) {
          correct = measure(model, product, second, skewed, recipe, limit) && correct;
        }
      }
    }
  }
  return correct ? 0 : 1;
}

}  // namespace
}  // namespace troupe

int main(int argc, char** argv) {
  using troupe::Fp8Recipe;
  const std::map<std::string, Fp8Recipe> recipes = {{"bf16", Fp8Recipe::none},
                                                    {"tensorwise", Fp8Recipe::tensorwise},
                                                    {"blockwise", Fp8Recipe::blockwise},
                                                    {"mxfp8", Fp8Recipe::mxfp8}};
  const auto recipe = recipes.find(argc > 1 ? argv[1] : "");
  if (recipe == recipes.end()) {
    std::fprintf(stderr, "usage: grouped_product_bench bf16|tensorwise|blockwise|mxfp8 [MODEL]\n");
    return 1;
  }
  try {
    return troupe::run_all(recipe->second, argc > 2 ? argv[2] : nullptr);
  } catch (const troupe::UserError& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
