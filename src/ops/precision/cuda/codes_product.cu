#include <algorithm>

#include "ops/experts/grouped_linear/grouped_product_sm90.cuh"
#include "ops/precision/cuda/codes_product.h"
#include "ops/precision/quantized_product.h"

namespace troupe {
namespace {

// Tiles of rows that are computed for all columns before the next ones: as for products in bf16,
// but of a long depth as many as stay in the L2 cache beside what streams past them. (With 16 of
// 32,768 codes, Mixtral-8x22B's gradient of the first product ran at 841 instead of 975 TFLOP/s.)
constexpr int32_t kMostPanel = 16;
constexpr int32_t kLeastPanel = 4;
constexpr int64_t kPanelBytes = int64_t{16} << 20;

int32_t panel_of(int64_t depth) {
  constexpr int64_t kTileRows = 128;
  const int64_t tiles = kPanelBytes / (kTileRows * std::max<int64_t>(depth, 1));
  return static_cast<int32_t>(std::clamp<int64_t>(tiles, kLeastPanel, kMostPanel));
}

__global__ void one_group_kernel(int32_t rows, int32_t* offsets) {
  offsets[threadIdx.x] = static_cast<int32_t>(threadIdx.x) * rows;
}

template <GroupedProduct kProduct, class Left, class Out, bool kBlocks, bool kGrouped, int kPair>
void multiply_codes(const CudaKernelArguments& args) {
  using Cut = GroupedCut<kProduct, kPair, Out, Left, E4m3, kBlocks>;
  const auto& attributes = args.attributes->as<QuantizedProductAttributes>();
  const CudaTensor& left = args.input(0);
  const CudaTensor& right = args.input(1);
  const Shape left_shape = attributes.operands[0].shape(left.shape);
  const Shape& out = args.output(0).shape;
  GroupedSizes sizes;
  if constexpr (kGrouped) {
    sizes.offsets = args.in<int32_t>(4);
    sizes.groups = static_cast<int32_t>(args.input(4).shape[0] - 1);
  } else {
    auto* const offsets = reinterpret_cast<int32_t*>(args.scratch);
    launch(args, {1, 2}, one_group_kernel, static_cast<int32_t>(left_shape[0]), offsets);
    sizes.offsets = offsets;
    sizes.groups = 1;
    if (kProduct == GroupedProduct::forward) sizes.bias = args.in<Bf16>(4);
  }
  sizes.columns = static_cast<int32_t>(out.back());
  sizes.out = args.output(0).data;
  sizes.left_scales = args.in<float>(2);
  sizes.right_scales = args.in<float>(3);
  sizes.left_rows = static_cast<int32_t>(left_shape[0]);
  if constexpr (kProduct == GroupedProduct::weight_gradient) {
    sizes.rows = static_cast<int32_t>(left_shape[1]);
    sizes.accumulate = attributes.accumulate;
  } else {
    sizes.depth = static_cast<int32_t>(left_shape[1]);
  }
  sizes.panel = panel_of(sizes.depth);
  launch_grouped_product<Cut>(args, left.data, right.data, left.shape[0], sizes,
                              args.multiprocessors);
}

template <GroupedProduct kProduct, class Left, class Out, bool kBlocks>
CudaKernel select_codes(bool grouped, bool pair) {
  if (grouped) {
    return pair ? &multiply_codes<kProduct, Left, Out, kBlocks, true, 2>
                : &multiply_codes<kProduct, Left, Out, kBlocks, true, 1>;
  }
  return pair ? &multiply_codes<kProduct, Left, Out, kBlocks, false, 2>
              : &multiply_codes<kProduct, Left, Out, kBlocks, false, 1>;
}

template <class Left, bool kBlocks>
CudaKernel select_codes_of(const CodesKernel& kernel) {
  switch (kernel.product) {
    case GroupedProduct::forward:
      return select_codes<GroupedProduct::forward, Left, Bf16, kBlocks>(kernel.grouped,
                                                                        kernel.pair);
    case GroupedProduct::data_gradient:
      return select_codes<GroupedProduct::data_gradient, Left, Bf16, kBlocks>(kernel.grouped,
                                                                              kernel.pair);
    case GroupedProduct::weight_gradient:
      break;
  }
  constexpr GroupedProduct kWeights = GroupedProduct::weight_gradient;
  return kernel.out == DType::bf16
             ? select_codes<kWeights, Left, Bf16, kBlocks>(kernel.grouped, kernel.pair)
             : select_codes<kWeights, Left, float, kBlocks>(kernel.grouped, kernel.pair);
}

}  // namespace

CudaKernel codes_product_kernel(const CodesKernel& kernel) {
  if (kernel.left == DType::f8e5m2) return select_codes_of<E5m2, false>(kernel);
  TROUPE_CHECK(kernel.left == DType::f8e4m3, "a product of codes of another format");
  return kernel.blocks ? select_codes_of<E4m3, true>(kernel) : select_codes_of<E4m3, false>(kernel);
}

}  // namespace troupe
