#include "report/load_history.h"

#include <algorithm>

namespace troupe {
namespace {

// What a page shows: columns of a heat map, and numbers in all.
constexpr size_t kMostStretches = 160;
constexpr size_t kFewestStretches = 16;
constexpr size_t kMostNumbers = 300'000;

void add_rows(std::vector<LoadHistory::LayerRows>& sum,
              std::span<const LoadHistory::LayerRows> more) {
  for (size_t i = 0; i < sum.size(); ++i) {
    for (size_t j = 0; j < sum[i].rows.size(); ++j) sum[i].rows[j] += more[i].rows[j];
  }
}

}  // namespace

size_t LoadHistory::most_stretches() const {
  size_t experts = 0;
  for (const LayerRows& layer : stretches_.front()) experts += layer.rows.size();
  return std::clamp(kMostNumbers / std::max<size_t>(1, experts), kFewestStretches, kMostStretches);
}

bool LoadHistory::add(int64_t step, std::span<const LayerRows> layers) {
  if (!stretches_.empty() &&
      !std::equal(layers.begin(), layers.end(), stretches_.front().begin(),
                  stretches_.front().end(), [](const LayerRows& a, const LayerRows& b) {
                    return a.layer == b.layer && a.rows.size() == b.rows.size();
                  })) {
    return false;
  }
  if (!stretches_.empty() && steps_in_last_ < steps_per_stretch_) {
    add_rows(stretches_.back(), layers);
    ++steps_in_last_;
    return true;
  }
  if (!stretches_.empty() && stretches_.size() >= most_stretches()) merge_neighbours();
  if (!stretches_.empty() && steps_in_last_ < steps_per_stretch_) return add(step, layers);
  first_steps_.push_back(step);
  stretches_.emplace_back(layers.begin(), layers.end());
  steps_in_last_ = 1;
  return true;
}

void LoadHistory::merge_neighbours() {
  const bool odd = stretches_.size() % 2 != 0;
  size_t kept = 0;
  for (size_t i = 0; i < stretches_.size(); i += 2, ++kept) {
    if (kept != i) {
      stretches_[kept] = std::move(stretches_[i]);
      first_steps_[kept] = first_steps_[i];
    }
    if (i + 1 < stretches_.size()) add_rows(stretches_[kept], stretches_[i + 1]);
  }
  stretches_.resize(kept);
  first_steps_.resize(kept);
  steps_in_last_ = odd ? steps_per_stretch_ : 2 * steps_per_stretch_;
  steps_per_stretch_ *= 2;
}

}  // namespace troupe
