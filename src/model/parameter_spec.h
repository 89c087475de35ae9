// What a model's parameters are, before any layout: the list to which each block of the model adds
// its own. How a rank cuts them follows from what is declared here (parameter_layout.h), so that
// no other file names a parameter.
//
// Plain values; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/shape.h"
#include "model/model_config.h"
#include "parallel/layout.h"
#include "program/module.h"

namespace troupe {

// A parameter's number in the whole model, in the order of declaration, which all ranks share.
struct ParameterId {
  int32_t index = -1;
  bool valid() const { return index >= 0; }
  bool operator==(const ParameterId&) const = default;
};

// Which ranks share a dimension of a parameter.
enum class CutOver : uint8_t { tp, ep, etp };

// Consecutive indices of a dimension that are cut by themselves, between units: rank r of n has
// units [u r / n, u (r + 1) / n) of u.
struct CutSection {
  int64_t size = 0;
  int64_t units = 0;  // equal ones; a divisor of size
  bool is_shared =
      false;  // of fewer units than ranks, each has the unit that it would have part of
};

struct Cut {
  int dimension = 0;
  CutOver over = CutOver::tp;
  std::vector<CutSection> sections;  // one after the other: all of the dimension
  const char* what = "";             // of the dimension, for messages: "the experts' inner size"
};

// Between all indices of the dimension.
Cut cut_anywhere(int dimension, CutOver over, int64_t size, const char* what);

// Of something of a layer, or of the model (layer -1): "layers.3.w_qkv".
std::string name_in_layer(std::string_view name, int32_t layer);

struct ParameterSpec {
  std::string name;    // within its layer, or the model: "w_qkv"
  int32_t layer = -1;  // -1: outside the layers
  ParameterId id;      // keys its random initial values, which so do not depend on the layout
  Shape whole_shape;   // in the whole model
  std::vector<Cut> cuts;
  GradientClass gradient_class = GradientClass::sliced;
  // Elements that one token's result depends on: of experts, those of as many as it chooses.
  int64_t active_elements = 0;
  bool is_wide = false;            // has the accumulation dtype of the model's dtype
  bool is_with_embedding = false;  // outside the layers: the stage that embeds tokens has it,
  bool is_with_loss = false;       // or that with the loss, or both
  bool is_final_norm = false;      // or that which ends the decoder
  bool is_of_mtp = false;          // beside the layer that one of multi-token prediction has
  bool is_matrix = false;          // or one for each expert; else norms and biases
  // Whose products read it, where no others do: all of these can be in 8 bits.
  std::optional<ProductGroup> products = {};
  bool is_outer = false;    // embedding or head, which may have their own learning rate
  bool is_qk_norm = false;  // whose weight decay is an option
  bool is_fused = false;    // the sections of its rows are matrices of their own
  bool decay = true;        // weight decay applies (not to norms and biases)
  // How the elements start: normal with deviation `init_std`, or uniform between -init_bound and
  // init_bound; where both are 0 all are `init_constant`.
  double init_std = 0;
  double init_bound = 0;
  double init_constant = 0;
  // Above 0: the logarithm of a number that is uniform between 0 and this one.
  double init_log_bound = 0;

  uint32_t number() const { return static_cast<uint32_t>(id.index); }
  std::string full_name() const { return name_in_layer(name, layer); }
};

// State of a router, f32: the step moves it, the optimizer does not. Whole on every rank that has
// the layer.
struct RouterStateSpec {
  std::string name;
  int32_t layer = -1;
  Shape shape;
  ParameterId next;  // the parameter that is declared after it, if there is one
};

// What blocks declare into. Belongs to one thread while it grows.
class ParameterList {
 public:
  explicit ParameterList(const ModelConfig& config) : config_(config) {}

  // Of what is declared from now on.
  int32_t layer = -1;
  // The layer has declared it all before: what is declared is found by its name.
  bool repeats = false;

  struct Options {
    std::vector<Cut> cuts = {};
    GradientClass gradient_class = GradientClass::sliced;
    int64_t active_elements = -1;  // all of them
    // A projection into the residual stream starts smaller, so that the variance of that does not
    // grow with depth (Megatron: scaled output initialisation).
    bool is_into_stream = false;
    std::optional<ProductGroup> products = {};  // ParameterSpec::products
  };

  // A matrix, or one for each expert, which starts as the model's options say.
  ParameterId weight(std::string_view name, const Shape& shape, const Options& options);
  // The same, with a deviation of its own where that is not negative.
  ParameterId embedding(std::string_view name, const Shape& shape, const Options& options,
                        double init_std);
  // A bias of a linear map.
  ParameterId bias(std::string_view name, const Shape& shape, const Options& options);
  // The router's, which starts as a weight does (Megatron: Router.reset_parameters).
  ParameterId drawn_bias(std::string_view name, const Shape& shape, const Options& options);
  // Of a norm: what it multiplies by, and what it adds.
  ParameterId gain(std::string_view name, int64_t size, const Options& options);
  ParameterId shift(std::string_view name, int64_t size, const Options& options);
  void router_state(std::string_view name, const Shape& shape);

  ParameterSpec& at(ParameterId id) { return parameters_[static_cast<size_t>(id.index)]; }
  const ParameterSpec& at(ParameterId id) const {
    return parameters_[static_cast<size_t>(id.index)];
  }
  const std::vector<ParameterSpec>& parameters() const { return parameters_; }
  const std::vector<RouterStateSpec>& router_states() const { return router_states_; }

 private:
  // With `repeats` the parameter that is there already.
  ParameterSpec& add(std::string_view name, const Shape& shape, const Options& options);
  ParameterId add_constant(std::string_view name, const Shape& shape, const Options& options,
                           double value);

  const ModelConfig& config_;
  std::vector<ParameterSpec> parameters_;
  std::vector<RouterStateSpec> router_states_;
};

}  // namespace troupe
