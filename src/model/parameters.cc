#include "model/parameters.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/random.h"
#include "model/parameter_layout.h"
#include "model/parameter_owners.h"
#include "ops/optimizer/adamw/moment_blocks.h"
#include "ops/precision/amax_history/amax_history.h"
#include "ops/precision/scale_blocks.h"

namespace troupe {
namespace {

// Do these ranges of a dimension of `extent` elements leave the blocks of moments whole?
bool keeps_blocks(const std::vector<IndexRange>& ranges, int64_t extent) {
  return std::all_of(ranges.begin(), ranges.end(), [&](const IndexRange& range) {
    return range.begin % kMomentBlock == 0 &&
           (range.end % kMomentBlock == 0 || range.end == extent);
  });
}

// Do the shards of a tensor leave the blocks of its matrices' scales whole?
bool keeps_scales(const Shape& shape, const Shard& shard) {
  if (shard.count == 1 || shard.owner >= 0) return true;
  if (shape[shape.rank() - 2] % kTransposedRows != 0) return false;
  for (int32_t place = 1; place < shard.count; ++place) {
    const IndexRange range = shard_of(shape, {.place = place, .count = shard.count});
    if (range.begin / shape.back() % kTransposedRows != 0) return false;
  }
  return true;
}

class Declaration {
 public:
  Declaration(std::shared_ptr<const Model> model, DType dtype, bool trained, const ModelPart& part)
      : model_(std::move(model)),
        dtype_(dtype),
        trained_(trained),
        part_(part),
        place_(part.dense().pp),
        owners_(parameter_owners(model_->parameters(), part)) {}

  ModelState run() {
    std::vector<StateId> expert_biases(static_cast<size_t>(model_->config().all_layers()));
    auto state = model_->router_states().begin();
    const auto declare_states_until = [&](int32_t next) {
      for (; state != model_->router_states().end() && state->next.index <= next; ++state) {
        expert_biases[static_cast<size_t>(state->layer)] = add(*state);
      }
    };
    for (const ParameterSpec& spec : model_->parameters()) {
      declare_states_until(spec.id.index);
      if (holds(part_.partition(), place_, spec)) add(spec);
    }
    declare_states_until(std::numeric_limits<int32_t>::max());
    keep_optimizer_on_host();
    return {
        std::move(model_),       part_, dtype_, trained_, std::move(table_), std::move(parameters_),
        std::move(expert_biases)};
  }

 private:
  // Invalid where the rank has not the layer.
  StateId add(const RouterStateSpec& state) {
    if (!part_.has_layer(state.layer)) return {};
    return table_->add({.name = name_in_layer(state.name, state.layer),
                        .dtype = DType::f32,
                        .shape = state.shape,
                        .role = Role::router_state,
                        .gradient = {}});
  }

  void add(const ParameterSpec& spec) {
    Parameter parameter(spec);
    const DType dtype = spec.is_wide ? accumulation_dtype(dtype_) : dtype_;
    parameter.slice = slice_of(spec, part_.layout(), part_.rank);
    const Shape shape = parameter.slice.shape();
    Shard shard = part_.shard(spec.gradient_class);
    shard.owner = parameter.owner = owners_[static_cast<size_t>(spec.id.index)];
    parameter.shard = shard_of(shape, shard);
    const bool is_sharded = part_.run->sharding == StateSharding::parameters;
    parameter.held = is_sharded ? parameter.shard : IndexRange{0, shape.elements()};
    parameter.is_in_codes = trained_ && is_in_codes(spec, shape, shard);
    const Shape kept = shape_of_shard(shape, shard);
    const Shape& held = is_sharded ? kept : shape;
    const auto add_state = [&](const std::string& prefix, DType type, const Shape& of, Role role) {
      return table_->add({.name = prefix + spec.full_name(),
                          .dtype = type,
                          .shape = of,
                          .role = role,
                          .gradient = {}});
    };
    parameter.value = add_state("", dtype, held, Role::parameter);
    if (trained_) {
      const DType wide = accumulation_dtype(dtype);
      const DType gradient = dtype == DType::bf16 ? part_.run->main_gradients : wide;
      parameter.gradient = add_state("grad.", gradient, held, Role::gradient);
      table_->at(parameter.value).gradient = parameter.gradient;
      if (kept.elements() > 0) add_optimizer_state(parameter, dtype, kept, add_state);
      // Also of an empty shard, whose codes are given to the others as those of any.
      const bool has_master = kept.elements() > 0 || parameter.is_in_codes;
      if (dtype != wide && has_master) {
        parameter.master = add_state(kMasterPrefix, wide, kept, Role::optimizer);
      }
      table_->at(parameter.value).is_stored = !(parameter.is_in_codes && dtype != wide);
    }
    if (part_.run->amax_history > 0 && spec.is_matrix && !spec.is_outer && spec.layer >= 0) {
      const int64_t matrices = spec.gradient_class == GradientClass::expert ? shape[0] : 1;
      parameter.amax_history =
          add_state(std::string(kAmaxHistoryPrefix), DType::f32,
                    {matrices, kHistoryKinds, part_.run->amax_history}, Role::optimizer);
      table_->at(parameter.value).amax_history = parameter.amax_history;
    }
    parameters_.push_back(std::move(parameter));
  }

