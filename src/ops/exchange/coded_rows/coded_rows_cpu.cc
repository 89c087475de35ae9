#include <algorithm>

#include "ops/exchange/coded_rows/coded_block_cpu.h"
#include "ops/exchange/coded_rows/coded_rows.h"
#include "program/kernel.h"

namespace troupe {
namespace {

template <class T>
struct EncodeRowsKernel {
  static void run(const KernelArguments& args) {
    const int64_t elements = args.input(0).shape[1];
    const int64_t bytes = args.output(0).shape[1];
    const T* x = args.in<T>(0);
    uint8_t* coded = args.out<uint8_t>(0);
    args.pool->parallel_ranges(args.input(0).shape[0], row_grain(elements),
                               [=](int64_t begin, int64_t end, int) {
                                 for (int64_t row = begin; row < end; ++row) {
                                   encode_row(x + row * elements, elements, coded + row * bytes);
                                 }
                               });
  }
};

template <class T>
struct DecodeRowsKernel {
  static void run(const KernelArguments& args) {
    const TensorView& view = args.input(0);
    const int64_t elements = args.output(0).shape[1];
    const int64_t bytes = coded_row_bytes(elements);
    const uint8_t* coded = args.in<uint8_t>(0);
    const int32_t* received = args.input(1).as<int32_t>();
    const int64_t section =
        received == nullptr ? 0 : view.shape[0] / args.input(1).shape.elements();
    T* y = args.out<T>(0);
    args.pool->parallel_ranges(
        view.rows(), row_grain(elements), [=](int64_t begin, int64_t end, int) {
          for (int64_t row = begin; row < end; ++row) {
            if (received != nullptr && row % section >= received[row / section]) continue;
            decode_row(coded + row * bytes, elements, y + row * elements);
          }
        });
  }
};

template <class T>
struct RoundRowsKernel {
  static void run(const KernelArguments& args) {
    const T* x = args.in<T>(0);
    T* y = args.out<T>(0);
    args.pool->parallel_ranges(args.input(0).shape.elements() / kCodedBlock, row_grain(kCodedBlock),
                               [=](int64_t begin, int64_t end, int) {
                                 for (int64_t i = begin; i < end; ++i) {
                                   const CodedBlock block = encode_block(x + i * kCodedBlock);
                                   decode_block(block.codes.data(), block.scale,
                                                y + i * kCodedBlock);
                                 }
                               });
  }
};

template <class T>
struct RoundGradientKernel {
  static void run(const KernelArguments& args) {
    const T* x = args.in<T>(0);
    if (x != args.out<T>(0)) std::copy_n(x, args.input(0).shape.elements(), args.out<T>(0));
  }
};

}  // namespace

CpuKernel encode_rows_cpu_kernel(const OpView& op) {
  return select_float_kernel<EncodeRowsKernel>(op.input(0).dtype);
}

CpuKernel decode_rows_cpu_kernel(const OpView& op) {
  return select_float_kernel<DecodeRowsKernel>(op.output(0).dtype);
}

CpuKernel round_rows_cpu_kernel(const OpView& op) {
  return select_float_kernel<RoundRowsKernel>(op.input(0).dtype);
}

CpuKernel round_gradient_cpu_kernel(const OpView& op) {
  return select_float_kernel<RoundGradientKernel>(op.input(0).dtype);
}

}  // namespace troupe
