// Where in a model random numbers are drawn. Together with the step, the seed and the element's
// index the place keys them (base/random.h), so a draw depends neither on threads nor on what was
// drawn elsewhere, and a repeated pass repeats it.
#pragma once

#include <cstdint>

namespace troupe {

enum class RandomPlace : uint32_t {
  embedding_dropout,
  attention_dropout,
  attention_branch_dropout,
  feed_forward_branch_dropout,
  router_jitter,
  router_logits,
  count,
};

// `layer` is -1 for what stands before the layers. There are fewer than 10,000 layers, and fewer
// than 60,000 micro-batches in a step, so that all places of a step differ.
constexpr uint32_t random_substream(RandomPlace place, int32_t layer, int32_t micro_batch) {
  constexpr auto kPlaces = static_cast<uint32_t>(RandomPlace::count);
  constexpr uint32_t kLayers = 10001;
  return (static_cast<uint32_t>(micro_batch) * kLayers + static_cast<uint32_t>(layer + 1)) *
             kPlaces +
         static_cast<uint32_t>(place);
}

}  // namespace troupe
