#include "ops/attention/index_topk/index_attributes.h"

#include <algorithm>
#include <cmath>
#include <fmt/format.h>

#include "base/error.h"

namespace troupe {

double IndexAttributes::scale() const {
  return 1 / std::sqrt(static_cast<double>(heads) * head_dim);
}

uint32_t index_blocks(const IndexAttributes& attributes) {
  constexpr int64_t kMost = 528;  // four for each multiprocessor of an H100
  return static_cast<uint32_t>(std::min(attributes.rows().queries(), kMost));
}

void check_index_inputs(const InferContext& context, const IndexAttributes& attributes,
                        int starts) {
  const KeyRows rows = attributes.rows();
  const Value& q = context.input(0);
  const Value& k = context.input(1);
  const Value& w = context.input(2);
  TROUPE_CHECK(attributes.batch >= 1 && attributes.sequence >= 1 && attributes.heads >= 1 &&
                   attributes.head_dim >= 1 && (rows.ranks == 1 || attributes.sequence % 2 == 0),
               "indexer: attributes");
  TROUPE_CHECK(
      is_float(q.dtype) && k.dtype == q.dtype && !q.rows.valid() && !k.rows.valid() &&
          q.shape == Shape({rows.queries(), int64_t{attributes.heads} * attributes.head_dim}) &&
          k.shape == Shape({rows.keys(), int64_t{attributes.head_dim}}),
      "indexer: q " + q.shape.to_string() + " and k " + k.shape.to_string());
  TROUPE_CHECK(w.dtype == accumulation_dtype(q.dtype) &&
                   w.shape == Shape({rows.queries(), int64_t{attributes.heads}}),
               "indexer: w " + w.shape.to_string());
  TROUPE_CHECK(
      !context.has_input(starts) || (context.input(starts).dtype == DType::i32 &&
                                     context.input(starts).shape == Shape({rows.queries()})),
      "indexer: starts are not i32, one for each row");
}

std::string text_of(const IndexAttributes& attributes) {
  return fmt::format(" batch={} sequence={} heads={} head_dim={}{}", attributes.batch,
                     attributes.sequence, attributes.heads, attributes.head_dim,
                     text_of(RowOrigin{.chunks = attributes.chunks}));
}

}  // namespace troupe
