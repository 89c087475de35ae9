// How the rows of a run's experts were spread, by layer and time, in bounded memory.
//
// Steps are gathered in stretches of as many logged steps each. When there are too many stretches,
// each two that are neighbours become one. One thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace troupe {

class LoadHistory {
 public:
  struct LayerRows {
    int32_t layer = 0;
    std::vector<double> rows;  // by expert
  };

  // The rows of one logged step, each above the one before. False, and nothing is added, if its
  // layers or numbers of experts are not those of the steps before.
  bool add(int64_t step, std::span<const LayerRows> layers);

  bool empty() const { return first_steps_.empty(); }
  // Of each stretch: its first step.
  const std::vector<int64_t>& first_steps() const { return first_steps_; }
  // Rows of each stretch, summed over its steps: the layers in the order of add().
  const std::vector<std::vector<LayerRows>>& stretches() const { return stretches_; }

 private:
  size_t most_stretches() const;
  void merge_neighbours();

  std::vector<int64_t> first_steps_;
  std::vector<std::vector<LayerRows>> stretches_;
  int64_t steps_per_stretch_ = 1;
  int64_t steps_in_last_ = 0;
};

}  // namespace troupe
