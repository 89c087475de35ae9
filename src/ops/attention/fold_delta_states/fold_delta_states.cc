#include "ops/attention/fold_delta_states/fold_delta_states.h"

#include <fmt/format.h>
#include <vector>

#include "ops/attention/fold_delta_states/delta_ends.h"
#include "ops/choose_kernel.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel fold_delta_states_cpu_kernel(const OpView& op);
CpuKernel fold_delta_states_gradient_cpu_kernel(const OpView& op);
CudaKernel fold_delta_states_cuda_kernel(const OpView& op);
CudaKernel fold_delta_states_gradient_cuda_kernel(const OpView& op);

namespace {

DeltaEndsShape check_ends(const InferContext& context, int input) {
  const Value& ends = context.input(input);
  const SequenceChunks& chunks = context.attributes<FoldDeltaStatesAttributes>().chunks;
  TROUPE_CHECK(chunks.ranks > 0 && chunks.rank >= 0 && chunks.rank < chunks.ranks &&
                   is_float(ends.dtype) && ends.dtype == accumulation_dtype(ends.dtype) &&
                   !ends.rows.valid() && ends.shape.rank() == 4 &&
                   ends.shape[0] % (2 * chunks.ranks) == 0 && ends.shape[3] > ends.shape[2],
               "fold_delta_states: " + ends.name + " " + ends.shape.to_string());
  return {chunks, ends.shape};
}

Shape states_shape(const DeltaEndsShape& ends) {
  return {2 * ends.sequences, ends.heads, ends.key_dim, ends.value_dim};
}

void infer_fold_delta_states(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 1, "fold_delta_states: takes ends");
  const DeltaEndsShape ends = check_ends(context, 0);
  context.output("", DType{context.input(0).dtype}, states_shape(ends));
}

void infer_fold_delta_states_gradient(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 2, "fold_delta_states_gradient: takes d_states and ends");
  const DeltaEndsShape shape = check_ends(context, 1);
  const Value& d_states = context.input(0);
  const Value ends = context.input(1);
  TROUPE_CHECK(d_states.dtype == ends.dtype && d_states.shape == states_shape(shape),
               "fold_delta_states_gradient: d_states does not belong to " + ends.name);
  context.output("", ends.dtype, ends.shape);
}

void differentiate_fold_delta_states(DerivativeContext& context) {
  if (!context.wants(0)) return;
  context.add_gradient(
      0, context.builder().emit(
             kFoldDeltaStatesGradient, Attributes(context.attributes<FoldDeltaStatesAttributes>()),
             {context.output_gradient(0), context.input(0)}, "d_" + context.input_name(0))[0]);
}

// Of a product P S for each chunk before the later of the rank's.
double product_flops(const OpView& op, const Shape& shape) {
  const DeltaEndsShape ends(op.attributes<FoldDeltaStatesAttributes>().chunks, shape);
  return 2.0 * static_cast<double>(ends.sequences * ends.heads * ends.last()) *
         static_cast<double>(ends.state_size()) * static_cast<double>(ends.key_dim);
}

Cost cost_fold_delta_states(const OpView& op) {
  return {.flops = product_flops(op, op.input(0).shape),
          .bytes = static_cast<double>(op.input(0).bytes() + op.output(0).bytes())};
}

Cost cost_fold_delta_states_gradient(const OpView& op) {
  return {.flops = 3 * product_flops(op, op.input(1).shape),
          .bytes = static_cast<double>(op.input(0).bytes() + 2 * op.input(1).bytes())};
}

// The state, and that after a chunk.
uint64_t cpu_scratch_fold(const OpView& op) {
  const DeltaEndsShape ends(op.attributes<FoldDeltaStatesAttributes>().chunks, op.input(0).shape);
  return static_cast<uint64_t>(2 * ends.state_size()) * size_of(op.input(0).dtype);
}

// The states before all chunks, and the gradients of two.
uint64_t cpu_scratch_fold_gradient(const OpView& op) {
  const DeltaEndsShape ends(op.attributes<FoldDeltaStatesAttributes>().chunks, op.input(1).shape);
  return static_cast<uint64_t>((ends.count() + 2) * ends.state_size()) * size_of(op.input(1).dtype);
}

// Of all sequences and heads the states before and after a chunk; of the gradient those before
// each.
uint64_t cuda_scratch_fold(const OpView& op) {
  const DeltaEndsShape ends(op.attributes<FoldDeltaStatesAttributes>().chunks, op.input(0).shape);
  return static_cast<uint64_t>(2 * ends.sequences * ends.heads * ends.state_size()) *
         size_of(op.input(0).dtype);
}

uint64_t cuda_scratch_fold_gradient(const OpView& op) {
  const DeltaEndsShape ends(op.attributes<FoldDeltaStatesAttributes>().chunks, op.input(1).shape);
  return static_cast<uint64_t>(ends.count() * ends.sequences * ends.heads * ends.state_size()) *
         size_of(op.input(1).dtype);
}

std::string print_fold_delta_states(const Attributes& attributes) {
  const SequenceChunks& chunks = attributes.as<FoldDeltaStatesAttributes>().chunks;
  return fmt::format("chunks={}/{}", chunks.rank, chunks.ranks);
}

std::vector<OpSample> samples_fold_delta_states() {
  const auto fold = [](const SequenceChunks& chunks, int64_t sequences, int64_t heads,
                       int64_t key_dim, int64_t value_dim) {
    return [=](SampleBuilder& sample) {
      const ValueId ends =
          sample.tensor("ends", {2 * chunks.ranks * sequences, heads, key_dim, value_dim + key_dim},
                        {.deviation = 0.5, .accumulation = true});
      sample.result(fold_delta_states(sample.builder(), ends, {chunks}, "states"));
    };
  };
  return {{"first rank", fold({2, 0}, 2, 2, 3, 2)},
          {"last rank", fold({2, 1}, 1, 1, 2, 5)},
          {"middle rank", fold({3, 1}, 2, 1, 2, 3)},
          {"one rank", fold({1, 0}, 1, 2, 1, 1)}};
}

}  // namespace

ValueId fold_delta_states(Builder& builder, ValueId ends,
                          const FoldDeltaStatesAttributes& attributes, const std::string& name) {
  return builder.emit(kFoldDeltaStates, Attributes(attributes), {ends}, name)[0];
}

const OpSpec kFoldDeltaStates{
    .name = "fold_delta_states",
    .infer = infer_fold_delta_states,
    .differentiate = differentiate_fold_delta_states,
    .cost = cost_fold_delta_states,
    .cpu = {.kernel = fold_delta_states_cpu_kernel, .scratch = cpu_scratch_fold},
    .cuda = only_kernel<TROUPE_CUDA(fold_delta_states_cuda_kernel), cuda_scratch_fold>,
    .print_attributes = print_fold_delta_states,
    .samples = samples_fold_delta_states};

const OpSpec kFoldDeltaStatesGradient{
    .name = "fold_delta_states_gradient",
    .infer = infer_fold_delta_states_gradient,
    .cost = cost_fold_delta_states_gradient,
    .cpu = {.kernel = fold_delta_states_gradient_cpu_kernel, .scratch = cpu_scratch_fold_gradient},
    .cuda = only_kernel<TROUPE_CUDA(fold_delta_states_gradient_cuda_kernel),
                        cuda_scratch_fold_gradient>,
    .print_attributes = print_fold_delta_states};

}  // namespace troupe
