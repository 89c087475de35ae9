#include "ops/attention/join_rotated/join_rotated.h"
#include "ops/attention/rope/turning.cuh"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

// A block for each row.
template <class T, int kStep>
__global__ void join_rotated_kernel(const T* plain, const T* turning,
                                    const accumulation_t<T>* table, T* y, JoinRotatedAttributes a) {
  using A = accumulation_t<T>;
  const int64_t row = blockIdx.x;
  const Turning pairs{a.rotary_dim, a.interleaved};
  const A* angles = table + row % a.sequence * a.rotary_dim;
  const int dim = a.head_dim();
  for_row_steps<kStep>(int64_t{a.heads} * dim, [&](int64_t i) {
    const int64_t head = row * a.heads + i / dim;
    const int e = static_cast<int>(i % dim) - a.plain_dim;
    store_step<T, kStep>(
        y + row * a.heads * dim + i,
        e < 0 ? load_step<T, kStep>(plain + (head + 1) * a.plain_dim + e)
              : pairs.turned_step<T, kStep>(turning + head * a.rotary_dim, e, angles, A(1)));
  });
}

template <class T, int kStep>
__global__ void join_rotated_gradient_kernel(const T* dy, const accumulation_t<T>* table,
                                             T* d_plain, T* d_turning, JoinRotatedAttributes a) {
  using A = accumulation_t<T>;
  const int64_t row = blockIdx.x;
  const Turning pairs{a.rotary_dim, a.interleaved};
  const A* angles = table + row % a.sequence * a.rotary_dim;
  const int dim = a.head_dim();
  const T* dy_row = dy + row * a.heads * dim;
  for_row_steps<kStep>(int64_t{a.heads} * dim, [&](int64_t i) {
    const int64_t head = row * a.heads + i / dim;
    const int e = static_cast<int>(i % dim) - a.plain_dim;
    if (e < 0) {
      store_step<T, kStep>(d_plain + (head + 1) * a.plain_dim + e, load_step<T, kStep>(dy_row + i));
    } else {
      store_step<T, kStep>(d_turning + head * a.rotary_dim + e,
                           pairs.turned_step<T, kStep>(dy_row + i - e, e, angles, A(-1)));
    }
  });
}

// `rows`: the joined ones.
Launch launch_of_rows(const Shape& rows, int64_t step) {
  return {static_cast<unsigned>(rows[0]), threads_for_row(rows[1], step)};
}

template <class T>
struct JoinRotatedCuda {
  static void run(const CudaKernelArguments& args) {
    const auto& a = args.attributes->as<JoinRotatedAttributes>();
    constexpr int kPack = Pack<T>::kElements;
    const bool packs = joins_packs(a, dtype_of<T>);
    launch(args, launch_of_rows(args.output(0).shape, packs ? kPack : 1),
           packs ? join_rotated_kernel<T, kPack> : join_rotated_kernel<T, 1>, args.in<T>(0),
           args.in<T>(1), args.in<accumulation_t<T>>(2), args.out<T>(0), a);
  }
};

template <class T>
struct JoinRotatedGradientCuda {
  static void run(const CudaKernelArguments& args) {
    const auto& a = args.attributes->as<JoinRotatedAttributes>();
    constexpr int kPack = Pack<T>::kElements;
    const bool packs = joins_packs(a, dtype_of<T>);
    launch(args, launch_of_rows(args.input(0).shape, packs ? kPack : 1),
           packs ? join_rotated_gradient_kernel<T, kPack> : join_rotated_gradient_kernel<T, 1>,
           args.in<T>(0), args.in<accumulation_t<T>>(1), args.out<T>(0), args.out<T>(1), a);
  }
};

}  // namespace

CudaKernel join_rotated_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<JoinRotatedCuda>(op.output(0).dtype);
}

CudaKernel join_rotated_gradient_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<JoinRotatedGradientCuda>(op.output(0).dtype);
}

}  // namespace troupe
