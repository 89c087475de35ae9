#include "model/parameters.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/random.h"
#include "model/parameter_layout.h"
#include "ops/adamw/moment_blocks.h"

namespace troupe {
namespace {

// Do these ranges of a dimension of `extent` elements leave the blocks of moments whole?
bool keeps_blocks(const std::vector<IndexRange>& ranges, int64_t extent) {
  return std::all_of(ranges.begin(), ranges.end(), [&](const IndexRange& range) {
    return range.begin % kMomentBlock == 0 &&
           (range.end % kMomentBlock == 0 || range.end == extent);
  });
}

class Declaration {
 public:
  Declaration(const ModelConfig& config, DType dtype, bool trained, const ModelPart& part)
      : config_(config), dtype_(dtype), trained_(trained), part_(part), place_(part.dense().pp) {}

  // A norm's gain, and its bias where the norm has one.
  void norm(ParameterKind kind, ParameterKind bias, int32_t layer, const std::string& name,
            int64_t size) {
    gain(kind, layer, name, size);
    if (config_.normalization == Normalization::layer_norm) {
      constant(bias, layer, name + "_bias", {size}, 0, accumulation_dtype(dtype_));
    }
  }

  void gain(ParameterKind kind, int32_t layer, const std::string& name, int64_t size) {
    constant(kind, layer, name, {size}, config_.zero_centered_gamma ? 0 : 1,
             accumulation_dtype(dtype_));
  }

  // A bias of a linear map.
  void bias(ParameterKind kind, int32_t layer, const std::string& name, const Shape& shape) {
    constant(kind, layer, name, shape, 0, dtype_);
  }

  // The router's, which starts as a weight does (Megatron: Router.reset_parameters).
  void drawn_bias(ParameterKind kind, int32_t layer, const std::string& name, const Shape& shape,
                  double init_std) {
    if (Parameter* parameter = add(kind, layer, name, shape, dtype_)) {
      parameter->init_std = init_std;
      parameter->decay = false;
    }
  }

  // Whole on every rank that has the layer; invalid elsewhere.
  StateId router_state(int32_t layer, const std::string& name, const Shape& shape) {
    if (part_.partition().rank_of_layer(layer) != place_) return {};
    return table_->add({.name = name,
                        .dtype = DType::f32,
                        .shape = shape,
                        .role = Role::router_state,
                        .gradient = {}});
  }

  void weight(ParameterKind kind, int32_t layer, const std::string& name, const Shape& shape,
              double init_std) {
    Parameter* parameter = add(kind, layer, name, shape, dtype_);
    if (parameter == nullptr) return;
    parameter->init_std = init_std;
    const bool is_own_embedding =
        kind == ParameterKind::embedding && config_.embedding_init_method_std >= 0;
    if (!config_.init_method_xavier_uniform || is_own_embedding) return;
    // Of the matrix, or of one expert's, whole.
    const int rank = shape.rank();
    const auto fans = static_cast<double>(shape[rank - 1] + shape[rank - 2]);
    parameter->init_std = 0;
    parameter->init_bound = std::sqrt(6.0 / fans);
  }

  ModelState finish(std::vector<StateId> expert_biases) {
    keep_optimizer_on_host();
    return {part_,
            dtype_,
            trained_,
            std::move(table_),
            std::move(parameters_),
            std::move(expert_biases)};
  }

 private:
  // One that starts the same everywhere and does not decay.
  void constant(ParameterKind kind, int32_t layer, const std::string& name, const Shape& shape,
                double value, DType dtype) {
    if (Parameter* parameter = add(kind, layer, name, shape, dtype)) {
      parameter->init_constant = value;
      parameter->decay = false;
    }
  }

