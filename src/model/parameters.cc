#include "model/parameters.h"

#include <cmath>

#include "base/error.h"
#include "base/random.h"

namespace troupe {
namespace {

class Declaration {
 public:
  Declaration(DType dtype, bool trained) : dtype_(dtype), trained_(trained) {}

  void norm(ParameterKind kind, int32_t layer, const std::string& name, int64_t size) {
    add(kind, layer, name, {size}, /*init_std=*/0, /*decay=*/false);
  }

  void add(ParameterKind kind, int32_t layer, const std::string& name, const Shape& shape,
           double init_std, bool decay = true) {
    Parameter parameter;
    parameter.kind = kind;
    parameter.layer = layer;
    parameter.number = static_cast<uint32_t>(parameters_.size());
    parameter.init_std = init_std;
    parameter.decay = decay;
    parameter.value = table_->add(
        {.name = name, .dtype = dtype_, .shape = shape, .role = Role::parameter, .gradient = {}});
    if (trained_) {
      const DType wide = accumulation_dtype(dtype_);
      const auto add_state = [&](const char* prefix, Role role) {
        return table_->add(
            {.name = prefix + name, .dtype = wide, .shape = shape, .role = role, .gradient = {}});
      };
      parameter.gradient = add_state("grad.", Role::gradient);
      parameter.exp_avg = add_state("exp_avg.", Role::optimizer);
      parameter.exp_avg_sq = add_state("exp_avg_sq.", Role::optimizer);
      if (dtype_ != wide) parameter.master = add_state("master.", Role::optimizer);
      table_->at(parameter.value).gradient = parameter.gradient;
    }
    parameters_.push_back(parameter);
  }

  ModelState finish() { return {std::move(table_), std::move(parameters_)}; }

 private:
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
  declare.add(ParameterKind::embedding, -1, "embedding", {config.vocab_size, hidden}, std);
  for (int32_t layer = 0; layer < config.num_layers; ++layer) {
    const std::string prefix = "layers." + std::to_string(layer) + ".";
    declare.norm(ParameterKind::input_norm, layer, prefix + "input_norm", hidden);
    declare.add(ParameterKind::w_qkv, layer, prefix + "w_qkv", {config.qkv_size(), hidden}, std);
    if (config.qk_layernorm) {
      declare.norm(ParameterKind::q_norm, layer, prefix + "q_norm", config.kv_channels);
      declare.norm(ParameterKind::k_norm, layer, prefix + "k_norm", config.kv_channels);
    }
    declare.add(ParameterKind::w_attention_out, layer, prefix + "w_attention_out",
                {hidden, config.attention_size()}, output_std);
    declare.norm(ParameterKind::post_attention_norm, layer, prefix + "post_attention_norm", hidden);
    if (config.is_moe_layer(layer)) {
      const int64_t experts = config.num_experts;
      const int64_t ffn = config.moe_ffn_hidden_size;
      declare.add(ParameterKind::w_router, layer, prefix + "w_router", {experts, hidden}, std);
      declare.add(ParameterKind::w_gate_up, layer, prefix + "w_gate_up", {experts, 2 * ffn, hidden},
                  std);
      declare.add(ParameterKind::w_down, layer, prefix + "w_down", {experts, hidden, ffn},
                  output_std);
    } else {
      const int64_t ffn = config.ffn_hidden_size;
      declare.add(ParameterKind::w_gate_up, layer, prefix + "w_gate_up", {2 * ffn, hidden}, std);
      declare.add(ParameterKind::w_down, layer, prefix + "w_down", {hidden, ffn}, output_std);
    }
  }
  declare.norm(ParameterKind::final_norm, -1, "final_norm", hidden);
  if (!config.tie_embeddings) {
    declare.add(ParameterKind::head, -1, "head", {config.vocab_size, hidden}, std);
  }
  return declare.finish();
}

double initial_value(const Parameter& parameter, uint64_t seed, int64_t element) {
  if (parameter.init_std == 0) return 1.0;
  return parameter.init_std * random_normal(seed, RandomStream::parameter, parameter.number,
                                            static_cast<uint64_t>(element));
}

}  // namespace troupe
