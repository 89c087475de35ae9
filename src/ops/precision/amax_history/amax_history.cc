#include "ops/precision/amax_history/amax_history.h"

#include <fmt/format.h>
#include <vector>

#include "ops/choose_kernel.h"
#include "program/op_sample.h"

namespace troupe {

void delayed_amax_cpu(const KernelArguments& args);
void amax_history_update_cpu(const KernelArguments& args);
CudaKernel delayed_amax_cuda_kernel(const OpView& op);
CudaKernel amax_history_update_cuda_kernel(const OpView& op);

namespace {

const Value& check_history(InferContext& context) {
  const Value& history = context.input(0);
  TROUPE_CHECK(history.dtype == DType::f32 && history.shape.rank() == 3 &&
                   history.shape[1] == kHistoryKinds && history.shape[2] > 0,
               "a history of largest elements " + history.shape.to_string());
  return history;
}

void infer_delayed_amax(InferContext& context) {
  const int64_t matrices = check_history(context).shape[0];
  const bool experts = context.attributes<DelayedAmaxAttributes>().experts;
  TROUPE_CHECK(experts || matrices == 1, "delayed_amax: several matrices that are no experts'");
  context.output("input", DType::f32, {matrices, 1});
  context.output("weight", DType::f32, experts ? Shape{matrices, 1, 1} : Shape{1, 1});
  context.output("gradient", DType::f32, {matrices, 1});
}

void infer_amax_history_update(InferContext& context) {
  const int64_t matrices = check_history(context).shape[0];
  const auto& columns = context.attributes<AmaxHistoryAttributes>().column;
  for (int kind = 0; kind < kHistoryKinds; ++kind) {
    const Value& parts = context.input(kind == kHistoryKinds - 1 ? 2 : 1);
    const int64_t first = columns[static_cast<size_t>(kind)];
    TROUPE_CHECK(parts.dtype == DType::f64 && parts.shape.rank() == 2 && first >= 0 &&
                     first + matrices <= parts.shape[1],
                 "amax_history_update: largest elements " + parts.shape.to_string());
  }
  const Value& skip = context.input(3);
  TROUPE_CHECK(skip.dtype == DType::i32 && skip.shape == Shape({1}),
               "amax_history_update: skip is i32 [1]: " + skip.name);
  context.mutates(0);
}

Cost cost_delayed_amax(const OpView& op) {
  return {.flops = static_cast<double>(op.input(0).shape.elements()),
          .bytes = static_cast<double>(op.input(0).bytes())};
}

// It moves by one.
Cost cost_amax_history_update(const OpView& op) {
  const auto compared =
      static_cast<double>(op.input(0).shape[0] * kHistoryKinds * op.input(1).shape[0]);
  return {.flops = compared,
          .bytes = 2 * static_cast<double>(op.input(0).bytes()) + compared * sizeof(double)};
}

CpuKernel delayed_amax_kernel(const OpView&) {
  return &delayed_amax_cpu;
}

CpuKernel amax_history_update_kernel(const OpView&) {
  return &amax_history_update_cpu;
}

std::string print_delayed_amax(const Attributes& attributes) {
  const auto& values = attributes.as<DelayedAmaxAttributes>();
  return fmt::format("{} factor={}", values.most_recent ? "most_recent" : "max", values.factor);
}

std::string print_amax_history_update(const Attributes& attributes) {
  return fmt::format("columns={}", fmt::join(attributes.as<AmaxHistoryAttributes>().column, ","));
}

std::vector<OpSample> samples_delayed_amax() {
  const auto history = [](int64_t matrices, const DelayedAmaxAttributes& attributes) {
    return [=](SampleBuilder& sample) {
      SampleBuilder::Options constant;
      constant.differentiable = false;
      constant.dtype = DType::f32;
      // Magnitudes, as all largest elements are.
      std::vector<double> magnitudes;
      for (int64_t i = 0; i < matrices * kHistoryKinds * 5; ++i) {
        magnitudes.push_back(static_cast<double>(i * 7 % 11) / 4);
      }
      const ValueId x =
          sample.values("history", {matrices, kHistoryKinds, 5}, magnitudes, constant);
      for (const ValueId amax : delayed_amax(sample.builder(), x, attributes)) {
        sample.result_without_gradient(amax);
      }
    };
  };
  return {{"most_recent", history(1, {.most_recent = true})},
          {"max", history(1, {.most_recent = false, .factor = 4})},
          {"experts", history(3, {.most_recent = false, .experts = true})}};
}

}  // namespace

std::array<ValueId, kHistoryKinds> delayed_amax(Builder& builder, ValueId history,
                                                const DelayedAmaxAttributes& attributes) {
  const std::string name = builder.value(history).name + ".used";
  const auto outputs = builder.emit(kDelayedAmax, Attributes(attributes), {history}, name);
  return {outputs[0], outputs[1], outputs[2]};
}

void amax_history_update(Builder& builder, ValueId history, ValueId forward, ValueId backward,
                         ValueId skip, const AmaxHistoryAttributes& attributes) {
  const std::string name = builder.value(history).name;
  builder.emit(kAmaxHistoryUpdate, Attributes(attributes), {history, forward, backward, skip},
               name);
}

const OpSpec kDelayedAmax{.name = "delayed_amax",
                          .infer = infer_delayed_amax,
                          .cost = cost_delayed_amax,
                          .cpu = {.kernel = delayed_amax_kernel},
                          .cuda = only_kernel<TROUPE_CUDA(delayed_amax_cuda_kernel)>,
                          .print_attributes = print_delayed_amax,
                          .samples = samples_delayed_amax};

const OpSpec kAmaxHistoryUpdate{.name = "amax_history_update",
                                .infer = infer_amax_history_update,
                                .cost = cost_amax_history_update,
                                .cpu = {.kernel = amax_history_update_kernel},
                                .cuda = only_kernel<TROUPE_CUDA(amax_history_update_cuda_kernel)>,
                                .print_attributes = print_amax_history_update};

}  // namespace troupe
