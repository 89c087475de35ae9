#include "ops/optimizer/gradient_norm/gradient_norm_cpu.h"

#include <algorithm>
#include <cmath>

#include "ops/cpu/vector.h"
#include "ops/optimizer/gradient_norm/gradient_norm.h"

namespace troupe {
namespace {

template <class T>
double sum_of_terms(const T* x, int64_t n, NormTerm term) {
  if (term == NormTerm::zero) {
    return lane_sum<double>(n,
                            [=](int64_t i) { return static_cast<double>(x[i]) == 0 ? 1.0 : 0.0; });
  }
  return lane_sum<double>(n, [=](int64_t i) {
    const auto value = static_cast<double>(x[i]);
    return value * value;
  });
}

}  // namespace

// One loop over the chunks of all gradients, so that many small ones cost no more than a large one.
void squared_norm_cpu(const KernelArguments& args) {
  const auto count = static_cast<int64_t>(args.inputs.size());
  auto* first_chunk = reinterpret_cast<int64_t*>(args.workspace);
  auto* partial = reinterpret_cast<double*>(first_chunk + count + 1);
  const auto& attributes = args.attributes->as<SquaredNormAttributes>();
  first_chunk[0] = 0;
  for (int64_t i = 0; i < count; ++i) {
    first_chunk[i + 1] = first_chunk[i] + norm_chunks(counted_elements(
                                              args.input(static_cast<int>(i)).shape, attributes));
  }
  args.pool->parallel_for(first_chunk[count], [&](int64_t chunk, int) {
    const auto i = static_cast<int>(std::upper_bound(first_chunk, first_chunk + count + 1, chunk) -
                                    first_chunk - 1);
    const IndexRange counted = counted_elements(args.input(i).shape, attributes);
    const int64_t begin = counted.begin + (chunk - first_chunk[i]) * kNormChunkElements;
    const int64_t size = std::min(kNormChunkElements, counted.end - begin);
    switch (args.input(i).dtype) {
      case DType::f64:
        partial[chunk] = sum_of_terms(args.in<double>(i) + begin, size, attributes.term);
        break;
      case DType::f32:
        partial[chunk] = sum_of_terms(args.in<float>(i) + begin, size, attributes.term);
        break;
      default:
        partial[chunk] = sum_of_terms(args.in<bf16>(i) + begin, size, attributes.term);
    }
  });
  double total = 0;
  for (int64_t i = 0; i < count; ++i) {
    double squares = 0;
    for (int64_t c = first_chunk[i]; c < first_chunk[i + 1]; ++c) squares += partial[c];
    total += squares;
  }
  args.out<double>(0)[0] = total;
}

void clip_coefficient_cpu(const KernelArguments& args) {
  const auto& [max_norm, skip_norm] = args.attributes->as<ClipAttributes>();
  const double* faults = args.in<double>(1);
  const double* loss_scale = args.in<double>(2);
  const double scale = loss_scale != nullptr ? *loss_scale : 1.0;
  const double norm = std::sqrt(args.in<double>(0)[0]) / scale;
  const bool finite = std::isfinite(norm);
  args.out<double>(0)[0] = norm;
  const double clip = finite && max_norm > 0 ? std::min(1.0, max_norm / (norm + 1e-6)) : 1.0;
  args.out<double>(1)[0] = clip / scale;
  const bool is_void = faults != nullptr && *faults != 0;
  args.out<int32_t>(2)[0] = finite && norm <= skip_norm && !is_void ? 0 : 1;
}

}  // namespace troupe