  // nullptr: the rank does not hold it.
  Parameter* add(ParameterKind kind, int32_t layer, const std::string& name, const Shape& whole,
                 DType dtype) {
    Parameter parameter;
    parameter.kind = kind;
    parameter.layer = layer;
    parameter.number = count_++;
    if (!holds(part_.partition(), place_, kind, layer, config_)) return nullptr;
    parameter.whole_shape = whole;
    parameter.slice = slice_of(kind, whole, config_, part_.layout(), part_.rank);
    std::vector<int64_t> extents;
    for (int i = 0; i < whole.rank(); ++i) extents.push_back(parameter.slice.extent(i));
    const Shape shape = Shape(extents);
    const Shard shard = part_.shard(parameter.slice.gradient);
    parameter.shard = shard_of(shape, shard);
    const bool is_sharded = part_.run->sharding == StateSharding::parameters;
    parameter.held = is_sharded ? parameter.shard : IndexRange{0, shape.elements()};
    const Shape kept = shape_of_shard(shape, shard);
    const Shape& held = is_sharded ? kept : shape;
    parameter.value = table_->add(
        {.name = name, .dtype = dtype, .shape = held, .role = Role::parameter, .gradient = {}});
    if (trained_) {
      const DType wide = accumulation_dtype(dtype);
      const auto add_state = [&](const char* prefix, DType type, const Shape& of, Role role) {
        return table_->add(
            {.name = prefix + name, .dtype = type, .shape = of, .role = role, .gradient = {}});
      };
      const auto add_moment = [&](DType type, const std::string& prefix, StateId& moment,
                                  StateId& scales) {
        if (wide == DType::f64) type = wide;
        if (type == DType::f8e4m3 && whole.rank() == 1) type = DType::f32;
        moment = add_state((prefix + ".").c_str(), type, kept, Role::optimizer);
        if (type != DType::f8e4m3) return;
        TROUPE_CHECK(keeps_blocks(parameter.slice.ranges.back(), whole.back()),
                     "blocks of moments are cut: " + name);
        scales = add_state((prefix + "_scale.").c_str(), DType::u8, moment_scales_shape(kept),
                           Role::optimizer);
      };
      const DType gradient = dtype == DType::bf16 ? part_.run->main_gradients : wide;
      parameter.gradient = add_state("grad.", gradient, held, Role::gradient);
      table_->at(parameter.value).gradient = parameter.gradient;
      if (kept.elements() > 0) {
        add_moment(part_.run->exp_avg, "exp_avg", parameter.exp_avg, parameter.exp_avg_scale);
        add_moment(part_.run->exp_avg_sq, "exp_avg_sq", parameter.exp_avg_sq,
                   parameter.exp_avg_sq_scale);
        if (dtype != wide) parameter.master = add_state("master.", wide, kept, Role::optimizer);
      }
    }
    parameters_.push_back(std::move(parameter));
    return &parameters_.back();
  }

  // As Megatron chooses them: in their order, until that many elements are reached.
  void keep_optimizer_on_host() {
    const auto elements_of = [&](const Parameter& parameter) {
      return parameter.exp_avg.valid() ? (*table_)[parameter.exp_avg].shape.elements() : 0;
    };
    int64_t all = 0;
    for (const Parameter& parameter : parameters_) all += elements_of(parameter);
    const double wanted = part_.run->optimizer_offload * static_cast<double>(all);
    int64_t chosen = 0;
    for (const Parameter& parameter : parameters_) {
      if (static_cast<double>(chosen) >= wanted) return;
      for (const StateId id : {parameter.exp_avg, parameter.exp_avg_scale, parameter.exp_avg_sq,
                               parameter.exp_avg_sq_scale, parameter.master}) {
        if (id.valid()) table_->at(id).on_host = true;
      }
      chosen += elements_of(parameter);
    }
  }

