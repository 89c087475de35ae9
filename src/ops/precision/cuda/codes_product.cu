#include "ops/experts/grouped_linear/grouped_product_sm90.cuh"
#include "ops/precision/cuda/codes_product.h"
#include "ops/precision/cuda/transpose_codes.h"
#include "ops/precision/quantized_product.h"

namespace troupe {
namespace {

// As for products in bf16: tiles of rows that are computed for all columns before the next ones.
constexpr int32_t kCodesPanel = 16;

__global__ void one_group_kernel(int32_t rows, int32_t* offsets) {
  offsets[threadIdx.x] = static_cast<int32_t>(threadIdx.x) * rows;
}

template <CodesProduct kProduct, class Left, class Out, bool kGrouped, int kPair>
void multiply_codes(const CudaKernelArguments& args) {
  constexpr bool kWeights = kProduct == CodesProduct::weight_gradient;
  using Cut = GroupedCut<kWeights ? GroupedProduct::weight_gradient : GroupedProduct::forward,
                         kPair, Out, Left, E4m3>;
  const Shape& left = args.input(0).shape;
  const Shape& right = args.input(1).shape;
  const Shape& out = args.output(0).shape;
  const int64_t groups = !kGrouped ? 1 : kWeights ? out[0] : right[0];
  const CodesScratch scratch(left, right, groups, kProduct);
  GroupedSizes sizes;
  if constexpr (kGrouped) {
    sizes.offsets = args.in<int32_t>(4);
  } else {
    auto* const offsets = reinterpret_cast<int32_t*>(args.scratch);
    launch(args, {1, 2}, one_group_kernel, static_cast<int32_t>(left[0]), offsets);
    sizes.offsets = offsets;
    if (kProduct == CodesProduct::forward) sizes.bias = args.in<Bf16>(4);
  }
  sizes.groups = static_cast<int32_t>(groups);
  sizes.columns = static_cast<int32_t>(out.back());
  sizes.panel = kCodesPanel;
  sizes.out = args.output(0).data;
  sizes.left_scales = args.in<float>(2);
  sizes.right_scales = args.in<float>(3);

  const void* left_codes = args.input(0).data;
  const void* right_codes = args.input(1).data;
  std::byte* const turned_left = args.scratch + scratch.left_at;
  std::byte* const turned_right = args.scratch + scratch.right_at;
  if constexpr (kWeights) {
    sizes.rows = static_cast<int32_t>(left[1]);
    sizes.accumulate = args.attributes->as<QuantizedProductAttributes>().accumulate;
    transpose_groups(args, left_codes, sizes.offsets, groups, left[0], left[1], turned_left);
    transpose_groups(args, right_codes, sizes.offsets, groups, right[0], right[1], turned_right);
    left_codes = turned_left;
    right_codes = turned_right;
  } else {
    sizes.depth = static_cast<int32_t>(left[1]);
  }
  if constexpr (kProduct == CodesProduct::data_gradient) {
    transpose_matrices(args, right_codes, groups, left[1], out[1], turned_right);
    right_codes = turned_right;
  }
  launch_grouped_product<Cut>(args, left_codes, right_codes, left[0], sizes, args.multiprocessors);
}

template <CodesProduct kProduct, class Left, class Out>
CudaKernel select_codes(bool grouped, bool pair) {
  if (grouped) {
    return pair ? &multiply_codes<kProduct, Left, Out, true, 2>
                : &multiply_codes<kProduct, Left, Out, true, 1>;
  }
  return pair ? &multiply_codes<kProduct, Left, Out, false, 2>
              : &multiply_codes<kProduct, Left, Out, false, 1>;
}

template <class Left>
CudaKernel select_codes_of(CodesProduct product, DType out, bool grouped, bool pair) {
  switch (product) {
    case CodesProduct::forward:
      return select_codes<CodesProduct::forward, Left, Bf16>(grouped, pair);
    case CodesProduct::data_gradient:
      return select_codes<CodesProduct::data_gradient, Left, Bf16>(grouped, pair);
    case CodesProduct::weight_gradient:
      break;
  }
  return out == DType::bf16
             ? select_codes<CodesProduct::weight_gradient, Left, Bf16>(grouped, pair)
             : select_codes<CodesProduct::weight_gradient, Left, float>(grouped, pair);
}

}  // namespace

CudaKernel codes_product_kernel(CodesProduct product, DType left, DType out, bool grouped,
                                bool pair) {
  if (left == DType::f8e5m2) return select_codes_of<E5m2>(product, out, grouped, pair);
  TROUPE_CHECK(left == DType::f8e4m3, "a product of codes of another format");
  return select_codes_of<E4m3>(product, out, grouped, pair);
}

}  // namespace troupe
