#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "ops/cpu/vector.h"
#include "ops/exchange/coded_rows/coded_rows.h"
#include "ops/precision/scale_blocks.h"
#include "program/kernel.h"

namespace troupe {
namespace {

// A block in 8 bits.
struct CodedBlock {
  std::array<f8e4m3, kCodedBlock> codes;
  uint8_t scale;
};

template <class T>
CodedBlock encode_block(const T* x) {
  std::array<float, kCodedBlock> values;
  uint32_t largest = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(widen(x[i]));
    largest = std::max(largest, std::bit_cast<uint32_t>(values[i]) & 0x7fffffffU);
  }
  CodedBlock block;
  block.scale = scale_exponent(largest);
  const float factor = 1 / exponent_scale(block.scale);
  for (size_t i = 0; i < values.size(); ++i) block.codes[i] = f8e4m3::nearest(values[i] * factor);
  return block;
}

template <class T>
void decode_block(const f8e4m3* codes, uint8_t scale, T* y) {
  using A = accumulation_t<T>;
  for (int64_t i = 0; i < kCodedBlock; ++i) {
    y[i] = T(static_cast<A>(static_cast<float>(codes[i])) * static_cast<A>(exponent_scale(scale)));
  }
}

template <class T>
struct EncodeRowsKernel {
  static void run(const KernelArguments& args) {
    const int64_t elements = args.input(0).shape[1];
    const int64_t bytes = args.output(0).shape[1];
    const T* x = args.in<T>(0);
    uint8_t* coded = args.out<uint8_t>(0);
    args.pool->parallel_ranges(
        args.input(0).shape[0], row_grain(elements), [=](int64_t begin, int64_t end, int) {
          for (int64_t row = begin; row < end; ++row) {
            uint8_t* to = coded + row * bytes;
            uint8_t* scales = to + elements;
            for (int64_t first = 0; first < elements; first += kCodedBlock) {
              const CodedBlock block = encode_block(x + row * elements + first);
              for (size_t i = 0; i < block.codes.size(); ++i) to[i] = block.codes[i].bits;
              to += kCodedBlock;
              *scales++ = block.scale;
            }
            std::fill(scales, coded + (row + 1) * bytes, uint8_t{0});
          }
        });
  }
};

template <class T>
struct DecodeRowsKernel {
  static void run(const KernelArguments& args) {
    const TensorView& view = args.input(0);
    const int64_t elements = args.output(0).shape[1];
    const auto* coded = reinterpret_cast<const f8e4m3*>(args.in<uint8_t>(0));
    const int32_t* received = args.input(1).as<int32_t>();
    const int64_t section =
        received == nullptr ? 0 : view.shape[0] / args.input(1).shape.elements();
    T* y = args.out<T>(0);
    args.pool->parallel_ranges(
        view.rows(), row_grain(elements), [=](int64_t begin, int64_t end, int) {
          for (int64_t row = begin; row < end; ++row) {
            if (received != nullptr && row % section >= received[row / section]) continue;
            const f8e4m3* codes = coded + row * coded_row_bytes(elements);
            const f8e4m3* scales = codes + elements;
            for (int64_t first = 0; first < elements; first += kCodedBlock) {
              decode_block(codes + first, (scales++)->bits, y + row * elements + first);
            }
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
