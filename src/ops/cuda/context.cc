#include "ops/cuda/context.h"

#include <cublasLt.h>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "program/cuda/check.h"

namespace troupe {
namespace {

void check_blas(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw_failed(std::string("cuBLASLt: ") + what + " failed: " + cublasLtGetStatusString(status) +
               ".");
}

cudaDataType_t data_type(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return CUDA_R_64F;
    case DType::f32:
      return CUDA_R_32F;
    case DType::bf16:
      return CUDA_R_16BF;
    case DType::f16:
      return CUDA_R_16F;
    default:
      break;
  }
  TROUPE_CHECK(false, "no matrix products of this dtype");
}

// The descriptions that cuBLASLt needs, each destroyed with its owner.
class Layout {
 public:
  // With `batch` > 1 the first of as many matrices that are `step` elements apart.
  Layout(DType dtype, int64_t rows, int64_t columns, int64_t stride, int64_t batch, int64_t step) {
    check_blas(cublasLtMatrixLayoutCreate(&layout_, data_type(dtype), static_cast<uint64_t>(rows),
                                          static_cast<uint64_t>(columns), stride),
               "describing a matrix");
    if (batch == 1) return;
    set(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, static_cast<int32_t>(batch));
    set(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, step);
  }
  ~Layout() { cublasLtMatrixLayoutDestroy(layout_); }
  Layout(const Layout&) = delete;
  Layout& operator=(const Layout&) = delete;
  cublasLtMatrixLayout_t get() const { return layout_; }

 private:
  template <class T>
  void set(cublasLtMatrixLayoutAttribute_t attribute, const T& value) {
    check_blas(cublasLtMatrixLayoutSetAttribute(layout_, attribute, &value, sizeof(value)),
               "describing a matrix");
  }

  cublasLtMatrixLayout_t layout_ = nullptr;
};

class Description {
 public:
  Description(cublasComputeType_t compute, cudaDataType_t scale) {
    check_blas(cublasLtMatmulDescCreate(&description_, compute, scale), "describing a product");
  }
  ~Description() { cublasLtMatmulDescDestroy(description_); }
  Description(const Description&) = delete;
  Description& operator=(const Description&) = delete;
  cublasLtMatmulDesc_t get() const { return description_; }

  template <class T>
  void set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
    check_blas(cublasLtMatmulDescSetAttribute(description_, attribute, &value, sizeof(value)),
               "describing a product");
  }

 private:
  cublasLtMatmulDesc_t description_ = nullptr;
};

class Preference {
 public:
  Preference() { check_blas(cublasLtMatmulPreferenceCreate(&preference_), "stating a preference"); }
  ~Preference() { cublasLtMatmulPreferenceDestroy(preference_); }
  Preference(const Preference&) = delete;
  Preference& operator=(const Preference&) = delete;
  cublasLtMatmulPreference_t get() const { return preference_; }

  template <class T>
  void set(cublasLtMatmulPreferenceAttributes_t attribute, const T& value) {
    check_blas(cublasLtMatmulPreferenceSetAttribute(preference_, attribute, &value, sizeof(value)),
               "stating a preference");
  }

 private:
  cublasLtMatmulPreference_t preference_ = nullptr;
};

// All that an algorithm depends on.
using ProductKey = std::tuple<int64_t, int64_t, int64_t, DType, DType, bool, bool, int64_t, int64_t,
                              bool, bool, int64_t, int64_t, int64_t, int64_t, int64_t>;

// What the memory plan promises of every operand, and what cuBLASLt demands of its workspace.
constexpr uint32_t kOperandAlignment = 64;
constexpr uint64_t kWorkspaceAlignment = 256;
constexpr uint64_t kWorkspaceBytes =
    kProductScratchBytes - (kWorkspaceAlignment - kOperandAlignment);

std::byte* workspace_in(std::byte* scratch) {
  const auto address = reinterpret_cast<uintptr_t>(scratch);
  return scratch + (kWorkspaceAlignment - address % kWorkspaceAlignment) % kWorkspaceAlignment;
}

}  // namespace

struct CudaContext::Library {
  cublasLtHandle_t handle = nullptr;
  std::map<ProductKey, std::optional<cublasLtMatmulAlgo_t>> algorithms;
};

CudaContext::CudaContext() : library_(std::make_unique<Library>()) {
  check_blas(cublasLtCreate(&library_->handle), "starting");
}

CudaContext::~CudaContext() {
  cublasLtDestroy(library_->handle);
}

