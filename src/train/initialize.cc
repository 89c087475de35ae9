#include "train/initialize.h"

namespace troupe {
namespace {

constexpr int64_t kGrain = 1 << 14;

template <class T>
void fill(const Parameter& parameter, const TensorView& view, uint64_t seed, ThreadPool& pool) {
  T* data = view.as<T>();
  pool.parallel_ranges(view.shape.elements(), kGrain, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      data[i] = static_cast<T>(initial_value(parameter, seed, i));
    }
  });
}

}  // namespace

void initialize_parameters(const ModelState& state, const StateStorage& storage, uint64_t seed,
                           ThreadPool& pool) {
  for (const Parameter& parameter : state.parameters) {
    for (const StateId id : {parameter.value, parameter.master}) {
      if (!id.valid()) continue;
      const TensorView view = storage.view(id);
      switch (view.dtype) {
        case DType::f64:
          fill<double>(parameter, view, seed, pool);
          break;
        case DType::f32:
          fill<float>(parameter, view, seed, pool);
          break;
        default:
          fill<bf16>(parameter, view, seed, pool);
          break;
      }
    }
  }
}

}  // namespace troupe
