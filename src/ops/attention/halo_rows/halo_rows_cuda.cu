#include "ops/attention/halo_rows/halo_rows.h"
#include "ops/attention/halo_rows/halo_sources.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

// A block for each row of y.
template <class T>
__global__ void halo_rows_kernel(const T* x, T* y, HaloRowsAttributes a, int64_t pieces,
                                 int64_t columns) {
  const int64_t row = blockIdx.x;
  const HaloSources sources = halo_sources(a, pieces, row);
  const int64_t one = sources.first > sources.second ? sources.first : sources.second;
  const int64_t other = sources.first > sources.second ? sources.second : sources.first;
  for (int64_t i = threadIdx.x; i < columns; i += blockDim.x) {
    accumulation_t<T> sum = 0;
    if (one >= 0) sum = widen(x[one * columns + i]);
    if (other >= 0) sum += widen(x[other * columns + i]);
    y[row * columns + i] = round_to<T>(sum);
  }
}

template <class T>
struct HaloRowsCuda {
  static void run(const CudaKernelArguments& args) {
    const auto a = args.attributes->as<HaloRowsAttributes>();
    const Shape& y = args.output(0).shape;
    if (y.elements() == 0) return;
    launch(args, {static_cast<unsigned>(y[0]), threads_for_row(y[1], 2)}, halo_rows_kernel<T>,
           args.in<T>(0), args.out<T>(0), a, halo_pieces(a, args.input(0).shape[0]), y[1]);
  }
};

}  // namespace

CudaKernel halo_rows_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<HaloRowsCuda>(op.input(0).dtype);
}

}  // namespace troupe
