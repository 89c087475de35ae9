#include "data/blend.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <fmt/format.h>
#include <fstream>
#include <numeric>
#include <optional>

#include "base/error.h"
#include "base/text.h"

namespace troupe {
namespace {

constexpr size_t kMaxMembers = 32767;
constexpr double kSurplus = 0.005;

// The number that a word is, as a whole.
std::optional<double> number_of(std::string_view word) {
  if (word.starts_with('+')) word.remove_prefix(1);
  double value = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (end != word.data() + word.size() || error == std::errc::invalid_argument) return std::nullopt;
  // Too large or too small for a double: a number, and no weight.
  return error == std::errc() ? value : std::nan("");
}

// numpy.sum: pairwise above 128 elements, in eight lanes from 8 on, else in order.
double pairwise_sum(std::span<const double> values) {
  const size_t n = values.size();
  if (n < 8) return std::accumulate(values.begin(), values.end(), 0.0);
  if (n > 128) {
    const size_t half = n / 2 - n / 2 % 8;
    return pairwise_sum(values.first(half)) + pairwise_sum(values.subspan(half));
  }
  double lanes[8];
  std::copy_n(values.begin(), 8, lanes);
  size_t i = 8;
  for (; i + 8 <= n; i += 8) {
    for (size_t lane = 0; lane < 8; ++lane) lanes[lane] += values[i + lane];
  }
  const double sum = ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) +
                     ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
  return std::accumulate(values.begin() + static_cast<std::ptrdiff_t>(i), values.end(), sum);
}

}  // namespace

DataPath parse_data_path(std::span<const std::string> words, std::string_view flag) {
  TROUPE_CHECK(!words.empty(), "a data path of no words");
  DataPath path;
  bool pairs = words.size() % 2 == 0;
  for (size_t i = 0; i < words.size(); i += 2) pairs = pairs && number_of(words[i]).has_value();
  if (!pairs) {
    for (const std::string& word : words) {
      if (words.size() > 1 && number_of(word)) {
        throw_bad_request(fmt::format(
            "{}: '{}' is a number, but the list is not one of pairs WEIGHT PREFIX; give a weight "
            "to every data set or to none (a data set of that name: ./{})",
            flag, printable(word), printable(word)));
      }
    }
    path.prefixes.assign(words.begin(), words.end());
  } else {
    for (size_t i = 0; i < words.size(); i += 2) {
      const double weight = *number_of(words[i]);
      if (!std::isfinite(weight) || weight <= 0) {
        throw_bad_request(
            fmt::format("{}: the weight of {} is {}; weights are numbers above 0 (leave out a data "
                        "set that is not to be read)",
                        flag, words[i + 1], words[i]));
      }
      path.weights.push_back(weight);
      path.prefixes.push_back(words[i + 1]);
    }
    if (!std::isfinite(std::accumulate(path.weights.begin(), path.weights.end(), 0.0))) {
      throw_bad_request(fmt::format("{}: the weights are too large to be added", flag));
    }
  }
  if (path.prefixes.size() > kMaxMembers) {
    throw_bad_request(
        fmt::format("{}: {} data sets are more than {}", flag, path.prefixes.size(), kMaxMembers));
  }
  return path;
}

std::vector<std::string> read_data_args(const std::string& path) {
  std::ifstream file(path);
  if (!file) {
    throw_bad_request(fmt::format("--data-args-path {}: the file cannot be opened", path));
  }
  std::vector<std::string> words;
  for (std::string word; file >> word;) words.push_back(word);
  if (file.bad()) throw_failed(fmt::format("--data-args-path {}: cannot be read", path));
  if (words.empty()) {
    throw_bad_request(fmt::format(
        "--data-args-path {}: the file is empty; it holds what --data-path takes", path));
  }
  return words;
}

std::vector<double> normalize_weights(std::span<const double> weights) {
  const double sum = pairwise_sum(weights);
  std::vector<double> normalized(weights.begin(), weights.end());
  for (double& weight : normalized) weight /= sum;
  return normalized;
}

int64_t samples_to_request(int64_t size, double weight) {
  const double share = std::ceil(static_cast<double>(size) * weight);
  return static_cast<int64_t>(std::ceil(share * (1 + kSurplus)));
}

BlendOrder::BlendOrder(std::span<const double> weights, std::span<const int64_t> available,
                       int64_t size, bool exhaustive) {
  TROUPE_CHECK(weights.size() == available.size() && weights.size() <= kMaxMembers,
               "a weight for each data set");
  const int64_t total = std::accumulate(available.begin(), available.end(), int64_t{0});
  size = std::min(size, total);
  member_.reserve(static_cast<size_t>(size));
  sample_ = IndexArray(size, *std::max_element(available.begin(), available.end()));
  std::vector<int64_t> taken(weights.size());
  for (int64_t i = 0; i < size; ++i) {
    const auto reach = static_cast<double>(std::max<int64_t>(i, 1));
    size_t chosen = weights.size();
    double largest = 0;
    for (size_t d = 0; d < weights.size(); ++d) {
      if (exhaustive && taken[d] == available[d]) continue;
      // The product is rounded before the difference is taken: fused into one operation, ties (as
      // of 0.7 and 0.3 after ten samples) would be decided by bits that a double does not hold.
      const volatile double share = weights[d] * reach;
      const double behind = share - static_cast<double>(taken[d]);
      if (chosen < weights.size() && behind <= largest) continue;
      chosen = d;
      largest = behind;
    }
    if (taken[chosen] == available[chosen]) break;
    member_.push_back(static_cast<uint16_t>(chosen));
    sample_.set(i, taken[chosen]++);
  }
}

}  // namespace troupe
