#include "train/upcycling.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <fmt/format.h>
#include <map>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "io/convert_dtype.h"
#include "model/model.h"
#include "model/parameters.h"

namespace troupe {
namespace {

// Values that are converted at a time.
constexpr int64_t kBlock = 1024;

constexpr std::string_view kFirstWeight = "w_gate_up";
constexpr std::string_view kFirstBias = "b_gate_up";
constexpr std::string_view kSecondWeight = "w_down";
constexpr std::string_view kSecondBias = "b_down";

bool is_of_router(const Parameter& parameter) {
  return parameter.name == "w_router" || parameter.name == "b_router";
}

bool is_of_experts(const Parameter& parameter) {
  return parameter.gradient_class == GradientClass::expert;
}

// What the dense network's weights are multiplied by, so that the experts of one copy together
// compute what it does.
struct Factors {
  double linear_half = 1;  // the half of the first product that is not activated
  double second = 1;       // the second product
  double second_bias = 1;  // which every expert has whole
};

// An expert's weight where the logits are all 0, of routers whose chosen weights have no fixed sum.
double weight_without_preference(const ModelConfig& config) {
  const bool by_sigmoid = config.moe_router_sinkhorn && config.moe_router_topk == 1;
  switch (by_sigmoid ? ScoreFunction::sigmoid : config.moe_router_score_function) {
    case ScoreFunction::softmax:
      return 1.0 / config.num_experts;
    case ScoreFunction::sigmoid:
      return 0.5;
    case ScoreFunction::sqrtsoftplus:
      return std::sqrt(std::log(2.0));
  }
  TROUPE_CHECK(false, "a score function");
}

Factors factors_of(const ModelConfig& config, int32_t granularity) {
  // The chosen experts' weights together: exactly, or of a router without preferences.
  double sum =
      starts_as_dense(config) ? 1 : weight_without_preference(config) * config.moe_router_topk;
  if (!config.moe_router_sinkhorn) sum *= config.moe_router_topk_scaling_factor;
  const double whole = granularity / sum;
  // Half of it to each product, so that their weights stay of similar size, where the activation
  // lets it through.
  const bool passes =
      config.gated_linear_unit && config.activation_clamp == 0 && config.glu_linear_offset == 0;
  const double first = passes ? std::sqrt(whole) : 1;
  return {.linear_half = first, .second = whole / first, .second_bias = 1 / sum};
}

// Consecutive elements of a tensor of the experts, and where they come from.
struct Origin {
  int64_t first = 0;  // in the dense tensor
  int64_t elements = 0;
  double factor = 1;
};

// Where the elements of one tensor of a layer's experts come from.
class ExpertOrigin {
 public:
  ExpertOrigin(const Parameter& parameter, const ModelConfig& config, int32_t granularity)
      : name_(parameter.name),
        granularity_(granularity),
        width_(config.moe_ffn_hidden_size),
        hidden_(config.hidden_size),
        rows_(parameter.whole_shape[1]),
        factors_(factors_of(config, granularity)) {}

  // Of the expert tensor's element `element` and those after it.
  Origin at(int64_t element) const {
    const int64_t dense_width = width_ * granularity_;
    if (name_ == kFirstWeight || name_ == kFirstBias) {
      const int64_t columns = name_ == kFirstWeight ? hidden_ : 1;
      const int64_t row = element / columns % rows_;
      const int64_t column = element % columns;
      const int64_t half = row / width_;
      const int64_t part = element / columns / rows_ % granularity_ * width_;
      return {.first = (half * dense_width + part + row % width_) * columns + column,
              .elements = columns - column,
              .factor = half == 1 ? factors_.linear_half : 1};
    }
    if (name_ == kSecondWeight) {
      const int64_t row = element / width_;
      const int64_t column = element % width_;
      return {.first = row % hidden_ * dense_width + row / hidden_ % granularity_ * width_ + column,
              .elements = width_ - column,
              .factor = factors_.second};
    }
    TROUPE_CHECK(name_ == kSecondBias, "a tensor of experts that upcycling knows");
    return {.first = element % hidden_,
            .elements = hidden_ - element % hidden_,
            .factor = factors_.second_bias};
  }

