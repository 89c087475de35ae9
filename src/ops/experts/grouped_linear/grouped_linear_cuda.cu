#include <algorithm>
#include <limits>
#include <string>

#include "ops/cuda/product.cuh"
#include "ops/experts/grouped_linear/grouped_kernels.h"
#include "ops/experts/grouped_linear/grouped_linear.h"
#include "ops/experts/grouped_linear/grouped_product_sm90.cuh"
#include "program/op_spec.h"

namespace troupe {
namespace {

// The plain tiles of product.cuh, for f32 and f64, and for bf16 where tensor cores cannot be fed
// (slow_grouped_product in grouped_linear.cc). The grid has as many tiles of rows as there can be,
// each with its `column_tiles` tiles of columns side by side; blocks find their rows from the
// offsets, and those beyond the last tile end.
template <class T, class Out>
__global__ void __launch_bounds__(kTileThreads)
    rows_kernel(const T* x, const T* weight, const int32_t* offsets, Out* out, int experts,
                int64_t inputs, int64_t outputs, int64_t weight_columns, bool transposed,
                unsigned column_tiles) {
  using A = accumulation_t<T>;
  const auto row_tile = static_cast<int32_t>(blockIdx.x / column_tiles);
  const GroupTile tile = find_group_tile(offsets, experts, row_tile, kTile);
  if (tile.group < 0) return;
  const TileOperand<T> left{x, inputs, false};
  const TileOperand<T> right{weight + tile.group * inputs * outputs, weight_columns, transposed};
  multiply_tile<A>(left, right, tile.end, outputs, inputs, tile.first,
                   int64_t{blockIdx.x % column_tiles} * kTile,
                   [=](int64_t i, int64_t j, A sum) { out[i * outputs + j] = round_to<Out>(sum); });
}

template <class T, class Out>
__global__ void __launch_bounds__(kTileThreads)
    weights_kernel(const T* dy, const T* x, const int32_t* offsets, Out* out, int64_t outputs,
                   int64_t inputs, bool accumulate) {
  using A = accumulation_t<T>;
  const int64_t e = blockIdx.z;
  const int64_t begin = offsets[e];
  const int64_t rows = offsets[e + 1] - begin;
  if (rows == 0 && accumulate) return;
  const TileOperand<T> left{dy + begin * outputs, outputs, true};
  const TileOperand<T> right{x + begin * inputs, inputs, false};
  multiply_tile<A>(left, right, outputs, inputs, rows, int64_t{blockIdx.y} * kTile,
                   int64_t{blockIdx.x} * kTile, [=](int64_t i, int64_t j, A sum) {
                     Out& to = out[(e * outputs + i) * inputs + j];
                     to = round_to<Out>(accumulate ? widen(to) + sum : sum);
                   });
}

// Calls multiply(weights, offsets) for the weights of the first experts, and for those of the last
// ones where they are in a second tensor: one launch each.
template <class Multiply>
void for_each_weight(const CudaKernelArguments& args, const Multiply& multiply) {
  const auto* offsets = args.in<int32_t>(2);
  multiply(args.input(1), offsets);
  if (args.inputs.size() > 3) multiply(args.input(3), offsets + args.input(1).shape[0]);
}

// y (kForward) or dx, of rows x [R, inputs].
template <class T, class Out, bool kForward>
void multiply_rows(const CudaKernelArguments& args) {
  const Shape& x = args.input(0).shape;
  const int64_t outputs = args.output(0).shape[1];
  for_each_weight(args, [&](const CudaTensor& weight, const int32_t* offsets) {
    // In one dimension, which may have 2^31 - 1 blocks; the others end at 65,535.
    const int64_t column_tiles = ceil_divide(outputs, kTile);
    const int64_t blocks = column_tiles * most_group_tiles(x[0], weight.shape[0], kTile);
    if (blocks > std::numeric_limits<int32_t>::max()) {
      throw_failed("A product of experts with " + std::to_string(x[0]) + " rows and " +
                   std::to_string(outputs) +
                   " columns is more than a GPU takes at once. Use smaller micro-batches.");
    }
    Launch shape;
    shape.grid = dim3(static_cast<unsigned>(blocks));
    shape.block = kTileThreads;
    launch(args, shape, rows_kernel<T, Out>, args.in<T>(0), weight.as<T>(), offsets,
           args.out<Out>(0), static_cast<int>(weight.shape[0]), x[1], outputs, weight.shape[2],
           kForward, static_cast<unsigned>(column_tiles));
  });
}

template <class T>
struct GroupedLinearCuda {
  static void run(const CudaKernelArguments& args) { multiply_rows<T, T, true>(args); }
};

template <class T>
struct GroupedDataGradientCuda {
  static void run(const CudaKernelArguments& args) { multiply_rows<T, T, false>(args); }
};

const GroupedLinearWeightGradientAttributes& weight_gradient_of(const CudaKernelArguments& args) {
  return args.attributes->as<GroupedLinearWeightGradientAttributes>();
}

// Out is the type of the gradient.
template <class T, class Out>
void run_weight_gradient(const CudaKernelArguments& args) {
  const Shape& out = args.output(0).shape;
  Launch shape;
  shape.grid =
      dim3(static_cast<unsigned>(ceil_divide(out[2], kTile)),
           static_cast<unsigned>(ceil_divide(out[1], kTile)), static_cast<unsigned>(out[0]));
  shape.block = kTileThreads;
  const GroupedLinearWeightGradientAttributes& attributes = weight_gradient_of(args);
  launch(args, shape, weights_kernel<T, Out>, args.in<T>(0), args.in<T>(1),
         args.in<int32_t>(2) + attributes.first, args.out<Out>(0), out[1], out[2],
         attributes.accumulate);
}

template <class T>
struct GroupedWeightGradientCuda {
  static void run(const CudaKernelArguments& args) {
    run_weight_gradient<T, accumulation_t<T>>(args);
  }
};

// Tiles of rows that are computed for all columns before the next ones are: what these rows and a
// wave of columns need stays in the L2 cache.
constexpr int32_t kPanel = 16;

// T and Out are the types of the operands and of the result.
template <GroupedProduct kProduct, int kPair, class T, class Out>
void multiply_tiled(const CudaKernelArguments& args) {
  using Cut = GroupedCut<kProduct, kPair, Out, T, T>;
  const Shape& left = args.input(0).shape;
  const Shape& out = args.output(0).shape;
  GroupedSizes sizes;
  sizes.panel = kPanel;
  sizes.out = args.output(0).data;
  const auto multiply = [&](const void* right) {
    launch_grouped_product<Cut>(args, args.in<T>(0), right, left[0], sizes, args.multiprocessors);
  };
  if constexpr (Cut::kDepthGrouped) {
    const GroupedLinearWeightGradientAttributes& attributes = weight_gradient_of(args);
    sizes.offsets = args.in<int32_t>(2) + attributes.first;
    sizes.groups = static_cast<int32_t>(out[0]);
    sizes.rows = static_cast<int32_t>(out[1]);
    sizes.columns = static_cast<int32_t>(out[2]);
    sizes.accumulate = attributes.accumulate;
    multiply(args.input(1).data);
  } else {
    sizes.columns = static_cast<int32_t>(out[1]);
    sizes.depth = static_cast<int32_t>(left[1]);
    for_each_weight(args, [&](const CudaTensor& weight, const int32_t* offsets) {
      sizes.offsets = offsets;
      sizes.groups = static_cast<int32_t>(weight.shape[0]);
      multiply(weight.data);
    });
  }
}

template <GroupedProduct kProduct, class T, class Out>
CudaKernel select_tiled(GroupedVariant variant) {
  return variant == GroupedVariant::sm90_pair ? &multiply_tiled<kProduct, 2, T, Out>
                                              : &multiply_tiled<kProduct, 1, T, Out>;
}

// Of a product whose result has the type of its operands.
template <GroupedProduct kProduct>
CudaKernel select_tiled(DType operands, GroupedVariant variant) {
  return operands == DType::f16 ? select_tiled<kProduct, F16, F16>(variant)
                                : select_tiled<kProduct, Bf16, Bf16>(variant);
}

}  // namespace

CudaKernel grouped_linear_cuda_kernel_of(DType operands, DType out, GroupedVariant variant) {
  if (variant != GroupedVariant::plain) {
    return select_tiled<GroupedProduct::forward>(operands, variant);
  }
  if (operands == DType::f32 && out == DType::bf16) return &multiply_rows<float, Bf16, true>;
  return select_cuda_kernel<GroupedLinearCuda>(operands);
}

CudaKernel grouped_linear_data_gradient_cuda_kernel_of(DType operands, DType out,
                                                       GroupedVariant variant) {
  if (variant != GroupedVariant::plain) {
    return select_tiled<GroupedProduct::data_gradient>(operands, variant);
  }
  if (operands == DType::f32 && out == DType::bf16) return &multiply_rows<float, Bf16, false>;
  return select_cuda_kernel<GroupedDataGradientCuda>(operands);
}

CudaKernel grouped_linear_weight_gradient_cuda_kernel_of(DType operands, DType out,
                                                         GroupedVariant variant) {
  const bool narrow = out == DType::bf16;
  if (variant != GroupedVariant::plain) {
    constexpr auto kWeights = GroupedProduct::weight_gradient;
    if (operands == DType::f16) return select_tiled<kWeights, F16, float>(variant);
    return narrow ? select_tiled<kWeights, Bf16, Bf16>(variant)
                  : select_tiled<kWeights, Bf16, float>(variant);
  }
  if (narrow) {
    return operands == DType::f32 ? &run_weight_gradient<float, Bf16>
                                  : &run_weight_gradient<Bf16, Bf16>;
  }
  return select_cuda_kernel<GroupedWeightGradientCuda>(operands);
}

Attributes grouped_weight_gradient_attributes(bool accumulate) {
  return Attributes(GroupedLinearWeightGradientAttributes{.accumulate = accumulate});
}

CudaKernel grouped_linear_cuda_kernel(const OpView& op, GroupedVariant variant) {
  return grouped_linear_cuda_kernel_of(op.input(0).dtype, op.output(0).dtype, variant);
}

CudaKernel grouped_linear_data_gradient_cuda_kernel(const OpView& op, GroupedVariant variant) {
  return grouped_linear_data_gradient_cuda_kernel_of(op.input(0).dtype, op.output(0).dtype,
                                                     variant);
}

CudaKernel grouped_linear_weight_gradient_cuda_kernel(const OpView& op, GroupedVariant variant) {
  return grouped_linear_weight_gradient_cuda_kernel_of(op.input(0).dtype, op.output(0).dtype,
                                                       variant);
}

}  // namespace troupe
