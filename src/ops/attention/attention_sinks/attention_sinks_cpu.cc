#include <cmath>

#include "ops/attention/attention_sinks/attention_sinks.h"
#include "ops/cpu/row_sums.h"
#include "program/kernel.h"

namespace troupe {
namespace {

template <class T>
struct AttentionSinkGradientKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const auto& attributes = args.attributes->as<AttentionSinkGradientAttributes>();
    const T* d_out = args.in<T>(0);
    const T* out = args.in<T>(1);
    const A* lse = args.in<A>(2);
    const A* sinks = args.in<A>(3);
    const Shape& shape = args.input(1).shape;
    const int64_t heads = attributes.heads;
    const int64_t e = attributes.value_dim;
    const int64_t first = attributes.first_sink;
    sum_rows(*args.pool, row_pieces(shape[0], shape[1]), shape[0], args.input(3).shape[0],
             reinterpret_cast<A*>(args.workspace), attributes.accumulate, args.out<A>(0),
             [=](int64_t row, A* partial) {
               for (int64_t head = 0; head < heads; ++head) {
                 const int64_t at = row * heads + head;
                 const A probability = std::exp(sinks[first + head] - lse[at]);
                 partial[first + head] -= probability * dot(d_out + at * e, out + at * e, e);
               }
             });
  }
};

}  // namespace

CpuKernel attention_sink_gradient_cpu_kernel(const OpView& op) {
  return select_float_kernel<AttentionSinkGradientKernel>(op.input(0).dtype);
}

}  // namespace troupe
