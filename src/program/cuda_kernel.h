// What a CUDA kernel is given. In the sources of an operation a "CUDA kernel" is a function of the
// host that launches work on a stream: it reads shapes and attributes, never data, and returns
// without waiting. All pointers are addresses on the GPU. What a CPU kernel may rely on holds here,
// too (program/kernel.h): everything is bound before the first run; nothing is allocated; the same
// operands give the same bits; rows at and beyond the live count, which kernels read on the GPU,
// are neither used nor needed.
//
// A launch that fails throws UserError. Faults of the GPU while it runs are found by the
// interpreter.
//
// This header knows nothing of CUDA, so that an operation's folder can name its kernels in any
// build: TROUPE_CUDA(function) is the function in builds with CUDA, and nullptr in others. Which
// kernel an operation gets is decided in every build (program/kernel_choice.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/dtype.h"
#include "base/error.h"
#include "base/shape.h"
#include "program/op.h"

struct CUstream_st;  // what cudaStream_t points to

#ifdef TROUPE_WITH_CUDA
#define TROUPE_CUDA(function) function
#else
#define TROUPE_CUDA(function) nullptr
#endif

namespace troupe {

class CudaContext;  // ops/cuda/context.h
class CudaPeers;    // comm/cuda/peers.h

struct CudaTensor {
  void* data = nullptr;  // nullptr: an optional operand that is absent
  DType dtype = DType::f32;
  Shape shape;
  const int32_t* live_rows = nullptr;  // on the GPU; nullptr: not ragged
  int64_t expected_rows = 0;           // RowCount::expected

  template <class T>
  T* as() const {
    TROUPE_CHECK(data == nullptr || dtype == dtype_of<T>, "tensor read as another dtype");
    return static_cast<T*>(data);
  }
};

struct CudaKernelArguments {
  const Attributes* attributes = nullptr;
  std::span<const CudaTensor> inputs;
  std::span<const CudaTensor> outputs;
  std::byte* scratch = nullptr;  // KernelNeeds::scratch, uninitialised
  CUstream_st* stream = nullptr;
  CudaContext* context = nullptr;
  int32_t multiprocessors = 0;       // KernelChoice::multiprocessors, for the sizes of grids
  const CudaPeers* peers = nullptr;  // of collectives: the way to the other ranks' GPUs
  std::byte* staging = nullptr;      // KernelNeeds::staging, uninitialised

  template <class T>
  const T* in(int i) const {
    return input(i).as<T>();
  }
  template <class T>
  T* out(int i) const {
    return output(i).as<T>();
  }
  const CudaTensor& input(int i) const { return operand_at(inputs, i); }
  const CudaTensor& output(int i) const { return operand_at(outputs, i); }
};

using CudaKernel = void (*)(const CudaKernelArguments&);

// Whether rows of that many elements are made of packs of 16 bytes, which kernels read at once.
constexpr bool is_made_of_packs(int64_t row_elements, DType dtype) {
  return row_elements * static_cast<int64_t>(size_of(dtype)) % 16 == 0;
}

}  // namespace troupe
