// Costs and traffic that several kinds of operations have in the same form (program/op_spec.h).
//
// Pure functions; any thread.
#pragma once

#include <cstdint>

#include "program/op_spec.h"

namespace troupe {

// `flops`, all of them in products of operands of `dtype`.
inline Cost product_cost(double flops, DType dtype, double bytes) {
  return {.flops = flops, .bytes = bytes, .product_flops = flops, .product_dtype = dtype};
}

// Of `bytes` that are spread evenly over `ranks` members, this rank among them.
inline LinkTraffic spread_traffic(double bytes, int32_t ranks) {
  return {.bytes = bytes * (ranks - 1) / ranks, .messages = ranks - 1.0};
}

// The same where the router decides who gets what, and `most_bytes` are those that may come.
inline LinkTraffic routed_traffic(double bytes, double most_bytes, int32_t ranks) {
  LinkTraffic traffic = spread_traffic(bytes, ranks);
  traffic.most_bytes = spread_traffic(most_bytes, ranks).bytes;
  return traffic;
}

// `bytes` to each of the other members.
inline LinkTraffic copied_traffic(double bytes, int32_t ranks) {
  return {.bytes = bytes * (ranks - 1), .messages = ranks - 1.0};
}

}  // namespace troupe
