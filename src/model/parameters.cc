#include "model/parameters.h"

#include <cmath>

#include "base/error.h"
#include "base/random.h"

namespace troupe {
namespace {

class Declaration {
 public:
  Declaration(DType dtype, bool trained) : dtype_(dtype), trained_(trained) {}

  // A norm's gain, and its bias where the norm has one.
  void norm(ParameterKind kind, ParameterKind bias, int32_t layer, const std::string& name,
            int64_t size, const ModelConfig& config) {
    gain(kind, layer, name, size, config);
    if (config.normalization == Normalization::layer_norm) {
      constant(bias, layer, name + "_bias", {size}, 0, accumulation_dtype(dtype_));
    }
  }

  void gain(ParameterKind kind, int32_t layer, const std::string& name, int64_t size,
            const ModelConfig& config) {
    constant(kind, layer, name, {size}, config.zero_centered_gamma ? 0 : 1,
             accumulation_dtype(dtype_));
  }

  // A bias of a linear map.
  void bias(ParameterKind kind, int32_t layer, const std::string& name, const Shape& shape) {
    constant(kind, layer, name, shape, 0, dtype_);
  }

  StateId router_state(const std::string& name, const Shape& shape) {
    return table_->add({.name = name,
                        .dtype = DType::f32,
                        .shape = shape,
                        .role = Role::router_state,
                        .gradient = {}});
  }

  void weight(ParameterKind kind, int32_t layer, const std::string& name, const Shape& shape,
              double init_std) {
    add(kind, layer, name, shape, dtype_).init_std = init_std;
  }

  ModelState finish(std::vector<StateId> expert_biases) {
    return {std::move(table_), std::move(parameters_), std::move(expert_biases)};
  }

 private:
  // One that starts the same everywhere and does not decay.
  void constant(ParameterKind kind, int32_t layer, const std::string& name, const Shape& shape,
                double value, DType dtype) {
    Parameter& parameter = add(kind, layer, name, shape, dtype);
    parameter.init_constant = value;
    parameter.decay = false;
  }

  Parameter& add(ParameterKind kind, int32_t layer, const std::string& name, const Shape& shape,
                 DType dtype) {
    Parameter parameter;
    parameter.kind = kind;
    parameter.layer = layer;
    parameter.number = static_cast<uint32_t>(parameters_.size());
    parameter.value = table_->add(
        {.name = name, .dtype = dtype, .shape = shape, .role = Role::parameter, .gradient = {}});
    if (trained_) {
      const DType wide = accumulation_dtype(dtype);
      const auto add_state = [&](const char* prefix, Role role) {
        return table_->add(
            {.name = prefix + name, .dtype = wide, .shape = shape, .role = role, .gradient = {}});
      };
      parameter.gradient = add_state("grad.", Role::gradient);
      parameter.exp_avg = add_state("exp_avg.", Role::optimizer);
      parameter.exp_avg_sq = add_state("exp_avg_sq.", Role::optimizer);
      if (dtype != wide) parameter.master = add_state("master.", Role::optimizer);
      table_->at(parameter.value).gradient = parameter.gradient;
    }
    parameters_.push_back(parameter);
    return parameters_.back();
  }

  DType dtype_;
  bool trained_;
  std::shared_ptr<StateTable> table_ = std::make_shared<StateTable>();
  std::vector<Parameter> parameters_;
};

}  // namespace

StateId ModelState::find(ParameterKind kind, int32_t layer) const {
  for (const Parameter& parameter : parameters) {
    if (parameter.kind == kind && parameter.layer == layer) return parameter.value;
  }
  return {};
}

ModelState declare_model_state(const ModelConfig& config, DType dtype, bool trained) {
  config.validate();
  const int64_t hidden = config.hidden_size;
  const double std = config.init_method_std;
  // Projections back into the residual stream start smaller, so that its variance does not grow
  // with depth (Megatron: scaled output initialisation).
  const double output_std = std / std::sqrt(2.0 * config.num_layers);

  Declaration declare(dtype, trained);
  std::vector<StateId> expert_biases(static_cast<size_t>(config.num_layers));
  declare.weight(ParameterKind::embedding, -1, "embedding", {config.vocab_size, hidden}, std);
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
                 prefix + "input_norm", hidden, config);
    weight(ParameterKind::w_qkv, "w_qkv", {config.qkv_size(), hidden}, std);
    bias(config.add_qkv_bias, ParameterKind::b_qkv, "b_qkv", {config.qkv_size()});
    if (config.qk_layernorm) {
      const bool whole = config.qk_norm_scope == QkNormScope::projection;
      const int64_t head = config.kv_channels;
      declare.gain(ParameterKind::q_norm, layer, prefix + "q_norm",
                   whole ? config.num_attention_heads * head : head, config);
      declare.gain(ParameterKind::k_norm, layer, prefix + "k_norm",
                   whole ? config.num_query_groups * head : head, config);
    }
    weight(ParameterKind::w_attention_out, "w_attention_out", {hidden, config.attention_size()},
           output_std);
    bias(config.add_bias_linear, ParameterKind::b_attention_out, "b_attention_out", {hidden});
    declare.norm(ParameterKind::post_attention_norm, ParameterKind::post_attention_norm_bias, layer,
                 prefix + "post_attention_norm", hidden, config);

    if (config.is_moe_layer(layer)) {
      const int64_t experts = config.num_experts;
      const int64_t ffn = config.moe_ffn_hidden_size;
      const int64_t rows = config.mlp_rows(ffn);
      weight(ParameterKind::w_router, "w_router", {experts, hidden}, std);
      bias(config.add_bias_linear, ParameterKind::b_router, "b_router", {experts});
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
            declare.router_state(prefix + "expert_bias", {experts});
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
  declare.norm(ParameterKind::final_norm, ParameterKind::final_norm_bias, -1, "final_norm", hidden,
               config);
  if (!config.tie_embeddings) {
    declare.weight(ParameterKind::head, -1, "head", {config.vocab_size, hidden}, std);
  }
  return declare.finish(std::move(expert_biases));
}

double initial_value(const Parameter& parameter, uint64_t seed, int64_t element) {
  if (parameter.init_std == 0) return parameter.init_constant;
  return parameter.init_std * random_normal(seed, RandomStream::parameter, parameter.number,
                                            static_cast<uint64_t>(element));
}

}  // namespace troupe