  // `kept`: the shape of the rank's shard, which is not empty.
  template <class AddState>
  void add_optimizer_state(Parameter& parameter, DType dtype, const Shape& kept,
                           const AddState& add_state) {
    OptimizedParameter& what = parameter.optimized;
    const MatrixCut cut = matrix_cut_of(parameter, part_.layout(), part_.rank);
    what = {.dtype = dtype,
            .whole_shape = parameter.whole_shape,
            .kept = kept,
            .is_hidden_matrix = parameter.is_matrix && !parameter.is_outer,
            .row_matrices = {},
            .cut_group = cut.group,
            .cut = cut.slices};
    if (parameter.is_fused) {
      for (const CutSection& section : parameter.cuts.front().sections) {
        what.row_matrices.push_back(section.size);
      }
    }
    parameter.optimizer = part_.run->optimizer->declare(
        what, [&](const std::string& prefix, DType type, const Shape& shape) {
          return add_state(prefix + ".", type, shape, Role::optimizer);
        });
    for (const OptimizerTensor& tensor : parameter.optimizer) {
      TROUPE_CHECK(!tensor.scales.valid() ||
                       keeps_blocks(parameter.slice.ranges.back(), parameter.whole_shape.back()),
                   "blocks of moments are cut: " + parameter.full_name());
    }
  }

  bool is_in_codes(const ParameterSpec& spec, const Shape& shape, const Shard& shard) const {
    const std::optional<WeightCodes>& codes = part_.run->weight_codes;
    return codes && spec.products && !keeps_products(codes->kept, spec.layer, *spec.products) &&
           (!codes->has_blocks || keeps_scales(shape, shard));
  }

  // As Megatron chooses them: in their order, until that many elements are reached.
  void keep_optimizer_on_host() {
    const auto elements_of = [&](const Parameter& parameter) {
      return parameter.is_updated() ? parameter.shard.end - parameter.shard.begin : int64_t{0};
    };
    int64_t all = 0;
    for (const Parameter& parameter : parameters_) all += elements_of(parameter);
    const double wanted = part_.run->optimizer_offload * static_cast<double>(all);
    int64_t chosen = 0;
    for (const Parameter& parameter : parameters_) {
      if (static_cast<double>(chosen) >= wanted) return;
      const auto keep = [&](StateId id) {
        if (id.valid()) table_->at(id).on_host = true;
      };
      for (const OptimizerTensor& tensor : parameter.optimizer) {
        keep(tensor.values);
        keep(tensor.scales);
      }
      keep(parameter.master);
      chosen += elements_of(parameter);
    }
  }

  std::shared_ptr<const Model> model_;
  const DType dtype_;
  const bool trained_;
  const ModelPart& part_;
  const int32_t place_;  // in the pipeline
  const std::vector<int32_t> owners_;
  std::shared_ptr<StateTable> table_ = std::make_shared<StateTable>();
  std::vector<Parameter> parameters_;
};

}  // namespace

ModelState declare_model_state(const ModelConfig& config, DType dtype, bool trained) {
  return declare_model_state(config, dtype, trained,
                             {.run = std::make_shared<const RunLayout>(
                                  layout_of_one_rank(config.num_layers, config.mtp_num_layers)),
                              .rank = 0});
}

ModelState declare_model_state(const ModelConfig& config, DType dtype, bool trained,
                               const ModelPart& part) {
  return declare_model_state(std::make_shared<const Model>(config), dtype, trained, part);
}

ModelState declare_model_state(std::shared_ptr<const Model> model, DType dtype, bool trained,
                               const ModelPart& part) {
  return Declaration(std::move(model), dtype, trained, part).run();
}

double initial_value(const Parameter& parameter, uint64_t seed, int64_t element) {
  const auto index = static_cast<uint64_t>(element);
  if (parameter.init_bound > 0) {
    const double drawn = random_uniform(seed, RandomStream::parameter, parameter.number(), index);
    return parameter.init_bound * (2 * drawn - 1);
  }
  if (parameter.init_log_bound > 0) {
    const double drawn = random_uniform(seed, RandomStream::parameter, parameter.number(), index);
    return std::log(std::max(parameter.init_log_bound * drawn, 1e-6));
  }
  if (parameter.init_std == 0) return parameter.init_constant;
  return parameter.init_std *
         random_normal(seed, RandomStream::parameter, parameter.number(), index);
}

void fill_initial_values(const Parameter& parameter, uint64_t seed, int64_t first, int64_t count,
                         double* values) {
  if (parameter.init_bound > 0 || parameter.init_log_bound > 0) {
    for (int64_t i = 0; i < count; ++i) values[i] = initial_value(parameter, seed, first + i);
    return;
  }
  if (parameter.init_std == 0) {
    std::fill(values, values + count, parameter.init_constant);
    return;
  }
  fill_random_normals(seed, RandomStream::parameter, parameter.number(),
                      static_cast<uint64_t>(first), count, values);
  for (int64_t i = 0; i < count; ++i) values[i] *= parameter.init_std;
}

}  // namespace troupe
