#include "model/parameter_spec.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.h"

namespace troupe {

Cut cut_anywhere(int dimension, CutOver over, int64_t size, const char* what) {
  return {.dimension = dimension, .over = over, .sections = {{size, size}}, .what = what};
}

std::string name_in_layer(std::string_view name, int32_t layer) {
  const std::string own(name);
  return layer < 0 ? own : "layers." + std::to_string(layer) + "." + own;
}

ParameterSpec& ParameterList::add(std::string_view name, const Shape& shape,
                                  const Options& options) {
  if (repeats) {
    const auto found = std::find_if(
        parameters_.begin(), parameters_.end(),
        [&](const ParameterSpec& each) { return each.layer == layer && each.name == name; });
    TROUPE_CHECK(found != parameters_.end() && found->whole_shape == shape,
                 "a repeated layer declares what the first has");
    return *found;
  }
  ParameterSpec spec;
  spec.name = name;
  spec.layer = layer;
  spec.id = {static_cast<int32_t>(parameters_.size())};
  spec.whole_shape = shape;
  spec.cuts = options.cuts;
  spec.gradient_class = options.gradient_class;
  spec.products = options.products;
  spec.active_elements = options.active_elements < 0 ? shape.elements() : options.active_elements;
  parameters_.push_back(std::move(spec));
  return parameters_.back();
}

ParameterId ParameterList::weight(std::string_view name, const Shape& shape,
                                  const Options& options) {
  return embedding(name, shape, options, -1);
}

ParameterId ParameterList::embedding(std::string_view name, const Shape& shape,
                                     const Options& options, double init_std) {
  ParameterSpec& spec = add(name, shape, options);
  spec.is_matrix = true;
  if (init_std >= 0) {
    spec.init_std = init_std;
  } else if (config_.init_method_xavier_uniform) {
    // Of the matrix, or of one expert's, whole.
    const auto fans = static_cast<double>(shape[shape.rank() - 1] + shape[shape.rank() - 2]);
    spec.init_bound = std::sqrt(6.0 / fans);
  } else {
    spec.init_std = config_.init_method_std;
    if (options.is_into_stream) spec.init_std /= std::sqrt(2.0 * config_.num_layers);
  }
  return spec.id;
}

// One that starts the same everywhere and does not decay.
ParameterId ParameterList::add_constant(std::string_view name, const Shape& shape,
                                        const Options& options, double value) {
  ParameterSpec& spec = add(name, shape, options);
  spec.init_constant = value;
  spec.decay = false;
  return spec.id;
}

ParameterId ParameterList::bias(std::string_view name, const Shape& shape, const Options& options) {
  return add_constant(name, shape, options, 0);
}

ParameterId ParameterList::drawn_bias(std::string_view name, const Shape& shape,
                                      const Options& options) {
  ParameterSpec& spec = add(name, shape, options);
  spec.init_std = config_.init_method_std;
  spec.decay = false;
  return spec.id;
}

ParameterId ParameterList::gain(std::string_view name, int64_t size, const Options& options) {
  const ParameterId id = add_constant(name, {size}, options, config_.zero_centered_gamma ? 0 : 1);
  at(id).is_wide = true;
  return id;
}

ParameterId ParameterList::shift(std::string_view name, int64_t size, const Options& options) {
  const ParameterId id = add_constant(name, {size}, options, 0);
  at(id).is_wide = true;
  return id;
}

void ParameterList::router_state(std::string_view name, const Shape& shape) {
  if (repeats) return;
  router_states_.push_back({.name = std::string(name),
                            .layer = layer,
                            .shape = shape,
                            .next = {static_cast<int32_t>(parameters_.size())}});
}

}  // namespace troupe
