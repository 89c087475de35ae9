#include "model/code_metric.h"

#include <utility>

#include "model/model.h"
#include "ops/optimizer/accumulate/accumulate.h"
#include "ops/precision/code_counts/code_counts.h"

namespace troupe {

CodeMetrics declare_code_metrics(Builder& builder, const Model& model) {
  CodeMetrics metrics;
  for (ValueId& metric : metrics) {
    metric = builder.metric("code_counts", DType::f64,
                            {static_cast<int64_t>(model.parameters().size()), kCountsOfCodes});
  }
  return metrics;
}

CodeCounting::CodeCounting(const ModelState& state, const CodeMetrics& metrics)
    : metrics_(metrics) {
  for (const Parameter& parameter : state.parameters) {
    numbers_[parameter.value.index] = parameter.number();
  }
}

void CodeCounting::count(Builder& builder, const std::vector<MapOperand>& operands, ValueId codes,
                         const std::string& name) {
  if (!is_wanted() || !codes.valid()) return;
  const ValueId counts = code_counts(builder, codes, name);
  for (const MapOperand& operand : operands) counts_.emplace_back(operand, counts);
}

size_t CodeCounting::add(Builder& builder) {
  for (const auto& [operand, counts] : counts_) {
    accumulate_at(builder, metrics_[static_cast<size_t>(operand.kind)], counts,
                  int64_t{numbers_.at(operand.parameter.index)} * kCountsOfCodes);
  }
  return std::exchange(counts_, {}).size();
}

}  // namespace troupe
