// What a CPU kernel is given: views of its operands, its attributes, its private memory, and a
// thread pool. Everything is bound before the first run; a kernel allocates nothing, keeps nothing,
// and never fails (its operands were checked when the operation was emitted). Only collectives may
// throw, see program/communicator.h.
//
// Determinism: a kernel splits its work by the problem's sizes alone, so its result is the same
// bits for any number of threads and any placement of its (64-byte aligned) operands.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/dtype.h"
#include "base/error.h"
#include "base/shape.h"
#include "base/thread_pool.h"
#include "program/op.h"
#include "program/select_kernel.h"

namespace troupe {

class Communicator;

struct TensorView {
  void* data = nullptr;  // nullptr: an optional operand that is absent
  DType dtype = DType::f32;
  Shape shape;
  const int32_t* live_rows =
      nullptr;  // where the live count of dimension 0 is; nullptr: not ragged

  // Live extent of dimension 0. For ragged tensors this reads the device counter.
  int64_t rows() const { return live_rows != nullptr ? *live_rows : shape[0]; }
  // Of these rows; of a tensor that is not ragged, all.
  int64_t live_elements() const {
    return live_rows != nullptr ? rows() * shape.row_elements() : shape.elements();
  }

  template <class T>
  T* as() const {
    TROUPE_CHECK(data == nullptr || dtype == dtype_of<T>, "tensor read as another dtype");
    return static_cast<T*>(data);
  }
};

struct KernelArguments {
  const Attributes* attributes = nullptr;
  std::span<const TensorView> inputs;
  std::span<const TensorView> outputs;
  std::byte* workspace = nullptr;       // CpuSpec::workspace, shared by all threads
  std::byte* scratch = nullptr;         // CpuSpec::scratch for each thread, see below
  size_t scratch_bytes_per_thread = 0;  // a multiple of 64
  ThreadPool* pool = nullptr;
  // Of collectives: the way to the other ranks, and which operation this is.
  Communicator* communicator = nullptr;
  const Op* op = nullptr;
  int32_t op_index = -1;

  template <class T>
  const T* in(int i) const {
    return input(i).as<T>();
  }
  template <class T>
  T* out(int i) const {
    return output(i).as<T>();
  }
  const TensorView& input(int i) const { return operand_at(inputs, i); }
  const TensorView& output(int i) const { return operand_at(outputs, i); }

  // The private, uninitialised scratch memory of one worker of the pool.
  template <class T>
  T* thread_scratch(int worker) const {
    return reinterpret_cast<T*>(scratch + static_cast<size_t>(worker) * scratch_bytes_per_thread);
  }
};

using CpuKernel = void (*)(const KernelArguments&);

// Kernel<T>::run for T = double, float, bf16 or f16 according to `dtype`; used by CpuSpec::kernel.
template <template <class> class Kernel>
CpuKernel select_float_kernel(DType dtype) {
  return select_kernel_of<Kernel, bf16, f16>(dtype);
}

}  // namespace troupe
