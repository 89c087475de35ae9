#include "plan/kernel_rates.h"

#include <algorithm>
#include <string_view>

#include "program/op_spec.h"

namespace troupe {
namespace {

// Of the rate of large products.
constexpr double kDense = 0.88;
constexpr double kDenseWeightGradient = 0.85;
constexpr double kExperts = 0.97;  // with many rows for each expert
constexpr double kExpertsWeightGradient = 0.85;
constexpr double kHalfRateRows = 330;  // rows of an expert with which its products reach half
constexpr double kAttention = 0.72;    // heads of 128 elements and more
constexpr double kAttentionGradient = 0.49;
constexpr double kSmallHeads = 0.68;  // of these, with smaller heads
constexpr double kDeltaRule = 0.10;
constexpr double kNewtonSchulz = 0.80;
constexpr double kPlainTiles = 0.06;  // kernels without tensor cores
constexpr double kCodes = 1.4;        // of the shares above, for operands in 8 bits
// Of the bandwidth of a copy.
constexpr double kMemoryBound = 0.85;
constexpr double kUpdate = 0.95;
// Of each kernel, until all multiprocessors work.
constexpr double kRampSeconds = 5e-6;

bool has(std::string_view name, std::string_view word) {
  return name.find(word) != std::string_view::npos;
}

// Rows of an expert, on average: those of the operand that is ragged, over the matrices.
double rows_of_expert(const OpView& op) {
  double rows = 0;
  double experts = 1;
  const auto look = [&](const Value& value) {
    if (value.shape.rank() == 3) experts = static_cast<double>(value.shape[0]);
    if (value.shape.rank() == 2) rows = std::max(rows, static_cast<double>(value.shape[0]));
  };
  for (int i = 0; i < op.op.input_count; ++i) {
    if (op.has_input(i)) look(op.input(i));
  }
  for (int i = 0; i < op.op.output_count; ++i) look(op.output(i));
  return rows / experts;
}

double share_of_products(const OpView& op) {
  const std::string_view kind = op.op.spec->name;
  if (has(kind, "grouped_linear")) {
    const double rows = rows_of_expert(op);
    const double most = has(kind, "weight") ? kExpertsWeightGradient : kExperts;
    return most * rows / (rows + kHalfRateRows);
  }
  if (has(kind, "attention")) {
    const Value& statistics = op.output(op.op.output_count - 1);
    const double heads = static_cast<double>(statistics.shape[statistics.shape.rank() - 1]);
    const Value& result = op.output(0);
    const double size = static_cast<double>(result.shape[result.shape.rank() - 1]) / heads;
    const double share = has(kind, "gradient") ? kAttentionGradient : kAttention;
    return !has(kind, "gradient") && size < 128 ? share * kSmallHeads : share;
  }
  if (has(kind, "delta_rule")) return kDeltaRule;
  if (has(kind, "newton_schulz")) return kNewtonSchulz;
  return has(kind, "weight") ? kDenseWeightGradient : kDense;
}

// The same for the kernel that the operation gets. Codes with scales of blocks are multiplied as
// bf16.
double share_of_kernel(const OpView& op, const KernelChoice& choice) {
  const bool is_slow = choice.slow != SlowKernel::no && choice.slow != SlowKernel::block_scales;
  if (is_slow) return kPlainTiles;
  const bool multiplies_codes = choice.variant != nullptr && has(choice.variant, "codes");
  return share_of_products(op) * (multiplies_codes ? kCodes : 1);
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
    const KernelChoice choice = op.spec->cuda(OpView{program, program.op(index)}, gpu.traits);
    seconds = cost.product_flops /
              (gpu.product_flops(cost.product_dtype) * share_of_kernel(view, choice));
  }
  const double share = part_of(op) == TimePart::update ? kUpdate : kMemoryBound;
  seconds = std::max(seconds, traffic * cost.bytes / (gpu.memory_bandwidth * share));
  seconds = std::max(seconds, bytes_on_host(program, op) / gpu.host_bandwidth);
  return seconds + kRampSeconds;
}

}  // namespace troupe
