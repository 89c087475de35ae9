#include <algorithm>
#include <cmath>

#include "ops/attention/rope/rope.h"
#include "ops/attention/rope/turn_pairs.h"
#include "ops/cpu/vector.h"
#include "program/kernel.h"

namespace troupe {
namespace {

template <class A>
void run_rope_table(const KernelArguments& args) {
  const auto attributes = args.attributes->as<RopeTableAttributes>();
  A* table = args.out<A>(0);
  const int64_t pairs = attributes.rotary_dim / 2;
  const double concentration = attributes.scaling.concentration;
  const auto fill_positions = [=](int64_t begin, int64_t end, int) {
    for (int64_t i = 0; i < pairs; ++i) {
      const double frequency =
          rope_frequency(i, attributes.rotary_dim, attributes.base, attributes.scaling);
      for (int64_t row = begin; row < end; ++row) {
        const int64_t position = attributes.chunks.position(row, attributes.positions);
        const double angle = static_cast<double>(position) * frequency;
        table[(row * pairs + i) * 2] = static_cast<A>(concentration * std::cos(angle));
        table[(row * pairs + i) * 2 + 1] = static_cast<A>(concentration * std::sin(angle));
      }
    }
  };
  // A sine costs some 20 ns: a chunk is about 100 us.
  args.pool->parallel_ranges(attributes.positions, std::max<int64_t>(1, 2048 / pairs),
                             fill_positions);
}

template <class T>
struct RopeKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const auto attributes = args.attributes->as<RopeAttributes>();
    const T* qkv = args.in<T>(0);
    const A* table = args.in<A>(1);
    T* y = args.out<T>(0);
    const A sign = attributes.inverse ? A(-1) : A(1);
    const int64_t d = attributes.head_dim;
    const int64_t rotary = attributes.rotary_dim;
    const int64_t first = attributes.first;
    const PairLayout layout{.dim = rotary, .interleaved = attributes.interleaved};
    const int64_t width = args.input(0).shape[1];
    const int64_t turned = attributes.heads + attributes.groups;
    const auto turn_rows = [=](int64_t begin, int64_t end, int) {
      for (int64_t row = begin; row < end; ++row) {
        const T* in = qkv + row * width;
        T* out = y + row * width;
        const A* angles = table + row % attributes.sequence * rotary;
        for (int64_t head = 0; head < turned; ++head) {
          const T* x = in + head * d;
          T* turned_x = out + head * d;
          turn_pairs(x + first, angles, sign, layout, turned_x + first);
          if (out == in) continue;
          std::copy(x, x + first, turned_x);
          std::copy(x + first + rotary, x + d, turned_x + first + rotary);
        }
        if (out != in) std::copy(in + turned * d, in + width, out + turned * d);
      }
    };
    args.pool->parallel_ranges(args.input(0).rows(), row_grain(width), turn_rows);
  }
};

}  // namespace

CpuKernel rope_table_cpu_kernel(const OpView& op) {
  return op.output(0).dtype == DType::f64 ? &run_rope_table<double> : &run_rope_table<float>;
}

CpuKernel rope_cpu_kernel(const OpView& op) {
  return select_float_kernel<RopeKernel>(op.output(0).dtype);
}

}  // namespace troupe
