#include "ops/exchange/offload/offload.h"

#include "ops/choose_kernel.h"
#include "program/op_sample.h"

namespace troupe {

void copy_live_rows_cpu(const KernelArguments& args);
CudaKernel host_copy_cuda_kernel(const OpView& op);

namespace {

void infer_offload(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 1, "offload: takes a tensor");
  const Value& x = context.input(0);
  TROUPE_CHECK(is_float(x.dtype) && !is_state(x.role) && !is_on_host(x.role),
               "offload: needs a float tensor of the device that is no state: " + x.name);
  context.output("", x.dtype, x.shape, x.rows, Role::offloaded);
}

void infer_reload(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 1, "reload: takes a tensor");
  const Value& host = context.input(0);
  TROUPE_CHECK(is_on_host(host.role), "reload: needs a tensor of the host: " + host.name);
  context.output("", host.dtype, host.shape, host.rows);
}

Cost cost_host_copy(const OpView& op) {
  return {.flops = 0, .bytes = static_cast<double>(op.input(0).bytes() + op.output(0).bytes())};
}

CpuKernel host_copy_cpu_kernel(const OpView&) {
  return &copy_live_rows_cpu;
}

ValueId emit_copy(Builder& builder, const OpSpec& spec, ValueId x, const std::string& name) {
  const PlaceScope scope(builder);
  builder.place.queue = Queue::copy;
  return builder.emit(spec, Attributes(NoAttributes()), {x}, name)[0];
}

std::vector<OpSample> samples_offload() {
  const auto there_and_back = [](SampleBuilder& sample, ValueId x) {
    const ValueId host = offload(sample.builder(), x, "host");
    sample.result_without_gradient(reload(sample.builder(), host, "y"));
  };
  const auto dense = [=](const Shape& shape) {
    return [=](SampleBuilder& sample) {
      there_and_back(sample, sample.tensor("x", shape, {.differentiable = false}));
    };
  };
  const auto ragged = [=](int32_t live) {
    return [=](SampleBuilder& sample) {
      const ValueId counter = sample.integers("counter", {2}, {9, live});
      there_and_back(sample,
                     sample.tensor("x", {6, 5},
                                   {.differentiable = false, .rows = counter, .rows_element = 1}));
    };
  };
  return {{"matrix", dense({5, 7})},
          {"scalar", dense({})},
          {"several chunks", dense({3, 40001})},
          {"ragged", ragged(4)},
          {"ragged without rows", ragged(0)}};
}

}  // namespace

ValueId offload(Builder& builder, ValueId x, const std::string& name) {
  return emit_copy(builder, kOffload, x, name);
}

ValueId reload(Builder& builder, ValueId host, const std::string& name) {
  return emit_copy(builder, kReload, host, name);
}

const OpSpec kOffload{.name = "offload",
                      .infer = infer_offload,
                      .cost = cost_host_copy,
                      .cpu = {.kernel = host_copy_cpu_kernel},
                      .cuda = only_kernel<TROUPE_CUDA(host_copy_cuda_kernel)>,
                      .samples = samples_offload};

const OpSpec kReload{.name = "reload",
                     .infer = infer_reload,
                     .cost = cost_host_copy,
                     .cpu = {.kernel = host_copy_cpu_kernel},
                     .cuda = only_kernel<TROUPE_CUDA(host_copy_cuda_kernel)>};

}  // namespace troupe
