// Mixing several data sets: what --data-path may say, and from which data set each sample of the
// mixture comes (docs/data_format.md, "Several data sets").
//
// Weights are normalised with numpy's order of summation. The mixture is greedy: sample i is the
// next one of the data set that is furthest below its share, so every beginning of the mixture
// keeps the shares, and which one sample i is does not depend on how many are asked for.
//
// Pure functions and plain values; const use from any thread. Errors are UserErrors.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/sample_order.h"

namespace troupe {

// The data sets that a run reads.
struct DataPath {
  std::vector<std::string> prefixes;
  std::vector<double> weights;  // one for each, above 0, as given; or empty: by their sizes
};

// Megatron's forms: one prefix; pairs of weight and prefix (an even number of words of which every
// first one is a number); or several prefixes. `flag` is named in messages.
DataPath parse_data_path(std::span<const std::string> words, std::string_view flag);

// The words of a file that stands for --data-path, separated by white space.
std::vector<std::string> read_data_args(const std::string& path);

// Divided by their sum, which is added up as numpy.sum does.
std::vector<double> normalize_weights(std::span<const double> weights);

// Samples to ask of a data set with this normalised weight for a mixture of `size`: its share and a
// surplus of half a percent, each rounded up.
int64_t samples_to_request(int64_t size, double weight);

// From which data set each sample of a mixture comes, and which of that one's samples it is.
class BlendOrder {
 public:
  BlendOrder() = default;

  // `weights` are normalised, at most 32,767; `available` are the samples that each data set has.
  // The mixture has `size` samples, or fewer: it ends where a data set whose turn it is has none
  // left. With `exhaustive`, such data sets are passed over, and it ends when all are spent.
  BlendOrder(std::span<const double> weights, std::span<const int64_t> available, int64_t size,
             bool exhaustive);

  int64_t size() const { return static_cast<int64_t>(member_.size()); }
  size_t member(int64_t i) const { return member_[static_cast<size_t>(i)]; }
  int64_t sample(int64_t i) const { return sample_[i]; }

 private:
  std::vector<uint16_t> member_;
  IndexArray sample_;
};

}  // namespace troupe
