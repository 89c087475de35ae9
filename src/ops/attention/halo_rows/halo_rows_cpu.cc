#include <algorithm>

#include "ops/attention/halo_rows/halo_rows.h"
#include "ops/attention/halo_rows/halo_sources.h"
#include "ops/cpu/vector.h"
#include "program/kernel.h"

namespace troupe {
namespace {

template <class T>
struct HaloRowsKernel {
  static void run(const KernelArguments& args) {
    const auto a = args.attributes->as<HaloRowsAttributes>();
    const Shape& to = args.output(0).shape;
    const int64_t columns = to[1];
    const int64_t pieces = halo_pieces(a, args.input(0).shape[0]);
    const T* x = args.in<T>(0);
    T* y = args.out<T>(0);
    args.pool->parallel_ranges(to[0], row_grain(columns), [=](int64_t begin, int64_t end, int) {
      for (int64_t row = begin; row < end; ++row) {
        const HaloSources sources = halo_sources(a, pieces, row);
        const int64_t one = std::max(sources.first, sources.second);
        const int64_t other = std::min(sources.first, sources.second);
        T* out = y + row * columns;
        if (one < 0) {
          std::fill_n(out, columns, T(0.0F));
        } else if (other < 0) {
          std::copy_n(x + one * columns, columns, out);
        } else {
          const T* a = x + one * columns;
          const T* b = x + other * columns;
          for (int64_t i = 0; i < columns; ++i) out[i] = T(widen(a[i]) + widen(b[i]));
        }
      }
    });
  }
};

}  // namespace

CpuKernel halo_rows_cpu_kernel(const OpView& op) {
  return select_float_kernel<HaloRowsKernel>(op.input(0).dtype);
}

}  // namespace troupe
