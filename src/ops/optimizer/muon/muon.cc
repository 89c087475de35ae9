#include "ops/optimizer/muon/muon.h"

#include <algorithm>
#include <cmath>
#include <fmt/format.h>

#include "ops/choose_kernel.h"
#include "ops/optimizer/parameter_dtype.h"

namespace troupe {

CpuKernel muon_momentum_cpu_kernel(const OpView& op);
CpuKernel muon_update_cpu_kernel(const OpView& op);
CudaKernel muon_momentum_cuda_kernel(const OpView& op);
CudaKernel muon_update_cuda_kernel(const OpView& op);

namespace {

void check_scalar(const InferContext& context, int i, DType dtype) {
  const Value& value = context.input(i);
  TROUPE_CHECK(value.dtype == dtype && value.shape == Shape({1}),
               "muon: not a scalar of the right type: " + value.name);
}

// That a shard of `elements` from `first` on lies in the whole.
void check_shard(const Value& whole, int64_t first, int64_t elements) {
  TROUPE_CHECK(first >= 0 && first + elements <= whole.shape.elements(),
               "muon: a shard of more than there is: " + whole.name);
}

void infer_muon_momentum(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 4,
               "muon_momentum takes gradient, momentum, coefficient and skip");
  const auto& attributes = context.attributes<MuonMomentumAttributes>();
  const Value& gradient = context.input(0);
  const Value momentum = context.input(1);
  TROUPE_CHECK(
      (momentum.dtype == DType::f32 || momentum.dtype == DType::f64) && !momentum.rows.valid(),
      "muon_momentum needs an f32 or f64 momentum: " + momentum.name);
  const bool is_narrow = gradient.dtype == DType::bf16 && momentum.dtype == DType::f32;
  TROUPE_CHECK((gradient.dtype == momentum.dtype || is_narrow) && !gradient.rows.valid(),
               "muon_momentum: a gradient unlike its momentum: " + gradient.name);
  check_shard(gradient, attributes.first, momentum.shape.elements());
  check_scalar(context, 2, DType::f64);
  check_scalar(context, 3, DType::i32);
  context.mutates(1);
  if (attributes.nesterov) context.output("", momentum.dtype, momentum.shape);
}

Cost cost_muon_momentum(const OpView& view) {
  const bool nesterov = view.attributes<MuonMomentumAttributes>().nesterov;
  const auto elements = static_cast<uint64_t>(view.input(1).shape.elements());
  const uint64_t bytes =
      elements * size_of(view.input(0).dtype) + (nesterov ? 3 : 2) * view.input(1).bytes();
  return {.flops = (nesterov ? 7 : 4) * static_cast<double>(elements),
          .bytes = static_cast<double>(bytes)};
}

std::string print_first(int64_t first) {
  return first > 0 ? fmt::format(" first={}", first) : "";
}

std::string print_muon_momentum(const Attributes& attributes) {
  const auto& a = attributes.as<MuonMomentumAttributes>();
  return fmt::format("beta={} nesterov={:d}{}", a.beta, a.nesterov, print_first(a.first));
}

void infer_muon_update(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 6,
               "muon_update takes update, parameter, master and three scalars");
  const Value& update = context.input(0);
  const Value& parameter = context.input(context.has_input(1) ? 1 : 0);
  const DType dtype = parameter_dtype(context, 1);
  TROUPE_CHECK(is_float(dtype) && !parameter.rows.valid(),
               "muon_update needs a float parameter: " + parameter.name);
  TROUPE_CHECK(update.dtype == accumulation_dtype(dtype) && update.shape == parameter.shape &&
                   !update.rows.valid(),
               "muon_update: an update unlike its parameter: " + update.name);
  const int64_t first = context.attributes<MuonUpdateAttributes>().first;
  TROUPE_CHECK(
      context.has_input(2) == (is_half(dtype)),
      "muon_update: a bf16 or f16 parameter, and no other, has a master: " + parameter.name);
  if (context.has_input(2)) {
    const Value& master = context.input(2);
    TROUPE_CHECK(master.dtype == DType::f32, "muon_update: a master is f32: " + master.name);
    check_shard(parameter, first, master.shape.elements());
  } else {
    TROUPE_CHECK(first == 0, "muon_update: only a master is a shard: " + parameter.name);
  }
  check_scalar(context, 3, DType::f64);
  check_scalar(context, 4, DType::f64);
  check_scalar(context, 5, DType::i32);
  if (context.has_input(1)) context.mutates(1);
  if (context.has_input(2)) context.mutates(2);
}

// The parameter, or its master, is read and written; a bf16 parameter is only written, if it is
// there.
Cost cost_muon_update(const OpView& view) {
  const Value& weights = view.input(view.has_input(2) ? 2 : 1);
  const auto elements = static_cast<uint64_t>(weights.shape.elements());
  uint64_t bytes = elements * size_of(view.input(0).dtype) + 2 * weights.bytes();
  if (view.has_input(2) && view.has_input(1)) bytes += elements * size_of(view.input(1).dtype);
  return {.flops = 3 * static_cast<double>(elements), .bytes = static_cast<double>(bytes)};
}

std::string print_muon_update(const Attributes& attributes) {
  const auto& a = attributes.as<MuonUpdateAttributes>();
  return fmt::format("scale={} decay={:d}{}", a.scale, a.decay, print_first(a.first));
}

}  // namespace

double muon_scale(MuonScale mode, int64_t rows, int64_t columns, double extra_factor) {
  const auto outputs = static_cast<double>(rows);
  const auto inputs = static_cast<double>(columns);
  switch (mode) {
    case MuonScale::spectral:
      return extra_factor * std::sqrt(std::max(outputs, inputs));
    case MuonScale::unit_rms_norm:
      return extra_factor * std::sqrt(outputs / inputs);
    case MuonScale::shape_scaling:
      break;
  }
  return extra_factor * std::sqrt(std::max(1.0, outputs / inputs));
}

ValueId muon_momentum(Builder& builder, const MuonMomentumOperands& operands,
                      const MuonMomentumAttributes& attributes, const std::string& name) {
  return builder
      .emit(kMuonMomentum, Attributes(attributes),
            {operands.gradient, operands.momentum, operands.coefficient, operands.skip}, name)
      .back();
}

void muon_update(Builder& builder, const MuonUpdateOperands& operands,
                 const MuonUpdateAttributes& attributes, const std::string& name) {
  builder.emit(kMuonUpdate, Attributes(attributes),
               {operands.update, operands.parameter, operands.master, operands.learning_rate,
                operands.weight_decay, operands.skip},
               name);
}

const OpSpec kMuonMomentum{.name = "muon_momentum",
                           .infer = infer_muon_momentum,
                           .cost = cost_muon_momentum,
                           .cpu = {.kernel = muon_momentum_cpu_kernel},
                           .cuda = only_kernel<TROUPE_CUDA(muon_momentum_cuda_kernel)>,
                           .print_attributes = print_muon_momentum};

const OpSpec kMuonUpdate{.name = "muon_update",
                         .infer = infer_muon_update,
                         .cost = cost_muon_update,
                         .cpu = {.kernel = muon_update_cpu_kernel},
                         .cuda = only_kernel<TROUPE_CUDA(muon_update_cuda_kernel)>,
                         .print_attributes = print_muon_update};

}  // namespace troupe
