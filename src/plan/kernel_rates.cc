#include "plan/kernel_rates.h"

#include <algorithm>
#include <string_view>

#include "ops/precision/scale_blocks.h"
#include "program/op_spec.h"

namespace troupe {
namespace {

struct Shares {
  // Of the rate of large products.
  double dense = 0;
  double dense_weight_gradient = 0;
  double experts = 0;  // with many rows for each expert
  double experts_weight_gradient = 0;
  double half_rate_rows = 0;  // rows of an expert with which its products reach half
  double attention = 0;       // heads of 128 elements and more
  double attention_gradient = 0;
  double small_heads = 0;  // of these, with smaller heads
  // Of the bandwidth of a copy.
  double memory_bound = 0;
  double update = 0;
  // Of each kernel, until all multiprocessors or threads work.
  double ramp_seconds = 0;
};
constexpr Shares kOfGpu = {.dense = 0.88,
                           .dense_weight_gradient = 0.85,
                           .experts = 0.97,
                           .experts_weight_gradient = 0.85,
                           .half_rate_rows = 330,
                           .attention = 0.72,
                           .attention_gradient = 0.49,
                           .small_heads = 0.68,
                           .memory_bound = 0.85,
                           .update = 0.95,
                           .ramp_seconds = 5e-6};
constexpr Shares kOfCpu = {.dense = 0.87,
                           .dense_weight_gradient = 0.79,
                           .experts = 0.95,
                           .experts_weight_gradient = 0.95,
                           .half_rate_rows = 12,
                           .attention = 0.39,
                           .attention_gradient = 0.50,
                           .small_heads = 1,
                           .memory_bound = 0.45,
                           .update = 1,
                           .ramp_seconds = 1e-5};

const Shares& shares_on(const DeviceTraits& traits) {
  return traits.compute_capability == kNoGpu ? kOfCpu : kOfGpu;
}

constexpr double kDeltaRule = 0.10;
constexpr double kNewtonSchulz = 0.80;
constexpr double kPlainTiles = 0.06;  // kernels without tensor cores
// Of the shares above, for operands in 8 bits with one scale each, or with scales of blocks.
constexpr double kCodes = 1.6;
constexpr double kCodeBlocks = 1.4;

bool has(std::string_view name, std::string_view word) {
  return name.find(word) != std::string_view::npos;
}

// Rows of an expert, on average: those of the operand that is ragged, over the matrices.
double rows_of_expert(const OpView& op) {
  double rows = 0;
  double experts = 1;
  const bool has_transposed_rows = has(op.op.spec->name, "weight_gradient");
  const auto look = [&](const Value& value) {
    if (is_f8(value.dtype) && has_transposed_rows) {
      rows = static_cast<double>(value.shape[0] * kTransposedRows);
      return;
    }
    if (value.shape.rank() == 3) experts = static_cast<double>(value.shape[0]);
    if (value.shape.rank() == 2) rows = std::max(rows, static_cast<double>(value.shape[0]));
  };
  for (int i = 0; i < op.op.input_count; ++i) {
    if (op.has_input(i)) look(op.input(i));
  }
  for (int i = 0; i < op.op.output_count; ++i) look(op.output(i));
  return rows / experts;
}

double share_of_products(const OpView& op, const Shares& shares) {
  const std::string_view kind = op.op.spec->name;
  if (has(kind, "grouped_linear")) {
    const double rows = rows_of_expert(op);
    const double most = has(kind, "weight") ? shares.experts_weight_gradient : shares.experts;
    return most * rows / (rows + shares.half_rate_rows);
  }
  if (has(kind, "attention")) {
    const Value& statistics = op.output(op.op.output_count - 1);
    const double heads = static_cast<double>(statistics.shape[statistics.shape.rank() - 1]);
    const Value& result = op.output(0);
    const double size = static_cast<double>(result.shape[result.shape.rank() - 1]) / heads;
    const double share = has(kind, "gradient") ? shares.attention_gradient : shares.attention;
    return !has(kind, "gradient") && size < 128 ? share * shares.small_heads : share;
  }
  if (has(kind, "delta_rule")) return kDeltaRule;
  if (has(kind, "newton_schulz")) return kNewtonSchulz;
  return has(kind, "weight") ? shares.dense_weight_gradient : shares.dense;
}

// The same for the kernel that the operation gets on a GPU. Codes with other scales of blocks are
// multiplied as bf16.
double share_of_kernel(const OpView& op, const OpView& expected, const DeviceTraits& traits) {
  const double share = share_of_products(expected, shares_on(traits));
  if (traits.compute_capability == kNoGpu) return share;
  const KernelChoice choice = op.op.spec->cuda(op, traits);
  const bool is_slow = choice.slow != SlowKernel::no && choice.slow != SlowKernel::block_scales;
  if (is_slow) return kPlainTiles;
  const std::string_view variant = choice.variant == nullptr ? "" : choice.variant;
  const double of_codes = has(variant, "codes")         ? kCodes
                          : has(variant, "code blocks") ? kCodeBlocks
                                                        : 1;
  return share * of_codes;
}

// Of optimizer state that stays on the host, which is read and written.
double bytes_on_host(const Program& program, const Op& op) {
  double bytes = 0;
  for (const ValueId id : program.outputs(op)) {
    const Value& value = program.value(id);
    const bool is_there = value.role == Role::offloaded ||
                          (value.state.valid() && program.state()[value.state].on_host);
    if (is_there) bytes += static_cast<double>(value.bytes());
  }
  return bytes;
}

}  // namespace

std::string_view name_of(TimePart part) {
  switch (part) {
    case TimePart::dense_products:
      return "dense products";
    case TimePart::expert_products:
      return "expert products";
    case TimePart::attention:
      return "attention";
    case TimePart::memory_bound:
      return "memory-bound";
    case TimePart::update:
      return "update";
    case TimePart::exchange:
      return "exchange";
    case TimePart::copies:
      return "copies";
  }
  return "?";
}

TimePart part_of(const Op& op) {
  const std::string_view kind = op.spec->name;
  if (op.place.queue == Queue::copy) return TimePart::copies;
  if (has(kind, "attention") || has(kind, "delta_rule")) return TimePart::attention;
  if (op.spec->group != nullptr) return TimePart::exchange;
  if (op.place.phase == Phase::optimizer) return TimePart::update;
  if (has(kind, "grouped_linear")) return TimePart::expert_products;
  if (has(kind, "linear")) return TimePart::dense_products;
  return TimePart::memory_bound;
}

double seconds_of(const Program& program, const Program& expected, int32_t index,
                  const GpuModel& gpu, double traffic) {
  const Op& op = expected.op(index);
  const OpView view{expected, op};
  const Cost cost = op.spec->cost != nullptr ? op.spec->cost(view) : Cost();
  double seconds = 0;
  if (cost.product_flops > 0) {
    const double share = share_of_kernel({program, program.op(index)}, view, gpu.traits);
    seconds = cost.product_flops / (gpu.product_flops(cost.product_dtype) * share);
  }
  const Shares& shares = shares_on(gpu.traits);
  const double share = part_of(op) == TimePart::update ? shares.update : shares.memory_bound;
  seconds = std::max(seconds, traffic * cost.bytes / (gpu.memory_bandwidth * share));
  seconds = std::max(seconds, bytes_on_host(program, op) / gpu.host_bandwidth);
  return seconds + shares.ramp_seconds;
}

}  // namespace troupe
