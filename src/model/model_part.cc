#include "model/model_part.h"

namespace troupe {

RunLayout layout_of_one_rank(int32_t layers) {
  return {.layout = Layout({.embedding_places = {0}}),
          .partition = even_partition(layers, 1, 1, StagePlacement::loop),
          .schedule = {}};
}

}  // namespace troupe
