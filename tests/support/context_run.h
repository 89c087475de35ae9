// Attention over several ranks by itself, forwards and backwards, on CPUs or GPUs: what it makes of
// the same numbers, put together by position.
#pragma once

#include <string>
#include <vector>

#include "base/dtype.h"
#include "model/context_parallel.h"
#include "support/layout_run.h"

namespace troupe::testing {

struct ContextCase {
  std::string name;
  int32_t ranks = 2;
  AttentionAttributes whole;  // of one rank
  DType dtype = DType::f64;
  std::vector<int64_t> begins = {};  // rows at which a document begins; empty: none is cut
  bool own_queries = false;          // queries lie in a tensor of their own
};

struct ContextOutcome {
  std::vector<double> out;    // [B S, H d]
  std::vector<double> d_qkv;  // [B S, (H + 2 G) d]
};

// On `ranks` ranks, several times. Of `on`: device and capture.
ContextOutcome run_context(const ContextCase& c, int32_t ranks, ContextExchange exchange,
                           const RunOn& on = {});

}  // namespace troupe::testing
