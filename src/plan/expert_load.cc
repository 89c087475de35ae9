#include "plan/expert_load.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "base/random.h"
#include "ops/routing/clone_placement/clone_placement.h"

namespace troupe {
namespace {

std::vector<int32_t> divisors_of(int32_t number) {
  std::vector<int32_t> divisors;
  for (int32_t each = 1; each <= number; ++each) {
    if (number % each == 0) divisors.push_back(each);
  }
  return divisors;
}

// The expected largest of `count` independent gamma variables of the parameter a, over their mean.
// With t = log x the density is f(t) = exp(a t - exp(t)) / gamma(a), which is smooth and falls off
// on both sides, within 1/sqrt(a) of log(a) above a = 1. Its integral F goes from point to point by
// the trapezoid rule with the correction of both ends' slopes, f' = f (a - exp(t)), and the result
// is the integral of exp(t) count F^(count - 1) f.
double largest_of_gammas(double a, int32_t count) {
  constexpr double kWidths = 40;  // below the mean: exp(-40) is nothing beside 1
  constexpr double kStep = 0.01;  // of a width
  const double width = 1 / std::sqrt(std::max(1.0, a));
  const double begin = std::log(a) - kWidths * width;
  const double end = std::log(a + 12 * std::sqrt(a) + 80);
  const auto points = static_cast<int64_t>(std::ceil((end - begin) / (kStep * width)));
  const double step = (end - begin) / static_cast<double>(points);
  const double log_gamma = std::lgamma(a);
  double density = std::exp(a * begin - std::exp(begin) - log_gamma);
  double below = density / a;  // F, where exp(t) is far below a
  double slope = density * (a - std::exp(begin));
  double sum = 0;
  for (int64_t i = 1; i <= points; ++i) {
    const double t = begin + static_cast<double>(i) * step;
    const double x = std::exp(t);
    const double next = std::exp(a * t - x - log_gamma);
    const double next_slope = next * (a - x);
    below += step / 2 * (density + next) + step * step / 12 * (slope - next_slope);
    density = next;
    slope = next_slope;
    sum += x * count * std::pow(std::min(1.0, below), count - 1) * density;
  }
  return sum * step / a;
}

// Of the fullest of P ranks, over the mean; the sum of all rows is positive. Rows are counted as
// 32-bit integers, in larger units where they are more.
double load_of(const std::vector<double>& rows, const ClonePlacementAttributes& ranks) {
  constexpr double kMostRows = 1 << 30;
  const double sum = std::accumulate(rows.begin(), rows.end(), 0.0);
  const double unit = std::max(1.0, sum / kMostRows);
  std::vector<int32_t> loads;
  for (const double each : rows) loads.push_back(static_cast<int32_t>(std::lround(each / unit)));
  const std::vector<int32_t> of_ranks = rows_with_clones(loads, ranks);
  const double counted = std::accumulate(of_ranks.begin(), of_ranks.end(), 0.0);
  return std::max(1.0, ranks.parts * *std::max_element(of_ranks.begin(), of_ranks.end()) / counted);
}

// The logarithm of a gamma variable (Marsaglia and Tsang, 2000, who draw one of the parameter a + 1
// where a is below 1). `next` counts what is drawn of a stream.
double draw_log_gamma(double a, uint32_t stream, uint64_t& next) {
  constexpr uint64_t kSeed = 1;
  const auto uniform = [&] {  // not 0
    return 1 - random_uniform(kSeed, RandomStream::expert_shares, stream, next++);
  };
  const double d = (a < 1 ? a + 1 : a) - 1.0 / 3;
  const double c = 1 / std::sqrt(9 * d);
  const double rest = a < 1 ? std::log(uniform()) / a : 0;
  while (true) {
    const double x = random_normal(kSeed, RandomStream::expert_shares, stream, next++);
    const double v = std::pow(1 + c * x, 3);
    if (v <= 0) continue;
    if (std::log(uniform()) < x * x / 2 + d - d * v + d * std::log(v)) {
      return std::log(d * v) + rest;
    }
  }
}

// Draws of the experts' rows, of 2^24 in all, as those of one layer in as many steps.
std::vector<std::vector<ExpertLoad::LayerRows>> draw_steps(double alpha, int32_t experts) {
  constexpr uint32_t kDraws = 256;
  constexpr double kRows = 1 << 24;
  std::vector<std::vector<ExpertLoad::LayerRows>> steps;
  for (uint32_t draw = 0; draw < kDraws; ++draw) {
    uint64_t next = 0;
    std::vector<double> rows;
    for (int32_t expert = 0; expert < experts; ++expert) {
      rows.push_back(draw_log_gamma(alpha, draw, next));
    }
    const double most = *std::max_element(rows.begin(), rows.end());
    for (double& each : rows) each = std::exp(each - most);
    const double sum = std::accumulate(rows.begin(), rows.end(), 0.0);
    for (double& each : rows) each *= kRows / sum;
    steps.push_back({{.layer = 0, .rows = std::move(rows)}});
  }
  return steps;
}

}  // namespace

ExpertLoad ExpertLoad::dirichlet(double alpha, int32_t experts, int32_t top_k, int32_t clones) {
  ExpertLoad load;
  if (clones > 0) {
    load = measured(draw_steps(alpha, experts), clones).averaged();
  } else {
    for (const int32_t parts : divisors_of(experts)) {
      load.of_parts_[parts].mean =
          parts == 1 ? 1 : largest_of_gammas(alpha * experts / parts, parts);
    }
  }
  for (auto& [parts, of_parts] : load.of_parts_) {
    const int32_t held = experts / parts;
    const double most = static_cast<double>(parts) * std::min(top_k, held) / top_k;
    of_parts.mean = std::min(of_parts.mean, most);
  }
  return load;
}

ExpertLoad ExpertLoad::measured(std::span<const std::vector<LayerRows>> steps, int32_t clones) {
  const auto experts = static_cast<int32_t>(steps.front().front().rows.size());
  ExpertLoad load;
  for (const int32_t parts : divisors_of(experts)) {
    std::map<int32_t, std::vector<double>> loads;  // by layer
    for (const std::vector<LayerRows>& step : steps) {
      for (const auto& [layer, rows] : step) {
        if (std::accumulate(rows.begin(), rows.end(), 0.0) <= 0) continue;
        loads[layer].push_back(load_of(rows, {.parts = parts, .clones = clones}));
      }
    }
    TROUPE_CHECK(!loads.empty(), "steps whose experts have rows");
    OfParts& of_parts = load.of_parts_[parts];
    of_parts.mean = 0;
    for (const auto& [layer, each] : loads) {
      const double mean =
          std::accumulate(each.begin(), each.end(), 0.0) / static_cast<double>(each.size());
      of_parts.of_layer[layer] = mean;
      of_parts.mean += mean / static_cast<double>(loads.size());
    }
  }
  return load;
}

const ExpertLoad::OfParts& ExpertLoad::of_parts(int32_t parts) const {
  static const OfParts even;
  if (is_even()) return even;
  const auto found = of_parts_.find(parts);
  TROUPE_CHECK(found != of_parts_.end(), "ranks that hold as many experts each");
  return found->second;
}

double ExpertLoad::of(int32_t layer, int32_t parts) const {
  const OfParts& all = of_parts(parts);
  const auto found = all.of_layer.find(layer);
  return found != all.of_layer.end() ? found->second : all.mean;
}

double ExpertLoad::mean(int32_t parts) const {
  return of_parts(parts).mean;
}

double ExpertLoad::largest(int32_t parts) const {
  double largest = mean(parts);
  for (const auto& [layer, load] : of_parts(parts).of_layer) largest = std::max(largest, load);
  return largest;
}

ExpertLoad ExpertLoad::averaged() const {
  ExpertLoad load = *this;
  for (auto& [parts, all] : load.of_parts_) all.of_layer.clear();
  return load;
}

}  // namespace troupe
