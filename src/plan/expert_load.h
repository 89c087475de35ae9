// How unevenly the router spreads tokens over the ranks that share the experts, where a step's time
// is planned (step_time.h): it goes by the rank that gets most.
//
// With P ranks (EP), each of which holds as many successive experts, the load of a layer is the
// expected number of rows of its fullest rank over the mean of all ranks: 1 where loads are even, P
// where one rank gets all rows. Which rank is the fullest may differ from layer to layer. With
// copies of hot experts (ops/routing/clone_placement) the rows are those that ranks have once
// copies are placed by the loads of a step, as they are by those of each micro-batch.
//
// Plain values; any thread.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

namespace troupe {

class ExpertLoad {
 public:
  // Rows of the experts of one layer.
  struct LayerRows {
    int32_t layer = 0;
    std::vector<double> rows;  // by expert
  };

  // Even loads: 1 everywhere.
  ExpertLoad() = default;
  // The experts' shares of a layer's rows are one draw from a Dirichlet distribution whose E
  // parameters are all `alpha`: the smaller, the less even. A rank's share then has the parameter
  // alpha E / P. The largest share of P ranks is expected to be E[max of P gamma variables of that
  // parameter] / (alpha E), as their sum is independent of the shares. A token chooses `top_k`
  // different experts, which bounds the load by P min(k, E/P) / k. With `clones` places for copies
  // on each rank it is the mean of 256 draws.
  static ExpertLoad dirichlet(double alpha, int32_t experts, int32_t top_k, int32_t clones = 0);
  // As in these steps of a run, on average: rows by step and layer, of the same number of experts.
  // A layer without rows in a step is left out of it; layers that are nowhere have the mean of the
  // others. At least one layer of one step has rows.
  static ExpertLoad measured(std::span<const std::vector<LayerRows>> steps, int32_t clones = 0);

  bool is_even() const { return of_parts_.empty(); }
  // `parts`: P, a divisor of the number of experts.
  double of(int32_t layer, int32_t parts) const;
  double mean(int32_t parts) const;     // of all layers
  double largest(int32_t parts) const;  // of all layers
  // The same mean in each layer: for programs with fewer layers.
  ExpertLoad averaged() const;

 private:
  struct OfParts {
    double mean = 1;
    std::map<int32_t, double> of_layer;  // those that were measured
  };
  const OfParts& of_parts(int32_t parts) const;

  std::map<int32_t, OfParts> of_parts_;  // by P
};

}  // namespace troupe
