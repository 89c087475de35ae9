#include "train/initialize.h"

#include <algorithm>
#include <span>
#include <vector>

namespace troupe {
namespace {

constexpr int64_t kGrain = 1 << 14;
// Values that are drawn at a time; they stay in the first-level cache.
constexpr int64_t kBlock = 1024;

// Elements `first` on of the rank's slice.
template <class T>
void fill(const Parameter& parameter, std::span<const SliceRun> runs, int64_t first,
          const TensorView& view, uint64_t seed, ThreadPool& pool) {
  T* data = view.as<T>() - first;
  pool.parallel_ranges(view.shape.elements(), kGrain, [&](int64_t begin, int64_t end, int) {
    begin += first;
    end += first;
    auto run = std::upper_bound(runs.begin(), runs.end(), begin,
                                [](int64_t i, const SliceRun& other) { return i < other.own; }) -
               1;
    for (; begin < end; ++run) {
      const int64_t to_whole = run->whole - run->own;
      const int64_t stop = std::min(end, run->own + run->elements);
      while (begin < stop) {
        double values[kBlock];
        const int64_t count = std::min(kBlock, stop - begin);
        fill_initial_values(parameter, seed, begin + to_whole, count, values);
        std::transform(values, values + count, data + begin,
                       [](double value) { return static_cast<T>(value); });
        begin += count;
      }
    }
  });
}

}  // namespace

void initialize_parameters(const ModelState& state, const StateStorage& storage, uint64_t seed,
                           ThreadPool& pool) {
  for (const Parameter& parameter : state.parameters) {
    const std::vector<SliceRun> runs = runs_of(parameter.slice, parameter.whole_shape);
    for (const StateId id : {parameter.value, parameter.master}) {
      if (!id.valid() || !(*state.table)[id].is_stored) continue;
      const TensorView view = storage.view(id);
      const IndexRange& held =
          id.index == parameter.master.index ? parameter.shard : parameter.held;
      const int64_t first = held.begin;
      switch (view.dtype) {
        case DType::f64:
          fill<double>(parameter, runs, first, view, seed, pool);
          break;
        case DType::f32:
          fill<float>(parameter, runs, first, view, seed, pool);
          break;
        case DType::f16:
          fill<f16>(parameter, runs, first, view, seed, pool);
          break;
        default:
          fill<bf16>(parameter, runs, first, view, seed, pool);
          break;
      }
    }
  }
}

}  // namespace troupe
