#include "optimizer/muon_optimizer.h"

#include <algorithm>

#include "base/error.h"
#include "ops/exchange/all_gather/all_gather.h"
#include "ops/exchange/slices/slices.h"

namespace troupe {

std::vector<OptimizerTensor> MuonOptimizer::declare(const OptimizedParameter& parameter,
                                                    const AddOptimizerState& add) const {
  if (!parameter.is_hidden_matrix) return adamw_.declare(parameter, add);
  TROUPE_CHECK(parameter.kept.rank() == parameter.whole_shape.rank(),
               "Muon updates whole matrices, or the slices of a group of ranks");
  const DType dtype = accumulation_dtype(parameter.dtype);
  return {{.name = "momentum", .values = add("momentum", dtype, parameter.kept), .scales = {}}};
}

// As the products of Newton-Schulz take, whose smaller side is squared.
double MuonOptimizer::cost_of_whole(const OptimizedParameter& parameter) const {
  if (!parameter.is_hidden_matrix) return 0;
  const Shape& shape = parameter.whole_shape;
  const int64_t side = std::min(shape.back(), shape[shape.rank() - 2]);
  return static_cast<double>(shape.elements()) * static_cast<double>(side);
}

NewtonSchulzAttributes MuonOptimizer::orthogonalisation(const OptimizedParameter& parameter) const {
  const Shape& shape = options_.is_blockwise ? parameter.kept : parameter.whole_shape;
  const int rows_dimension = shape.rank() - 2;
  const int64_t columns = shape.back();
  const bool is_narrow = accumulation_dtype(parameter.dtype) == DType::f32;
  NewtonSchulzAttributes attributes{
      .steps = options_.steps,
      .coefficients = options_.coefficients,
      .arithmetic = is_narrow ? options_.arithmetic : NewtonSchulzArithmetic::accumulation};
  const auto scale_of = [&](int64_t rows) {
    return muon_scale(options_.scale, rows, columns, options_.extra_scale);
  };
  const std::vector<int64_t>& matrices = parameter.row_matrices;
  if (!options_.split_rows || matrices.empty()) {
    attributes.sections[0].scale = scale_of(shape[rows_dimension]);
    return attributes;
  }
  TROUPE_CHECK(matrices.size() <= attributes.sections.size(), "too many matrices in one");
  for (size_t i = 0; i < matrices.size(); ++i) {
    int64_t rows = matrices[i];
    if (options_.is_blockwise && parameter.cut.dimension == rows_dimension) {
      rows = rows * parameter.cut.sections[i].copies / parameter.cut.ranks;
    }
    attributes.sections[i] = {.rows = rows, .scale = scale_of(rows)};
  }
  return attributes;
}

ValueId MuonOptimizer::orthogonal(Builder& builder, const OptimizedParameter& parameter, ValueId x,
                                  const std::string& name) const {
  const NewtonSchulzAttributes attributes = orthogonalisation(parameter);
  const SliceCut& cut = parameter.cut;
  if (cut.ranks == 1 || options_.is_blockwise) return newton_schulz(builder, x, attributes, name);
  const ValueId slices =
      all_gather(builder, x, {.group = parameter.cut_group, .ranks = cut.ranks}, "slices." + name);
  const ValueId whole = join_slices(builder, slices, cut, "joined." + name);
  return take_slice(builder, newton_schulz(builder, whole, attributes, "whole." + name), cut, name);
}

void MuonOptimizer::emit_update(Builder& builder, const ParameterUpdate& update,
                                const UpdateScalars& scalars) const {
  if (!update.what.is_hidden_matrix) return adamw_.emit_update(builder, update, scalars);
  TROUPE_CHECK(update.tensors.size() == 1 && update.first == 0, "a momentum of the whole matrix");
  const ValueId moved = muon_momentum(builder,
                                      {.gradient = update.gradient,
                                       .momentum = builder.state(update.tensors.front().values),
                                       .coefficient = scalars.coefficient,
                                       .skip = scalars.skip},
                                      {.beta = options_.beta, .nesterov = options_.nesterov},
                                      "direction." + update.name);
  const ValueId direction = orthogonal(builder, update.what, moved, "orthogonal." + update.name);
  muon_update(builder,
              {.update = direction,
               .parameter = update.parameter,
               .master = update.master,
               .learning_rate = scalars.learning_rate,
               .weight_decay = scalars.weight_decay,
               .skip = scalars.skip},
              {.decay = update.decay}, update.name);
}

}  // namespace troupe
