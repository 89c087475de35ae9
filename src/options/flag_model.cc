#include "options/flag_model.h"

#include <algorithm>
#include <fmt/format.h>
#include <limits>
#include <string_view>

#include "base/error.h"
#include "data/make_tokenizer.h"
#include "options/tokenizer_options.h"

namespace troupe {
namespace {

constexpr int32_t kVocabularyMultiple = 128;
constexpr double kDropout = 0.1;  // of both kinds

int32_t require_size(const std::optional<int32_t>& flag, std::string_view name) {
  if (flag) return *flag;
  throw_bad_request(fmt::format(
      "--{} is missing: without --model the flags of the shape describe the model, and nothing "
      "implies this one.",
      name));
}

int32_t head_size(const Options& options, int32_t hidden, int32_t heads) {
  if (options.kv_channels) return *options.kv_channels;
  if (hidden % heads == 0) return hidden / heads;
  throw_bad_request(
      fmt::format("--hidden-size {} is not a multiple of --num-attention-heads {}; give the size "
                  "of a head with --kv-channels.",
                  hidden, heads));
}

int32_t inner_size(const Options& options, int32_t hidden) {
  if (options.ffn_hidden_size) return *options.ffn_hidden_size;
  const int64_t size = 4 * int64_t{hidden};
  const int64_t fitting =
      options.activation == MlpActivation{ActivationFunction::silu, /*gated=*/true}
          ? size * 2 / 3 / 64 * 64
          : size;
  // What is too large is refused with the rest of the shape.
  return static_cast<int32_t>(std::min<int64_t>(fitting, std::numeric_limits<int32_t>::max()));
}

int32_t vocabulary_of(const Options& options) {
  if (options.vocab_size && !sizes_the_tokenizer(options)) return *options.vocab_size;
  const int32_t multiple = options.make_vocab_size_divisible_by.value_or(kVocabularyMultiple);
  if (const auto assumed = assumed_vocabulary(options)) {
    return rounded_vocabulary(assumed->size, multiple);
  }
  const auto tokenizer = make_tokenizer(read_tokenizer_of(options));
  return rounded_vocabulary(tokenizer->vocab_size(), multiple);
}

}  // namespace

ModelConfig model_of_flags(const Options& options) {
  ModelConfig config;
  config.num_layers = require_size(options.num_layers, "num-layers");
  config.hidden_size = require_size(options.hidden_size, "hidden-size");
  config.num_attention_heads = require_size(options.num_attention_heads, "num-attention-heads");
  config.max_position_embeddings =
      require_size(options.max_position_embeddings, "max-position-embeddings");
  if (options.group_query_attention) {
    config.num_query_groups = require_size(options.num_query_groups, "num-query-groups");
  }
  config.num_query_groups = options.num_query_groups.value_or(config.num_attention_heads);
  config.kv_channels = head_size(options, config.hidden_size, config.num_attention_heads);
  config.ffn_hidden_size = inner_size(options, config.hidden_size);
  config.vocab_size = vocabulary_of(options);

  config.normalization = Normalization::layer_norm;
  config.activation = ActivationFunction::gelu;
  config.gated_linear_unit = false;
  config.add_bias_linear = true;
  // In Megatron the bias of all linear layers is that of queries, keys and values, too.
  config.add_qkv_bias =
      options.add_bias_linear.value_or(true) && !options.disable_bias_linear.value_or(false);
  config.tie_embeddings = true;
  config.hidden_dropout = kDropout;
  config.attention_dropout = kDropout;

  config.num_experts = options.num_experts.value_or(0);
  if (config.num_experts > 0) {
    config.moe_layers.assign(static_cast<size_t>(config.num_layers), true);
    config.moe_router_topk = 2;
    config.moe_ffn_hidden_size = config.ffn_hidden_size / options.moe_upcycling_granularity;
  }
  return config;
}

int32_t rounded_vocabulary(int32_t vocabulary, int32_t multiple) {
  const int64_t rounded = (int64_t{vocabulary} + multiple - 1) / multiple * multiple;
  // What is too large is refused with the rest of the shape.
  return static_cast<int32_t>(std::min<int64_t>(rounded, std::numeric_limits<int32_t>::max()));
}

}  // namespace troupe