  const ModelConfig& config_;
  const DType dtype_;
  const bool trained_;
  const ModelPart& part_;
  const int32_t place_;  // in the pipeline
  uint32_t count_ = 0;
  std::shared_ptr<StateTable> table_ = std::make_shared<StateTable>();
  std::vector<Parameter> parameters_;
};

}  // namespace

const Parameter* ModelState::search(ParameterKind kind, int32_t layer) const {
  for (const Parameter& parameter : parameters) {
    if (parameter.kind == kind && parameter.layer == layer) return &parameter;
  }
  return nullptr;
}

const Parameter& ModelState::get(ParameterKind kind, int32_t layer) const {
  const Parameter* parameter = search(kind, layer);
  TROUPE_CHECK(parameter != nullptr, "the rank has this parameter");
  return *parameter;
}

StateId ModelState::find(ParameterKind kind, int32_t layer) const {
  const Parameter* parameter = search(kind, layer);
  return parameter == nullptr ? StateId{} : parameter->value;
}

ModelState declare_model_state(const ModelConfig& config, DType dtype, bool trained) {
  return declare_model_state(
      config, dtype, trained,
      {.run = std::make_shared<const RunLayout>(layout_of_one_rank(config.num_layers)), .rank = 0});
}

ModelState declare_model_state(const ModelConfig& config, DType dtype, bool trained,
                               const ModelPart& part) {
  config.validate();
  const int64_t hidden = config.hidden_size;
  const double std = config.init_method_std;
  // Projections back into the residual stream start smaller, so that its variance does not grow
  // with depth (Megatron: scaled output initialisation).
  const double output_std = std / std::sqrt(2.0 * config.num_layers);

  const double embedding_std =
      config.embedding_init_method_std >= 0 ? config.embedding_init_method_std : std;

  Declaration declare(config, dtype, trained, part);
  std::vector<StateId> expert_biases(static_cast<size_t>(config.num_layers));
  declare.weight(ParameterKind::embedding, -1, "embedding", {config.vocab_size, hidden},
                 embedding_std);
  for (int32_t layer = 0; layer < config.num_layers; ++layer) {
    const std::string prefix = "layers." + std::to_string(layer) + ".";
    const auto weight = [&](ParameterKind kind, const char* name, const Shape& shape,
                            double init_std) {
      declare.weight(kind, layer, prefix + name, shape, init_std);
    };
    const auto bias = [&](bool wanted, ParameterKind kind, const char* name, const Shape& shape) {
      if (wanted) declare.bias(kind, layer, prefix + name, shape);
    };

    declare.norm(ParameterKind::input_norm, ParameterKind::input_norm_bias, layer,
                 prefix + "input_norm", hidden);
    weight(ParameterKind::w_qkv, "w_qkv", {config.qkv_size(), hidden}, std);
    bias(config.add_qkv_bias, ParameterKind::b_qkv, "b_qkv", {config.qkv_size()});
    if (config.qk_layernorm) {
      const bool whole = config.qk_norm_scope == QkNormScope::projection;
      const int64_t head = config.kv_channels;
      declare.gain(ParameterKind::q_norm, layer, prefix + "q_norm",
                   whole ? config.num_attention_heads * head : head);
      declare.gain(ParameterKind::k_norm, layer, prefix + "k_norm",
                   whole ? config.num_query_groups * head : head);
    }
    weight(ParameterKind::w_attention_out, "w_attention_out", {hidden, config.attention_size()},
           output_std);
    bias(config.add_bias_linear, ParameterKind::b_attention_out, "b_attention_out", {hidden});
    declare.norm(ParameterKind::post_attention_norm, ParameterKind::post_attention_norm_bias, layer,
                 prefix + "post_attention_norm", hidden);

    if (config.is_moe_layer(layer)) {
      const int64_t experts = config.num_experts;
      const int64_t ffn = config.moe_ffn_hidden_size;
      const int64_t rows = config.mlp_rows(ffn);
      weight(ParameterKind::w_router, "w_router", {experts, hidden}, std);
      if (config.add_bias_linear) {
        declare.drawn_bias(ParameterKind::b_router, layer, prefix + "b_router", {experts}, std);
      }
      weight(ParameterKind::w_gate_up, "w_gate_up", {experts, rows, hidden}, std);
      bias(config.add_bias_linear, ParameterKind::b_gate_up, "b_gate_up", {experts, rows});
      weight(ParameterKind::w_down, "w_down", {experts, hidden, ffn}, output_std);
      bias(config.add_bias_linear, ParameterKind::b_down, "b_down", {experts, hidden});
      if (config.has_shared_expert()) {
        const int64_t width = config.moe_shared_expert_intermediate_size;
        weight(ParameterKind::w_shared_gate_up, "w_shared_gate_up",
               {config.mlp_rows(width), hidden}, std);
        weight(ParameterKind::w_shared_down, "w_shared_down", {hidden, width}, output_std);
        if (config.moe_shared_expert_gate) {
          weight(ParameterKind::w_shared_gate, "w_shared_gate", {1, hidden}, std);
        }
      }
      if (config.moe_router_enable_expert_bias) {
        expert_biases[static_cast<size_t>(layer)] =
            declare.router_state(layer, prefix + "expert_bias", {experts});
      }
    } else {
      const int64_t ffn = config.ffn_hidden_size;
      const int64_t rows = config.mlp_rows(ffn);
      weight(ParameterKind::w_gate_up, "w_gate_up", {rows, hidden}, std);
      bias(config.add_bias_linear, ParameterKind::b_gate_up, "b_gate_up", {rows});
      weight(ParameterKind::w_down, "w_down", {hidden, ffn}, output_std);
      bias(config.add_bias_linear, ParameterKind::b_down, "b_down", {hidden});
    }
  }
  declare.norm(ParameterKind::final_norm, ParameterKind::final_norm_bias, -1, "final_norm", hidden);
  if (!config.tie_embeddings) {
    declare.weight(ParameterKind::head, -1, "head", {config.vocab_size, hidden}, std);
  }
  return declare.finish(std::move(expert_biases));
}

double initial_value(const Parameter& parameter, uint64_t seed, int64_t element) {
  const auto index = static_cast<uint64_t>(element);
  if (parameter.init_bound > 0) {
    const double drawn = random_uniform(seed, RandomStream::parameter, parameter.number, index);
    return parameter.init_bound * (2 * drawn - 1);
  }
  if (parameter.init_std == 0) return parameter.init_constant;
  return parameter.init_std * random_normal(seed, RandomStream::parameter, parameter.number, index);
}

void fill_initial_values(const Parameter& parameter, uint64_t seed, int64_t first, int64_t count,
                         double* values) {
  if (parameter.init_bound > 0) {
    for (int64_t i = 0; i < count; ++i) values[i] = initial_value(parameter, seed, first + i);
    return;
  }
  if (parameter.init_std == 0) {
    std::fill(values, values + count, parameter.init_constant);
    return;
  }
  fill_random_normals(seed, RandomStream::parameter, parameter.number, static_cast<uint64_t>(first),
                      count, values);
  for (int64_t i = 0; i < count; ++i) values[i] *= parameter.init_std;
}

}  // namespace troupe