// cuBLASLt thinks in columns: it is asked for the transpose, out^T = right^T left^T, of which
// row-major matrices are the column-major form.
bool CudaContext::multiply(const DenseProduct& product, CUstream_st* stream, std::byte* scratch) {
  if (product.m == 0 || product.n == 0 || product.k == 0) return false;
  TROUPE_CHECK(product.left.dtype == product.right.dtype, "a product of two dtypes");
  TROUPE_CHECK(product.addend == nullptr || !product.accumulate, "a product with two addends");
  const bool is_double = product.left.dtype == DType::f64;
  if (is_double && product.bias != nullptr) return false;
  const cudaDataType_t scale = is_double ? CUDA_R_64F : CUDA_R_32F;

  Description description(is_double ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F, scale);
  const auto operation = [](const DenseOperand& operand) {
    return operand.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  };
  description.set(CUBLASLT_MATMUL_DESC_TRANSA, operation(product.right));
  description.set(CUBLASLT_MATMUL_DESC_TRANSB, operation(product.left));
  if (product.bias != nullptr) {
    description.set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    description.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, product.bias);
    description.set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, data_type(product.out_dtype));
  }
  const auto layout_of = [](const DenseOperand& operand, int64_t rows, int64_t columns) {
    return operand.transposed ? std::pair(columns, rows) : std::pair(rows, columns);
  };
  const auto [right_rows, right_columns] = layout_of(product.right, product.n, product.k);
  const auto [left_rows, left_columns] = layout_of(product.left, product.k, product.m);
  const Layout right(product.right.dtype, right_rows, right_columns, product.right.stride,
                     product.batch, product.right.step);
  const Layout left(product.left.dtype, left_rows, left_columns, product.left.stride, product.batch,
                    product.left.step);
  const int64_t out_stride = product.out_stride == 0 ? product.n : product.out_stride;
  const Layout out(product.out_dtype, product.n, product.m, out_stride, product.batch,
                   product.out_step);
  const bool adds = product.accumulate || product.addend != nullptr;

  const ProductKey key{product.m,
                       product.n,
                       product.k,
                       product.left.dtype,
                       product.out_dtype,
                       product.left.transposed,
                       product.right.transposed,
                       product.left.stride,
                       product.right.stride,
                       adds,
                       product.bias != nullptr,
                       product.batch,
                       product.left.step,
                       product.right.step,
                       product.out_step,
                       out_stride};
  auto found = library_->algorithms.find(key);
  if (found == library_->algorithms.end()) {
    Preference preference;
    preference.set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspaceBytes);
    for (const auto attribute :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
      preference.set(attribute, kOperandAlignment);
    }
    // A result of 2 bytes is rounded once: where depth is cut into pieces, their sums are kept in
    // f32. (In place they would be added up in the result's dtype.)
    if (is_half(product.out_dtype)) {
      constexpr uint32_t kSchemes = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
      preference.set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, kSchemes);
    }
    cublasLtMatmulHeuristicResult_t result{};
    int results = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        library_->handle, description.get(), right.get(), left.get(), out.get(), out.get(),
        preference.get(), 1, &result, &results);
    std::optional<cublasLtMatmulAlgo_t> algorithm;
    if (status == CUBLAS_STATUS_SUCCESS && results > 0 && result.state == CUBLAS_STATUS_SUCCESS) {
      algorithm = result.algo;
    }
    found = library_->algorithms.emplace(key, algorithm).first;
  }
  if (!found->second.has_value()) {
    ++refused_products_;
    return false;
  }

  const double added = product.accumulate ? 1 : product.beta;
  const double double_factors[2] = {product.alpha, adds ? added : 0};
  const float float_factors[2] = {static_cast<float>(double_factors[0]),
                                  static_cast<float>(double_factors[1])};
  const void* alpha = &float_factors[0];
  const void* beta = &float_factors[1];
  if (is_double) {
    alpha = &double_factors[0];
    beta = &double_factors[1];
  }
  const void* addend = product.addend != nullptr ? product.addend : product.out;
  const cublasStatus_t status =
      cublasLtMatmul(library_->handle, description.get(), alpha, product.right.data, right.get(),
                     product.left.data, left.get(), beta, addend, out.get(), product.out, out.get(),
                     &*found->second, workspace_in(scratch), kWorkspaceBytes, stream);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED) {  // the choice was too hopeful
    found->second.reset();
    ++refused_products_;
    return false;
  }
  check_blas(status, "a matrix product");
  return true;
}

}  // namespace troupe
