// What a training step counts of the codes of its products in 8 bits
// (ops/precision/code_counts/code_counts.h): of each operand a metric f64 [parameters of the model,
// kCountsOfCodes], with a row for the linear map of each parameter, by its number. What several
// maps read counts for each. Those that are counted forward and backward are not the same metrics,
// so that passes may put the one beside the other.
//
// Summed over all ranks, an operand that several ranks have counts for each of them: shares of its
// elements are the same in every layout, their number is not.
//
// One object belongs to one program and one thread.
#pragma once

#include <array>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "model/model_state.h"
#include "ops/precision/amax_history/amax_history.h"
#include "ops/precision/recipe.h"
#include "program/builder.h"

namespace troupe {

// By operand; invalid where nothing is counted.
using CodeMetrics = std::array<ValueId, kHistoryKinds>;

CodeMetrics declare_code_metrics(Builder& builder, const Model& model);

// Counts in a program what the metrics, which begin with zeros, are of.
class CodeCounting {
 public:
  CodeCounting(const ModelState& state, const CodeMetrics& metrics);

  bool is_wanted() const { return metrics_[0].valid(); }

  // Emits the counting of the codes of these operands, where it is wanted and there are any.
  void count(Builder& builder, const std::vector<MapOperand>& operands, ValueId codes,
             const std::string& name);

  // Emits the sums of what was counted since the last call, and says how many there are.
  size_t add(Builder& builder);

 private:
  CodeMetrics metrics_;
  std::map<int32_t, uint32_t> numbers_;  // of parameters, by the state of their weights
  std::vector<std::pair<MapOperand, ValueId>> counts_;
};

}  // namespace troupe
