#include "ops/precision/quantize_as_made.h"

#include "ops/experts/permute/permute.h"
#include "ops/precision/quantize_activation/quantize_activation.h"

namespace troupe {

int32_t maker_of_codes(const Program& program, int32_t made_by, bool is_read) {
  if (made_by < 0) return -1;
  const Op& op = program.op(made_by);
  if (op.spec == &kPermute) return made_by;
  const bool is_activation = op.spec == &kActivation || op.spec == &kActivationGradient;
  if (!is_activation || is_read) return -1;
  return op.attributes.as<ActivationAttributes>().stores_input ? -1 : made_by;
}

Quantized quantize_as_made(Rewrite& rewrite, Builder& builder, ValueId value, int32_t maker,
                           ValueId offsets, ValueId amax, const QuantizeAttributes& attributes,
                           const std::string& name) {
  if (maker < 0) return quantize(builder, value, offsets, amax, attributes, name);
  rewrite.remove_unread(maker);
  const Program& program = builder.program();
  const Op op = program.op(maker);
  const std::vector<ValueId> reads(program.inputs(op).begin(), program.inputs(op).end());
  if (op.spec == &kPermute) {
    QuantizeAttributes gathered = attributes;
    gathered.top_k = static_cast<int32_t>(program.value(reads[2]).shape[1]);
    return quantize(builder, reads[0], offsets, amax, gathered, name, reads[1]);
  }
  // x, what a quantisation reads, and what else the activation, or its gradient, reads.
  std::vector<ValueId> inputs = {reads[0], offsets, amax};
  inputs.insert(inputs.end(), reads.begin() + 1, reads.end());
  const bool is_gradient = op.spec == &kActivationGradient;
  const auto outputs = builder.emit(is_gradient ? kQuantizeActivationGradient : kQuantizeActivation,
                                    Attributes(QuantizeActivationAttributes{
                                        attributes, op.attributes.as<ActivationAttributes>()}),
                                    inputs, name);
  if (op.output_count > 1) rewrite.replace(program.outputs(op)[1], outputs.back());
  return quantized_of(outputs, attributes);
}

}  // namespace troupe
