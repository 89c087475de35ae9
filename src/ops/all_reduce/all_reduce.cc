#include "ops/all_reduce/all_reduce.h"

namespace troupe {

void all_reduce_cpu(const KernelArguments& args);

namespace {

void infer_all_reduce(InferContext& context) {
  TROUPE_CHECK(context.input_count() > 0, "all_reduce needs a tensor");
  for (int i = 0; i < context.input_count(); ++i) {
    const Value& tensor = context.input(i);
    TROUPE_CHECK(
        tensor.dtype == DType::f64 || tensor.dtype == DType::f32 || tensor.dtype == DType::i32,
        "all_reduce: not f64, f32 or i32: " + tensor.name);
    TROUPE_CHECK(!tensor.rows.valid(), "all_reduce: ragged: " + tensor.name);
    context.mutates(i);
  }
}

// One addition for each element and rank; a rank does its share of all ranks' additions.
Cost cost_all_reduce(const OpView& op) {
  Cost cost;
  for (int i = 0; i < op.op.input_count; ++i) {
    cost.flops += static_cast<double>(op.input(i).shape.elements());
    cost.bytes += 2 * static_cast<double>(op.input(i).bytes());
  }
  return cost;
}

RankGroup group_of_all_reduce(const Attributes& attributes) {
  return attributes.as<AllReduceAttributes>().group;
}

CpuKernel all_reduce_kernel(const OpView&) {
  return &all_reduce_cpu;
}

std::string print_all_reduce(const Attributes& attributes) {
  return "group=" + std::string(name_of(attributes.as<AllReduceAttributes>().group));
}

}  // namespace

void all_reduce(Builder& builder, std::span<const ValueId> tensors,
                const AllReduceAttributes& attributes) {
  const Place caller_place = builder.place;
  builder.place.queue = Queue::communication;
  builder.emit(kAllReduce, Attributes(attributes), tensors, "all_reduce");
  builder.place = caller_place;
}

const OpSpec kAllReduce{.name = "all_reduce",
                        .infer = infer_all_reduce,
                        .cost = cost_all_reduce,
                        .cpu_kernel = all_reduce_kernel,
                        .group = group_of_all_reduce,
                        .print_attributes = print_all_reduce};

}  // namespace troupe
