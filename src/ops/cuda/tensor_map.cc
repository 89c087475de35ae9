#include "ops/cuda/tensor_map.h"

#include <cuda_runtime_api.h>
#include <string>

#include "base/error.h"
#include "program/cuda/check.h"

namespace troupe {
namespace {

constexpr int64_t kCopyAlignment = 16;

// The driver's function is found at run time, so that the program also starts where no driver is.
using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

EncodeTiled find_encode_tiled() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                              cudaEnableDefault, &found),
             "looking for cuTensorMapEncodeTiled");
  if (found != cudaDriverEntryPointSuccess || function == nullptr) {
    throw_failed(
        "CUDA: the driver has no cuTensorMapEncodeTiled; it needs to be of CUDA 12 or "
        "later.");
  }
  return reinterpret_cast<EncodeTiled>(function);
}

CUtensorMapDataType tensor_data_type(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case DType::f16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::f32:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    case DType::u8:
      return CU_TENSOR_MAP_DATA_TYPE_UINT8;
    default:
      break;
  }
  TROUPE_CHECK(false, "no tiles of this dtype");
}

// `strides` in bytes, of all dimensions but the innermost.
template <size_t kRank>
CUtensorMap encode_map(const void* data, DType dtype, const std::array<cuuint64_t, kRank>& sizes,
                       const std::array<cuuint64_t, kRank - 1>& strides,
                       const std::array<cuuint32_t, kRank>& tile) {
  static const EncodeTiled encode = find_encode_tiled();
  std::array<cuuint32_t, kRank> steps{};
  steps.fill(1);
  CUtensorMap map;
  const CUresult result = encode(
      &map, tensor_data_type(dtype), kRank, const_cast<void*>(data), sizes.data(), strides.data(),
      tile.data(), steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw_failed("CUDA: describing a tensor for copies in tiles failed: error " +
                 std::to_string(static_cast<int>(result)) + ".");
  }
  return map;
}

}  // namespace

bool has_tiled_rows(int64_t elements, DType dtype) {
  return elements * static_cast<int64_t>(size_of(dtype)) % kCopyAlignment == 0;
}

CUtensorMap make_tensor_map(const TiledTensor& tensor) {
  const auto bytes = static_cast<int64_t>(size_of(tensor.dtype));
  TROUPE_CHECK(tensor.tile[0] * bytes == 128 && has_tiled_rows(tensor.sizes[0], tensor.dtype),
               "a tensor that cannot be copied in tiles");
  std::array<cuuint64_t, 3> sizes{};
  std::array<cuuint64_t, 2> strides{};
  uint64_t stride = static_cast<uint64_t>(bytes);
  for (size_t i = 0; i < 3; ++i) {
    sizes[i] = static_cast<cuuint64_t>(tensor.sizes[i]);
    stride *= sizes[i];
    if (i < 2) strides[i] = stride;
  }
  return encode_map<3>(
      tensor.data, tensor.dtype, sizes, strides,
      {static_cast<cuuint32_t>(tensor.tile[0]), static_cast<cuuint32_t>(tensor.tile[1]), 1});
}

CUtensorMap make_tensor_map(const TiledHeads& heads) {
  TROUPE_CHECK(
      has_tiled_rows(heads.head_dim, DType::bf16) && has_tiled_rows(heads.row_stride, DType::bf16),
      "heads that cannot be copied in tiles");
  const auto bytes = [](int64_t elements) { return static_cast<cuuint64_t>(2 * elements); };
  return encode_map<4>(
      heads.data, DType::bf16,
      {static_cast<cuuint64_t>(heads.head_dim), static_cast<cuuint64_t>(heads.heads),
       static_cast<cuuint64_t>(heads.rows), static_cast<cuuint64_t>(heads.sequences)},
      {bytes(heads.head_dim), bytes(heads.row_stride), bytes(heads.rows * heads.row_stride)},
      {64, 1, static_cast<cuuint32_t>(heads.tile_rows), 1});
}

}  // namespace troupe
