// The scratch memory of attention over the context on a GPU: shared by its kernels and by the rule
// that books it. Pure functions. Private to this folder.
#pragma once

#include <cstdint>

#include "ops/attention/attention/attention_cuda.h"
#include "ops/attention/context_attention/context_attention.h"

namespace troupe {

inline AttentionShape context_shape(const ContextAttentionAttributes& a, DType dtype,
                                    bool documents) {
  return {.attributes = a.attention,
          .chunks = a.chunks,
          .dtype = dtype,
          .documents = documents,
          .wide_key_gradients = true};
}

// Elements of a row of kv, and of the keys in it.
inline int64_t key_row_elements(const AttentionShape& shape) {
  return shape.attributes.key_value_row();
}
inline int64_t key_elements(const AttentionShape& shape) {
  return int64_t{shape.attributes.groups} * shape.attributes.head_dim;
}

// Its parts: sums of this rank's part of the gradients of all keys and values; keys and values of
// all ranks; and what attention needs. The first two by position.
struct ContextScratch {
  ContextScratch(const AttentionShape& shape, bool gradient, AttentionVariant variant) {
    const auto elements =
        static_cast<uint64_t>(shape.attributes.batch * shape.positions() * key_row_elements(shape));
    if (gradient) sums = align(elements * size_of(accumulation_dtype(shape.dtype)));
    keys = align(elements * size_of(shape.dtype));
    attention = gradient ? attention_gradient_call_scratch_bytes(shape, variant)
                         : attention_call_scratch_bytes(shape, variant);
  }

  static uint64_t align(uint64_t bytes) { return (bytes + 255) / 256 * 256; }
  uint64_t bytes() const { return sums + keys + attention; }

  uint64_t sums = 0;
  uint64_t keys = 0;
  uint64_t attention = 0;
};

}  // namespace troupe
