#include "plan/kernel_rates.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <string_view>

#include "ops/precision/scale_blocks.h"
#include "plan/memory_shares.h"
#include "program/op_spec.h"

namespace troupe {
namespace {

// Of the rate of large products, with `n` rows or keys: most * n / (n + half).
struct Share {
  double most = 1;
  double half = 0;  // rows or keys with which it is half of the most
  double of(double n) const { return n > 0 ? most * n / (n + half) : most; }
};

struct Shares {
  // Of the rate of large products.
  double dense = 0;
  double dense_weight_gradient = 0;
  Share experts;  // by the rows of an expert
  Share experts_in_pairs;
  Share experts_weight_gradient;
  Share attention;  // by the keys of a query, with heads of 128 elements
  Share attention_gradient;
  // Whether shares of attention depend on the size of heads, those of experts on depths and tiles:
  // as those of tensor cores do.
  bool by_shapes = false;
  // A weight gradient of experts adds its sums to main gradients once they are complete, so its
  // bytes take time beside its products: this part of it, added as in a right triangle.
  double bytes_beside_products = 0;
  // Of the bandwidth of a copy.
  double memory_bound = 0;
  double update = 0;
  std::span<const KernelShare> kinds;  // with a share of their own
  // Of copies from or to the host, by an update that reads and writes its state there.
  double state_on_host = 1;
  // Of each kernel, until all multiprocessors or threads work.
  double ramp_seconds = 0;
};
constexpr Shares kOfGpu = {.dense = 0.92,
                           .dense_weight_gradient = 0.90,
                           .experts = {.most = 0.85, .half = 100},
                           .experts_in_pairs = {.most = 0.97, .half = 85},
                           .experts_weight_gradient = {.most = 0.86, .half = 110},
                           .attention = {.most = 0.76, .half = 430},
                           .attention_gradient = {.most = 0.52, .half = 380},
                           .by_shapes = true,
                           .bytes_beside_products = 1.15,
                           .memory_bound = 0.97,
                           .update = 0.95,
                           .kinds = kMemoryShares,
                           .state_on_host = 0.77,
                           .ramp_seconds = 1.5e-6};
constexpr Shares kOfCpu = {.dense = 0.87,
                           .dense_weight_gradient = 0.79,
                           .experts = {.most = 0.95, .half = 16},
                           .experts_in_pairs = {.most = 0.95, .half = 16},
                           .experts_weight_gradient = {.most = 0.95, .half = 16},
                           .attention = {.most = 0.63, .half = 78},
                           .attention_gradient = {.most = 0.78, .half = 64},
                           .memory_bound = 1,
                           .update = 1.7,
                           .kinds = kMemorySharesOfCpu,
                           .ramp_seconds = 1e-5};

constexpr Shares kOfCpuInDouble = [] {
  Shares shares = kOfCpu;
  shares.experts.most = shares.experts_in_pairs.most = shares.experts_weight_gradient.most =
      0.78 * kOfCpu.experts.most;
  shares.attention.most = 0.55 * kOfCpu.attention.most;
  shares.attention_gradient.most = 0.55 * kOfCpu.attention_gradient.most;
  shares.kinds = kMemorySharesOfCpuInDouble;
  return shares;
}();

constexpr double kNewtonSchulz = 0.70;
constexpr double kPlainTiles = 0.06;  // kernels without tensor cores

// Operands in 8 bits: how many times the shares above, and the rows of an expert that it takes in
// kernels of pairs and in weight gradients.
struct OfCodes {
  double dense = 1;
  double dense_weight_gradient = 1;
  double experts = 1;
  double rows_of_pairs = 1;
  double experts_weight_gradient = 1;
  double rows_of_weight_gradient = 1;
};
constexpr OfCodes kCodes = {.dense = 1.5,
                            .dense_weight_gradient = 1.3,
                            .experts = 1.7,
                            .rows_of_pairs = 1.65,
                            .experts_weight_gradient = 1.7,
                            .rows_of_weight_gradient = 1};
constexpr OfCodes kCodeBlocks = {.dense = 1.2,
                                 .dense_weight_gradient = 1.0,
                                 .experts = 1.4,
                                 .rows_of_pairs = 1.5,
                                 .experts_weight_gradient = 1.4,
                                 .rows_of_weight_gradient = 0.7};

bool has(std::string_view name, std::string_view word) {
  return name.find(word) != std::string_view::npos;
}

// Calls look(value) for all that the operation reads and writes.
template <class Look>
void for_each_operand(const OpView& op, const Look& look) {
  for (int i = 0; i < op.op.input_count; ++i) {
    if (op.has_input(i)) look(op.input(i));
  }
  for (int i = 0; i < op.op.output_count; ++i) look(op.output(i));
}

const Shares& shares_of(const OpView& op, const DeviceTraits& traits) {
  if (traits.compute_capability != kNoGpu) return kOfGpu;
  bool is_in_double = false;
  for_each_operand(op, [&](const Value& value) {
    is_in_double |= value.dtype == DType::f64 && value.shape.rank() > 1;
  });
  return is_in_double ? kOfCpuInDouble : kOfCpu;
}

// Rows of an expert, on average: those of the operand that is ragged, over the matrices.
double rows_of_expert(const OpView& op) {
  double rows = 0;
  double experts = 1;
  const bool has_transposed_rows = has(op.op.spec->name, "weight_gradient");
  for_each_operand(op, [&](const Value& value) {
    if (is_f8(value.dtype) && has_transposed_rows) {
      rows = static_cast<double>(value.shape[0] * kTransposedRows);
      return;
    }
    if (value.dtype == DType::i32) experts = static_cast<double>(value.shape[0] - 1);  // offsets
    if (value.shape.rank() == 2) rows = std::max(rows, static_cast<double>(value.shape[0]));
  });
  return rows / experts;
}

// Attention's kernels are made for heads of 128 elements. With smaller ones there are fewer
// products for each exponential; larger ones leave the gradient fewer registers.
double share_of_heads(double size, bool is_gradient) {
  if (size < 128) return std::sqrt(size / 128);
  return size > 128 && is_gradient ? 0.72 : 1;
}

// The softmax's sums have a number for each head: of all tensors of numbers the shortest rows.
double heads_of(const OpView& op) {
  int64_t heads = std::numeric_limits<int64_t>::max();
  for_each_operand(op, [&](const Value& value) {
    if (is_float(value.dtype) && value.shape.rank() > 1) {
      heads = std::min(heads, value.shape.back());
    }
  });
  return static_cast<double>(heads);
}

double share_of_attention(const OpView& op, const Shares& shares, double flops) {
  const bool is_gradient = has(op.op.spec->name, "gradient");
  const Share& share = is_gradient ? shares.attention_gradient : shares.attention;
  const Value& result = is_gradient ? op.input(0) : op.output(0);
  // Two products with each key forwards, five in the gradient.
  const double of_key = 2 * (is_gradient ? 5 : 2) * static_cast<double>(result.shape.elements());
  const double of_keys = share.of(flops / of_key);
  if (!shares.by_shapes) return of_keys;
  const double size = static_cast<double>(result.shape.back()) / heads_of(op);
  return of_keys * share_of_heads(size, is_gradient);
}

// Codes that no kernel multiplies are made bf16 numbers again.
OfCodes of_codes(std::string_view variant) {
  return has(variant, "codes") ? kCodes : has(variant, "code blocks") ? kCodeBlocks : OfCodes();
}

// Of tiles of that many rows or columns.
double filled(int64_t extent, int64_t tile) {
  const int64_t tiles = (extent + tile - 1) / tile;
  return static_cast<double>(extent) / static_cast<double>(tiles * tile);
}

double share_of_experts(const OpView& op, const Shares& shares, std::string_view variant) {
  const OfCodes codes = of_codes(variant);
  const bool is_weight_gradient = has(op.op.spec->name, "weight");
  Share share = is_weight_gradient     ? shares.experts_weight_gradient
                : has(variant, "pair") ? shares.experts_in_pairs
                                       : shares.experts;
  if (is_weight_gradient) {
    share.half *= codes.rows_of_weight_gradient;
  } else if (has(variant, "pair")) {
    share.half *= codes.rows_of_pairs;
  }
  const double times = is_weight_gradient ? codes.experts_weight_gradient : codes.experts;
  const double of_rows = times * share.of(rows_of_expert(op));
  if (!shares.by_shapes) return of_rows;
  const Shape& result = op.output(0).shape;
  if (is_weight_gradient) return of_rows * filled(result[1], 128) * filled(result.back(), 256);
  constexpr double kDepthOfHalf = 140;  // that is summed over
  const auto depth = static_cast<double>(op.input(0).shape.back());
  return of_rows * filled(result.back(), 256) * depth / (depth + kDepthOfHalf);
}

// `variant`: of the kernel, empty on a CPU.
double share_of_products(const OpView& op, const Shares& shares, double flops,
                         std::string_view variant) {
  const std::string_view kind = op.op.spec->name;
  if (has(kind, "grouped_linear")) return share_of_experts(op, shares, variant);
  if (has(kind, "attention")) return share_of_attention(op, shares, flops);
  if (has(kind, "newton_schulz")) return kNewtonSchulz;
  const OfCodes codes = of_codes(variant);
  if (has(kind, "weight")) return codes.dense_weight_gradient * shares.dense_weight_gradient;
  return codes.dense * shares.dense;
}

// The same for the kernel that the operation gets on a GPU. Codes with other scales of blocks are
// multiplied as bf16.
double share_of_kernel(const OpView& op, const OpView& expected, const DeviceTraits& traits,
                       double flops) {
  const Shares& shares = shares_of(expected, traits);
  if (traits.compute_capability == kNoGpu) return share_of_products(expected, shares, flops, "");
  const KernelChoice choice = op.op.spec->cuda(op, traits);
  const bool is_slow = choice.slow != SlowKernel::no && choice.slow != SlowKernel::block_scales;
  if (is_slow) return kPlainTiles;
  const double part = static_cast<double>(choice.multiprocessors) / traits.multiprocessors;
  return part * share_of_products(expected, shares, flops,
                                  choice.variant == nullptr ? "" : choice.variant);
}

double share_of_copy(const Op& op, const Shares& shares) {
  for (const KernelShare& kernel : shares.kinds) {
    if (kernel.kind == op.spec->name) return kernel.share;
  }
  return part_of(op) == TimePart::update ? shares.update : shares.memory_bound;
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

bool leaves_multiprocessors(const OpView& op, const DeviceTraits& traits) {
  return op.op.multiprocessors.count > 0 && traits.compute_capability != kNoGpu &&
         op.op.spec->cuda(op, traits).multiprocessors < traits.multiprocessors;
}

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
  if (has(kind, "attention") || has(kind, "delta_rule") || has(kind, "delta_state")) {
    return TimePart::attention;
  }
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
  const Shares& shares = shares_of(view, gpu.traits);
  const double bytes = traffic * cost.bytes / (gpu.memory_bandwidth * share_of_copy(op, shares));
  double seconds = bytes;
  if (cost.product_flops > 0) {
    const double scale = has(op.spec->name, "attention") ? gpu.attention_scale : 1;
    const double share =
        scale * share_of_kernel({program, program.op(index)}, view, gpu.traits, cost.product_flops);
    const double products = cost.product_flops / (gpu.product_flops(cost.product_dtype) * share);
    const bool adds = has(op.spec->name, "grouped_linear_weight_gradient");
    seconds = std::max(
        seconds, adds ? std::hypot(products, shares.bytes_beside_products * bytes) : products);
  }
  const double host_share = part_of(op) == TimePart::copies ? 1 : shares.state_on_host;
  seconds = std::max(seconds, bytes_on_host(program, op) / (gpu.host_bandwidth * host_share));
  return seconds + shares.ramp_seconds;
}

}  // namespace troupe
