#include "model/parameter_layout.h"

#include <algorithm>
#include <fmt/format.h>

#include "base/error.h"
#include "ops/adamw/moment_blocks.h"

namespace troupe {
namespace {

using Ranges = std::vector<IndexRange>;

// Part `part` of `parts` equal parts of the indices from `begin` on.
IndexRange equal_part(int64_t begin, int64_t size, int32_t part, int32_t parts) {
  const int64_t each = size / parts;
  return {begin + part * each, begin + (part + 1) * each};
}

// Rows of a first product: gate rows before linear rows, each half cut by itself.
Ranges first_product_rows(int64_t rows, bool gated, int32_t part, int32_t parts) {
  if (!gated) return {equal_part(0, rows, part, parts)};
  const int64_t half = rows / 2;
  return {equal_part(0, half, part, parts), equal_part(half, half, part, parts)};
}

IndexRange query_rows(const ModelConfig& config, int32_t part, int32_t parts) {
  return equal_part(0, config.attention_size(), part, parts);
}

// Rows of the key (or value) heads that belong to the query heads of this part.
IndexRange key_value_rows(const ModelConfig& config, int64_t begin, int32_t part, int32_t parts) {
  const int64_t groups = config.num_query_groups;
  const int64_t heads = std::max<int64_t>(1, groups / parts);
  const int64_t first = part * groups / parts;
  return {begin + first * config.kv_channels, begin + (first + heads) * config.kv_channels};
}

Ranges qkv_rows(const ModelConfig& config, int32_t part, int32_t parts) {
  const int64_t keys = config.attention_size();
  const int64_t values = keys + int64_t{config.num_query_groups} * config.kv_channels;
  return {query_rows(config, part, parts), key_value_rows(config, keys, part, parts),
          key_value_rows(config, values, part, parts)};
}

IndexRange vocabulary_rows(int64_t rows, int32_t part, int32_t parts) {
  return {rows * part / parts, rows * (part + 1) / parts};
}

[[noreturn]] void refuse(const char* flag, int32_t size, const std::string& rule,
                         const std::string& nearest) {
  throw_bad_request(fmt::format("{} {}: {}. Nearest: {}.", flag, size, rule, nearest));
}

// `size` ranks share `amount` of something.
void require_divisor(const char* flag, int32_t size, int64_t amount, const char* what) {
  if (amount % size == 0) return;
  refuse(flag, size, fmt::format("it must divide {}, {}", what, amount),
         nearest_divisors(amount, size));
}

void check_tensor_parallel(const ModelConfig& config, const Layout& layout) {
  const char* flag = "--tensor-model-parallel-size";
  const int32_t tp = layout.tp();
  const int32_t groups = config.num_query_groups;
  const auto valid = [&](int64_t size) {
    return config.num_attention_heads % size == 0 && (groups % size == 0 || size % groups == 0);
  };
  if (!valid(tp)) {
    refuse(
        flag, tp,
        fmt::format("it must divide the model's {} query heads, and divide its {} key-value heads "
                    "or be a multiple of them",
                    config.num_attention_heads, groups),
        nearest_choices(tp, config.num_attention_heads, valid));
  }
  if (config.qk_layernorm && config.qk_norm_scope == QkNormScope::projection && groups % tp != 0) {
    refuse(flag, tp,
           fmt::format("the norm of all keys together needs it to divide the {} key-value heads",
                       groups),
           nearest_choices(tp, config.num_attention_heads,
                           [&](int64_t size) { return valid(size) && groups % size == 0; }));
  }
  if (config.moe_layer_count() < config.num_layers) {
    require_divisor(flag, tp, config.ffn_hidden_size, "the dense layers' inner size");
  }
  if (config.has_shared_expert()) {
    require_divisor(flag, tp, config.moe_shared_expert_intermediate_size,
                    "the shared expert's inner size");
  }
}

// Each rank of cp attends with its share of the heads that TP leaves.
void check_heads_exchange(const ModelConfig& config, const Layout& layout) {
  const int32_t cp = layout.cp();
  const int32_t heads = config.num_attention_heads / layout.tp();
  const int32_t groups = std::max(1, config.num_query_groups / layout.tp());
  const auto valid = [&](int64_t size) { return heads % size == 0 && groups % size == 0; };
  if (valid(cp)) return;
  refuse("--context-parallel-size", cp,
         fmt::format("with --cp-comm-type a2a it must divide the {} query heads and {} key-value "
                     "heads that --tensor-model-parallel-size {} leaves to a rank; p2p and "
                     "allgather have no such rule",
                     heads, groups, layout.tp()),
         nearest_choices(cp, groups, valid));
}

void check_experts(const ModelConfig& config, const Layout& layout) {
  if (config.num_experts == 0) {
    if (layout.ep() == 1) return;
    throw_bad_request(fmt::format(
        "--expert-model-parallel-size {}: the model has no experts. Leave it out.", layout.ep()));
  }
  require_divisor("--expert-model-parallel-size", layout.ep(), config.num_experts,
                  "the number of experts");
  const char* flag = "--expert-tensor-parallel-size";
  require_divisor(flag, layout.etp(), config.moe_ffn_hidden_size, "the experts' inner size");
  if (layout.etp() > 1 && config.add_bias_linear) {
    throw_bad_request(fmt::format(
        "{} {}: experts with biases cannot be sliced. Use {} 1, or --disable-bias-linear.", flag,
        layout.etp(), flag));
  }
}

void check_sequence(const Layout& layout, int64_t sequence) {
  // Each rank of CP holds two chunks, one from each end (program/row_origin.h); sequence
  // parallelism cuts what it holds once more.
  const int64_t tp = layout.options().sequence_parallel ? layout.tp() : 1;
  const int64_t chunks = layout.cp() > 1 ? 2 * int64_t{layout.cp()} : 1;
  const int64_t both = tp * layout.cp();
  if (sequence % chunks == 0 && sequence % both == 0) return;
  const int64_t unit = chunks % both == 0 ? chunks : (both % chunks == 0 ? both : 2 * both);
  const int64_t below = sequence / unit * unit;
  throw_bad_request(fmt::format(
      "--seq-length {}: with --context-parallel-size {}{} it must be a multiple of {}. Nearest: "
      "{}{}.",
      sequence, layout.cp(),
      tp > 1 ? fmt::format(" and --sequence-parallel over {} ranks", tp) : "", unit,
      below > 0 ? fmt::format("{} or ", below) : "", below + unit));
}

}  // namespace

void check_layout(const ModelConfig& config, const Layout& layout, int64_t sequence,
                  ContextExchange exchange) {
  check_tensor_parallel(config, layout);
  if (exchange == ContextExchange::a2a) check_heads_exchange(config, layout);
  check_experts(config, layout);
  check_sequence(layout, sequence);
}

void check_moment_blocks(const ModelConfig& config, const Layout& layout, const char* flag) {
  const auto require_blocks = [&](const char* cutter, int32_t parts, int64_t size,
                                  const char* what) {
    if (parts == 1 || size / parts % kMomentBlock == 0) return;
    throw_bad_request(fmt::format(
        "{} fp8: {} {} cuts {}, {}, into pieces of {}, which must be a multiple of {}: that "
        "many moments share a scale. Use bf16 moments, or another {}.",
        flag, cutter, parts, what, size, size / parts, kMomentBlock, cutter));
  };
  const char* tp = "--tensor-model-parallel-size";
  require_blocks(tp, layout.tp(), config.attention_size(), "the size of all query heads");
  if (config.moe_layer_count() < config.num_layers) {
    require_blocks(tp, layout.tp(), config.ffn_hidden_size, "the dense layers' inner size");
  }
  if (config.has_shared_expert()) {
    require_blocks(tp, layout.tp(), config.moe_shared_expert_intermediate_size,
                   "the shared expert's inner size");
  }
  if (config.num_experts > 0) {
    require_blocks("--expert-tensor-parallel-size", layout.etp(), config.moe_ffn_hidden_size,
                   "the experts' inner size");
  }
}

ParameterSlice slice_of(ParameterKind kind, const Shape& shape, const ModelConfig& config,
                        const Layout& layout, int32_t rank) {
  const DensePlace dense = layout.dense_place(rank);
  const ExpertPlace expert = layout.expert_place(rank);
  const int32_t tp = layout.tp();

  ParameterSlice slice;
  for (int dimension = 0; dimension < shape.rank(); ++dimension) {
    slice.ranges.push_back({{0, shape[dimension]}});
  }
  const bool is_expert = config.num_experts > 0 && shape.rank() == 3;
  const auto first = [&](int dimension, int32_t part, int32_t parts) {
    slice.ranges[static_cast<size_t>(dimension)] =
        first_product_rows(shape[dimension], config.gated_linear_unit, part, parts);
  };
  const auto cut = [&](int dimension, int32_t part, int32_t parts) {
    slice.ranges[static_cast<size_t>(dimension)] = {equal_part(0, shape[dimension], part, parts)};
  };
  const auto cut_experts = [&] {
    slice.gradient = GradientClass::expert;
    cut(0, expert.ep, layout.ep());
  };
  // Biases of experts have two dimensions, those of dense layers one.
  const bool is_expert_bias = config.num_experts > 0 && shape.rank() == 2;
  switch (kind) {
    case ParameterKind::embedding:
    case ParameterKind::head:
      slice.ranges[0] = {vocabulary_rows(shape[0], dense.tp, tp)};
      if (kind == ParameterKind::embedding) slice.gradient = GradientClass::embedding;
      break;
    case ParameterKind::w_qkv:
    case ParameterKind::b_qkv:
      slice.ranges[0] = qkv_rows(config, dense.tp, tp);
      break;
    case ParameterKind::q_norm:
    case ParameterKind::k_norm:
      if (config.qk_norm_scope == QkNormScope::head) {
        slice.gradient = GradientClass::head_norm;
      } else {
        slice.ranges[0] = {kind == ParameterKind::q_norm ? query_rows(config, dense.tp, tp)
                                                         : key_value_rows(config, 0, dense.tp, tp)};
      }
      break;
    case ParameterKind::w_attention_out:
    case ParameterKind::w_shared_down:
      cut(1, dense.tp, tp);
      break;
    case ParameterKind::w_shared_gate_up:
      first(0, dense.tp, tp);
      break;
    case ParameterKind::w_gate_up:
      if (is_expert) {
        cut_experts();
        first(1, expert.etp, layout.etp());
      } else {
        first(0, dense.tp, tp);
      }
      break;
    case ParameterKind::b_gate_up:
      if (is_expert_bias) {
        cut_experts();
      } else {
        first(0, dense.tp, tp);
      }
      break;
    case ParameterKind::w_down:
      if (is_expert) {
        cut_experts();
        cut(2, expert.etp, layout.etp());
      } else {
        cut(1, dense.tp, tp);
      }
      break;
    case ParameterKind::b_down:
      if (is_expert_bias) {
        cut_experts();
      } else {
        slice.gradient = GradientClass::replicated;
      }
      break;
    case ParameterKind::input_norm:
    case ParameterKind::input_norm_bias:
    case ParameterKind::b_attention_out:
    case ParameterKind::post_attention_norm:
    case ParameterKind::post_attention_norm_bias:
    case ParameterKind::w_router:
    case ParameterKind::b_router:
    case ParameterKind::w_shared_gate:
    case ParameterKind::final_norm:
    case ParameterKind::final_norm_bias:
      slice.gradient = GradientClass::replicated;
      break;
  }
  return slice;
}

bool holds(const PipelinePartition& partition, int32_t place, ParameterKind kind, int32_t layer,
           const ModelConfig& config) {
  if (layer >= 0) return partition.rank_of_layer(layer) == place;
  if (kind == ParameterKind::embedding) {
    const std::vector<int32_t> places = partition.embedding_ranks(config.tie_embeddings);
    return std::binary_search(places.begin(), places.end(), place);
  }
  return partition.rank_of_loss() == place;
}

}  // namespace troupe
