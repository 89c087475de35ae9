#include <algorithm>

#include "ops/attention/join_rotated/join_rotated.h"
#include "ops/attention/rope/turn_pairs.h"
#include "ops/cpu/vector.h"
#include "program/kernel.h"

namespace troupe {
namespace {

// Calls body(row, head, the row of the table) for all heads of all rows.
template <class A, class Body>
void for_each_head(const KernelArguments& args, const JoinRotatedAttributes& a, const A* table,
                   const Body& body) {
  args.pool->parallel_ranges(args.input(0).shape[0], row_grain(int64_t{a.heads} * a.head_dim()),
                             [&](int64_t begin, int64_t end, int) {
                               for (int64_t row = begin; row < end; ++row) {
                                 const A* angles = table + row % a.sequence * a.rotary_dim;
                                 for (int64_t head = 0; head < a.heads; ++head) {
                                   body(row * a.heads + head, angles);
                                 }
                               }
                             });
}

template <class T>
struct JoinRotatedKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const auto& a = args.attributes->as<JoinRotatedAttributes>();
    const PairLayout layout{.dim = a.rotary_dim, .interleaved = a.interleaved};
    for_each_head(args, a, args.in<A>(2), [&](int64_t head, const A* angles) {
      T* y = args.out<T>(0) + head * a.head_dim();
      std::copy_n(args.in<T>(0) + head * a.plain_dim, a.plain_dim, y);
      turn_pairs(args.in<T>(1) + head * a.rotary_dim, angles, A(1), layout, y + a.plain_dim);
    });
  }
};

template <class T>
struct JoinRotatedGradientKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const auto& a = args.attributes->as<JoinRotatedAttributes>();
    const PairLayout layout{.dim = a.rotary_dim, .interleaved = a.interleaved};
    for_each_head(args, a, args.in<A>(1), [&](int64_t head, const A* angles) {
      const T* dy = args.in<T>(0) + head * a.head_dim();
      std::copy_n(dy, a.plain_dim, args.out<T>(0) + head * a.plain_dim);
      turn_pairs(dy + a.plain_dim, angles, A(-1), layout, args.out<T>(1) + head * a.rotary_dim);
    });
  }
};

}  // namespace

CpuKernel join_rotated_cpu_kernel(const OpView& op) {
  return select_float_kernel<JoinRotatedKernel>(op.output(0).dtype);
}

CpuKernel join_rotated_gradient_cpu_kernel(const OpView& op) {
  return select_float_kernel<JoinRotatedGradientKernel>(op.output(0).dtype);
}

}  // namespace troupe
