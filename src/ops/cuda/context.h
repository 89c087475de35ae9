// What the kernels of one CUDA interpreter share: the handle of cuBLASLt with the algorithms that
// it has chosen, dense matrix products through it, and what single kinds of operations keep for
// themselves. One thread at a time. Only in builds with CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <typeindex>

#include "base/dtype.h"
#include "ops/product_scratch.h"
#include "program/cuda_kernel.h"

namespace troupe {

// A matrix in row-major order; transposed: the operand of the product is its transpose.
struct DenseOperand {
  const void* data = nullptr;
  DType dtype = DType::f32;
  int64_t stride = 0;  // elements from row to row, as stored
  bool transposed = false;
  int64_t step = 0;  // elements from a product's operand to that of the next in a batch
};

// out [m, n] (+)= left [m, k] right [k, n] (+ bias [n]), summed in the accumulation type of the
// operands and rounded once. Or alpha left right + beta addend; or several such products of one
// size in a batch. Operands, results and addends begin at multiples of 64 bytes, those of a batch
// too.
struct DenseProduct {
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  DenseOperand left;
  DenseOperand right;
  void* out = nullptr;
  int64_t out_stride = 0;  // of `out` and `addend`, from row to row; 0: without gaps
  DType out_dtype = DType::f32;
  bool accumulate = false;
  const void* bias = nullptr;  // of out_dtype; nullptr: none
  double alpha = 1;
  const void* addend = nullptr;  // a matrix like `out`, not with `accumulate`; nullptr: none
  double beta = 0;
  int64_t batch = 1;
  int64_t out_step = 0;  // of `out` and `addend`
};

class CudaContext {
 public:
  CudaContext();
  ~CudaContext();
  CudaContext(const CudaContext&) = delete;
  CudaContext& operator=(const CudaContext&) = delete;

  // Launches the product, with scratch memory of kProductScratchBytes. False, with nothing done,
  // when cuBLASLt has no algorithm for it: then the caller has to multiply. Operands of one dtype;
  // f32 is not reduced to TF32. The same product gives the same bits, since the algorithm is chosen
  // once and by sizes alone.
  bool multiply(const DenseProduct& product, CUstream_st* stream, std::byte* scratch);

  // How often cuBLASLt had no algorithm.
  int64_t refused_products() const { return refused_products_; }

  // The context's one object of type T, made when it is first asked for: what the kernels of an
  // operation keep from run to run, such as another library's handle.
  template <class T>
  T& kept() {
    std::shared_ptr<void>& object = kept_[std::type_index(typeid(T))];
    if (object == nullptr) object = std::make_shared<T>();
    return *static_cast<T*>(object.get());
  }

 private:
  struct Library;
  std::unique_ptr<Library> library_;
  int64_t refused_products_ = 0;
  std::map<std::type_index, std::shared_ptr<void>> kept_;
};

}  // namespace troupe