 private:
  std::string_view name_;
  int64_t granularity_;
  int64_t width_;
  int64_t hidden_;
  int64_t rows_;
  Factors factors_;
};

// Fills value and master weight of a parameter. values_at(element, out) writes the values of the
// whole tensor's elements from `element` on, and returns how many: 1 to out.size().
template <class ValuesAt>
void fill(const Parameter& parameter, const StateStorage& storage, const ValuesAt& values_at) {
  const std::vector<SliceRun> runs = runs_of(parameter.slice, parameter.whole_shape);
  double values[kBlock];
  const auto fill_tensor = [&](StateId id, const IndexRange& range) {
    if (!id.valid() || !storage.table()[id].is_stored) return;
    const TensorView view = storage.view(id);
    auto* const data = static_cast<std::byte*>(view.data);
    for (const SliceRun& run : runs_within(runs, range)) {
      for (int64_t i = 0; i < run.elements;) {
        const auto room = static_cast<size_t>(std::min(kBlock, run.elements - i));
        const int64_t count = values_at(run.whole + i, std::span<double>(values, room));
        const auto at = static_cast<size_t>(run.own - range.begin + i);
        convert_elements(FileDType::f64, values, to_file_dtype(view.dtype),
                         data + at * size_of(view.dtype), count);
        i += count;
      }
    }
  };
  fill_tensor(parameter.value, parameter.held);
  fill_tensor(parameter.master, parameter.shard);
}

// The router of the first copy's experts, and so on: each row of a new router `granularity` times.
void fill_router(const Parameter& parameter, int32_t granularity, uint64_t seed,
                 const StateStorage& storage) {
  const int64_t columns = parameter.whole_shape.elements() / parameter.whole_shape[0];
  fill(parameter, storage, [&](int64_t element, std::span<double> out) {
    const int64_t column = element % columns;
    const int64_t first = element / columns / granularity * columns + column;
    const int64_t count = std::min<int64_t>(std::ssize(out), columns - column);
    fill_initial_values(parameter, seed, first, count, out.data());
    return count;
  });
}

// A whole tensor of the dense model, in a table of its own.
Parameter whole_parameter(const ParameterSpec& spec, DType dtype, StateTable& table) {
  Parameter parameter(spec);
  for (int i = 0; i < spec.whole_shape.rank(); ++i) {
    parameter.slice.ranges.push_back({{0, spec.whole_shape[i]}});
  }
  parameter.held = parameter.shard = {0, spec.whole_shape.elements()};
  parameter.value =
      table.add({.name = spec.full_name(), .dtype = dtype, .shape = spec.whole_shape});
  return parameter;
}

// The feed-forward network of one layer of the dense model, whole.
class DenseFeedForward {
 public:
  DenseFeedForward(const SavedModel& source, const std::shared_ptr<const Model>& dense,
                   int32_t layer, DType dtype) {
    const auto table = std::make_shared<StateTable>();
    state_.model = dense;
    state_.dtype = dtype;
    for (const ParameterSpec& spec : dense->parameters()) {
      const bool is_wanted =
          spec.layer == layer && (spec.name == kFirstWeight || spec.name == kFirstBias ||
                                  spec.name == kSecondWeight || spec.name == kSecondBias);
      if (is_wanted) state_.parameters.push_back(whole_parameter(spec, dtype, *table));
    }
    state_.table = table;
    storage_ = std::make_unique<StateStorage>(state_.table);
    load_saved_model(source, state_, *storage_);
  }

  // The dense tensor of a tensor of experts.
  TensorView view(const Parameter& of_experts) const {
    const auto found =
        std::find_if(state_.parameters.begin(), state_.parameters.end(),
                     [&](const Parameter& parameter) { return parameter.name == of_experts.name; });
    TROUPE_CHECK(found != state_.parameters.end(), "the dense network has the experts' tensors");
    return storage_->view(found->value);
  }

