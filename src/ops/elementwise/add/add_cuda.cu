#include "ops/elementwise/add/add.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

template <class T>
__global__ void add_kernel(const T* a, const T* b, T* y, LiveRows rows, int64_t row_elements) {
  const auto sum = [](T x, T z) { return round_to<T>(widen(x) + widen(z)); };
  for_packs<T>(
      live_elements(rows, row_elements),
      [=](int64_t i) {
        const Pack<T> x = load_pack(a + i);
        const Pack<T> z = load_pack(b + i);
        Pack<T> result;
#pragma unroll
        for (int j = 0; j < Pack<T>::kElements; ++j)
          result.values[j] = sum(x.values[j], z.values[j]);
        store_pack(y + i, result);
      },
      [=](int64_t i) { y[i] = sum(a[i], b[i]); });
}

template <class T>
struct AddCuda {
  static void run(const CudaKernelArguments& args) {
    const Shape& shape = args.input(0).shape;
    launch(args, {blocks_for(args, shape.elements(), 256 * Pack<T>::kElements), 256}, add_kernel<T>,
           args.in<T>(0), args.in<T>(1), args.out<T>(0), LiveRows(args.input(0)),
           shape.row_elements());
  }
};

}  // namespace

CudaKernel add_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<AddCuda>(op.output(0).dtype);
}

}  // namespace troupe
