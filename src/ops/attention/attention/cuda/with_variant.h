// For the CUDA kernels of all forms of attention, which are templates of the variant.
#pragma once

#include <type_traits>

#include "ops/attention/attention/cuda/attention_call.h"

namespace troupe {

// Calls select(constant) with the variant as an integral constant.
template <class Select>
auto with_variant(AttentionVariant variant, const Select& select) {
  using enum AttentionVariant;
  switch (variant) {
    case cudnn:
      return select(std::integral_constant<AttentionVariant, cudnn>());
    case sm90:
      return select(std::integral_constant<AttentionVariant, sm90>());
    case tiles:
      break;
  }
  return select(std::integral_constant<AttentionVariant, tiles>());
}

}  // namespace troupe