 private:
  ModelState state_;
  std::unique_ptr<StateStorage> storage_;
};

void fill_experts(const Parameter& parameter, const ExpertOrigin& origin, const TensorView& dense,
                  const StateStorage& storage) {
  const auto* const data = static_cast<const std::byte*>(dense.data);
  fill(parameter, storage, [&](int64_t element, std::span<double> out) {
    const Origin from = origin.at(element);
    const int64_t count = std::min<int64_t>(std::ssize(out), from.elements);
    convert_elements(to_file_dtype(dense.dtype),
                     data + static_cast<size_t>(from.first) * size_of(dense.dtype), FileDType::f64,
                     out.data(), count);
    for (double& value : out.first(static_cast<size_t>(count))) value *= from.factor;
    return count;
  });
}

// The state without routers and experts, as one of the dense model, whose numbers its parameters
// have: on the same storage.
ModelState shared_state(const ModelState& state, const std::shared_ptr<const Model>& dense) {
  ModelState shared = state;
  shared.model = dense;
  shared.parameters.clear();
  shared.expert_biases.clear();
  for (const Parameter& parameter : state.parameters) {
    if (is_of_router(parameter) || is_of_experts(parameter)) continue;
    const auto same = std::find_if(
        dense->parameters().begin(), dense->parameters().end(), [&](const ParameterSpec& spec) {
          return spec.layer == parameter.layer && spec.name == parameter.name;
        });
    TROUPE_CHECK(same != dense->parameters().end(), "the dense model has what is not experts'");
    shared.parameters.push_back(parameter);
    shared.parameters.back().id = same->id;
  }
  return shared;
}

[[noreturn]] void refuse(const std::string& why) {
  throw_bad_request("--moe-use-upcycling: " + why);
}

}  // namespace

ModelConfig dense_model_of(const ModelConfig& config, int32_t granularity) {
  if (config.num_experts == 0) {
    refuse("the model has no experts. Say how many it gets (--num-experts, --moe-router-topk).");
  }
  if (config.has_shared_expert()) {
    refuse(
        "a dense model has nothing that a shared expert could start from. Leave "
        "--moe-shared-expert-intermediate-size out.");
  }
  if (config.num_experts % granularity != 0 || config.moe_router_topk % granularity != 0) {
    refuse(fmt::format(
        "--num-experts ({}) and --moe-router-topk ({}) must be multiples of "
        "--moe-upcycling-granularity ({}), so that whole copies of the dense network are chosen.",
        config.num_experts, config.moe_router_topk, granularity));
  }
  const int64_t width = int64_t{config.moe_ffn_hidden_size} * granularity;
  const bool has_dense_layers = config.moe_layer_count() < config.num_layers;
  if (has_dense_layers && config.ffn_hidden_size != width) {
    refuse(
        fmt::format("the dense network has an inner size of {}, and --moe-ffn-hidden-size {} times "
                    "--moe-upcycling-granularity {} is {}. They must be the same.",
                    config.ffn_hidden_size, config.moe_ffn_hidden_size, granularity, width));
  }
  if (config.mtp_num_layers > 0) {
    refuse(
        "layers of multi-token prediction are not made of a dense model. Leave --mtp-num-layers "
        "out.");
  }
  ModelConfig dense = config;
  dense.num_experts = 0;
  dense.moe_layers.clear();
  dense.ffn_hidden_size = static_cast<int32_t>(width);
  return dense;
}

bool starts_as_dense(const ModelConfig& config) {
  if (config.moe_router_sinkhorn) return false;
  if (config.moe_router_score_function == ScoreFunction::softmax) {
    return !config.moe_router_pre_softmax || config.moe_router_topk == config.num_experts;
  }
  return config.moe_router_normalize_scores && config.moe_router_topk > 1;
}

void upcycle(const SavedModel& dense, int32_t granularity, uint64_t seed, const ModelState& state,
             const StateStorage& storage, const WorkReport& report) {
  const ModelConfig& config = state.model->config();
  if (dense.config.num_experts > 0) {
    refuse(fmt::format("{} has experts already. Leave the flag out to start from it.", dense.path));
  }
  SavedModel source = dense;
  source.config = dense_model_of(config, granularity);
  if (dense.config.ffn_hidden_size != source.config.ffn_hidden_size) {
    refuse(fmt::format("{} has an inner size of {}, and {} x --moe-ffn-hidden-size {} is {}.",
                       dense.path, dense.config.ffn_hidden_size, granularity,
                       config.moe_ffn_hidden_size, source.config.ffn_hidden_size));
  }
  const auto model = std::make_shared<const Model>(source.config);
  load_saved_model(source, shared_state(state, model), storage);

  std::map<int32_t, std::vector<const Parameter*>> experts;  // by layer
  for (const Parameter& parameter : state.parameters) {
    if (is_of_router(parameter)) fill_router(parameter, granularity, seed, storage);
    if (is_of_experts(parameter)) experts[parameter.layer].push_back(&parameter);
  }
  uint64_t done = 0;
  for (const auto& [layer, parameters] : experts) {
    if (report) report(done++, experts.size());
    const DenseFeedForward network(source, model, layer, accumulation_dtype(state.dtype));
    for (const Parameter* parameter : parameters) {
      fill_experts(*parameter, ExpertOrigin(*parameter, config, granularity),
                   network.view(*parameter), storage);
    }
  }
}

}  // namespace troupe
