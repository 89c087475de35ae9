// Kinds of operations that have no CUDA kernel yet: options refuse what needs them on a GPU.
#pragma once

#include <set>
#include <string>

#include "program/op_spec.h"

namespace troupe::testing {

inline bool is_for_cpus_alone(const OpSpec& spec) {
  static const std::set<std::string> kinds = {"block_amax",
                                              "quantize",
                                              "quantized_grouped_linear",
                                              "quantized_grouped_linear_data_gradient",
                                              "quantized_grouped_linear_weight_gradient",
                                              "quantized_linear",
                                              "quantized_linear_data_gradient",
                                              "quantized_linear_weight_gradient"};
  return kinds.contains(spec.name);
}

}  // namespace troupe::testing
