#include "ops/losses/router_loss/router_loss.h"

#include <string>

#include "ops/losses/router_loss/router_loss_cpu.h"

namespace troupe {
namespace {

void check_router_logits(const Value& logits, const char* kind) {
  TROUPE_CHECK((logits.dtype == DType::f32 || logits.dtype == DType::f64) &&
                   logits.shape.rank() == 2 && !logits.rows.valid(),
               std::string(kind) + " needs f32 or f64 logits [T, E]: " + logits.name);
}

// `count`: inputs, of which the first `operands` are followed by mask and count, or are all.
void check_valid_tokens(const InferContext& context, const char* kind, int operands, int count) {
  TROUPE_CHECK(count == operands || count == operands + 2,
               std::string(kind) + ": mask and count of tokens come together");
  if (count == operands) return;
  const Value& mask = context.input(operands);
  TROUPE_CHECK(mask.dtype == DType::i32 && mask.shape == Shape({context.input(0).shape[0]}),
               std::string(kind) + " needs an i32 mask [T]: " + mask.name);
  const Value& tokens = context.input(operands + 1);
  TROUPE_CHECK(tokens.dtype == DType::i32 && tokens.shape == Shape({1}),
               std::string(kind) + " needs an i32 count [1]: " + tokens.name);
}

}  // namespace

std::vector<ValueId> router_loss_inputs(std::vector<ValueId> inputs, const ValidTokens& valid) {
  if (valid.mask.valid()) inputs.insert(inputs.end(), {valid.mask, valid.count});
  return inputs;
}

std::vector<ValueId> router_loss_gradient_inputs(const DerivativeContext& context) {
  std::vector<ValueId> inputs;
  for (int i = 0; i < context.op().op.input_count; ++i) inputs.push_back(context.input(i));
  inputs.push_back(context.output_gradient(0));
  return inputs;
}

void infer_router_loss(InferContext& context, const char* kind, int operands) {
  const Value& logits = context.input(0);
  check_router_logits(logits, kind);
  check_valid_tokens(context, kind, operands, context.input_count());
  context.output("", logits.dtype, {1});
}

void infer_router_loss_gradient(InferContext& context, const char* kind, int operands) {
  const Value& logits = context.input(0);
  check_router_logits(logits, kind);
  check_valid_tokens(context, kind, operands, context.input_count() - 1);
  const Value& d_loss = context.input(context.input_count() - 1);
  TROUPE_CHECK(d_loss.dtype == logits.dtype && d_loss.shape == Shape({1}),
               std::string(kind) + ": d_loss is [1] of the logits' dtype: " + d_loss.name);
  context.output("", logits.dtype, logits.shape);
}

Cost cost_router_loss(const OpView& op, double flops_per_logit) {
  uint64_t bytes = op.output(0).bytes();
  for (int i = 0; i < op.op.input_count; ++i) {
    if (op.has_input(i)) bytes += op.input(i).bytes();
  }
  return {.flops = flops_per_logit * static_cast<double>(op.input(0).shape.elements()),
          .bytes = static_cast<double>(bytes)};
}

uint64_t router_loss_workspace_bytes(const OpView& op) {
  const Shape& shape = op.input(0).shape;
  return static_cast<uint64_t>(router_loss_chunks(shape[0], shape[1])) * sizeof(double);
}

uint64_t router_loss_scratch_bytes(const OpView& op) {
  const Value& logits = op.input(0);
  return static_cast<uint64_t>(logits.shape[1]) * size_of(logits.dtype);
}

uint64_t router_loss_cuda_scratch_bytes(const OpView& op) {
  return static_cast<uint64_t>(op.input(0).shape[0]) * sizeof(double);
}

}  // namespace troupe
