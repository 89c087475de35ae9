#include "optimizer/muon_optimizer.h"

#include "base/error.h"

namespace troupe {
namespace {

bool is_hidden_matrix(const OptimizedParameter& parameter) {
  return parameter.whole_shape.rank() >= 2 && !parameter.is_outer;
}

}  // namespace

std::vector<OptimizerTensor> MuonOptimizer::declare(const OptimizedParameter& parameter,
                                                    const AddOptimizerState& add) const {
  if (!is_hidden_matrix(parameter)) return adamw_.declare(parameter, add);
  for (int i = 1; i <= 2; ++i) {
    const int kept = parameter.kept.rank() - i;
    const int whole = parameter.whole_shape.rank() - i;
    TROUPE_CHECK(kept >= 0 && parameter.kept[kept] == parameter.whole_shape[whole],
                 "Muon updates whole matrices");
  }
  const DType dtype = accumulation_dtype(parameter.dtype);
  return {{.name = "momentum", .values = add("momentum", dtype, parameter.kept), .scales = {}}};
}

NewtonSchulzAttributes MuonOptimizer::orthogonalisation(const OptimizedParameter& parameter) const {
  const Shape& shape = parameter.whole_shape;
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
    attributes.sections[0].scale = scale_of(shape[shape.rank() - 2]);
    return attributes;
  }
  TROUPE_CHECK(matrices.size() <= attributes.sections.size(), "too many matrices in one");
  for (size_t i = 0; i < matrices.size(); ++i) {
    attributes.sections[i] = {.rows = matrices[i], .scale = scale_of(matrices[i])};
  }
  return attributes;
}

void MuonOptimizer::emit_update(Builder& builder, const ParameterUpdate& update,
                                const UpdateScalars& scalars) const {
  if (!is_hidden_matrix(update.what)) return adamw_.emit_update(builder, update, scalars);
  TROUPE_CHECK(update.tensors.size() == 1 && update.first == 0, "a momentum of the whole matrix");
  const ValueId moved = muon_momentum(builder,
                                      {.gradient = update.gradient,
                                       .momentum = builder.state(update.tensors.front().values),
                                       .coefficient = scalars.coefficient,
                                       .skip = scalars.skip},
                                      {.beta = options_.beta, .nesterov = options_.nesterov},
                                      "direction." + update.name);
  const ValueId direction =
      newton_schulz(builder, moved, orthogonalisation(update.what), "orthogonal." + update.name);
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
