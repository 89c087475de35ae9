#include "ops/routing/router_topk/score_function.h"

namespace troupe {

std::string_view name_of(ScoreFunction function) {
  switch (function) {
    case ScoreFunction::softmax:
      return "softmax";
    case ScoreFunction::sigmoid:
      return "sigmoid";
    case ScoreFunction::sqrtsoftplus:
      return "sqrtsoftplus";
  }
  return "?";
}

}  // namespace troupe
