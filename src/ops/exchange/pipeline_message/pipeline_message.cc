#include "ops/exchange/pipeline_message/pipeline_message.h"

#include <fmt/format.h>

#include "ops/choose_kernel.h"
#include "ops/emit_collective.h"

namespace troupe {

void send_cpu(const KernelArguments& args);
void finish_send_cpu(const KernelArguments& args);
void receive_cpu(const KernelArguments& args);
CudaKernel send_cuda_kernel(const OpView& op);
CudaKernel finish_send_cuda_kernel(const OpView& op);
CudaKernel receive_cuda_kernel(const OpView& op);

namespace {

void infer_sent(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 1, "a message is one tensor");
  const Value& x = context.input(0);
  TROUPE_CHECK(!is_persistent(x.role) && !x.rows.valid(),
               "a message is an activation that is not ragged: " + x.name);
}

void infer_receive(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 0, "receive has no operands");
  const auto& attributes = context.attributes<ReceiveAttributes>();
  context.output("", attributes.dtype, attributes.shape);
}

Cost cost_send(const OpView& op) {
  return {.flops = 0, .bytes = static_cast<double>(op.input(0).bytes())};
}

Cost cost_finish_send(const OpView&) {
  return {};
}

Cost cost_receive(const OpView& op) {
  return {.flops = 0, .bytes = static_cast<double>(op.output(0).bytes())};
}

CpuKernel send_kernel(const OpView&) {
  return &send_cpu;
}

CpuKernel finish_send_kernel(const OpView&) {
  return &finish_send_cpu;
}

CpuKernel receive_kernel(const OpView&) {
  return &receive_cpu;
}

LinkTraffic links_of_send(const OpView& op, int32_t /*ranks*/) {
  return {.bytes = static_cast<double>(op.input(0).bytes()), .messages = 1};
}

RankGroup group_of_sent(const Attributes& attributes) {
  return attributes.as<MessageAttributes>().group;
}

RankGroup group_of_receive(const Attributes& attributes) {
  return attributes.as<ReceiveAttributes>().way.group;
}

MessageUse message_of_send(const Attributes& attributes) {
  return {MessageUse::Action::send, attributes.as<MessageAttributes>().peer};
}

MessageUse message_of_finish_send(const Attributes& attributes) {
  return {MessageUse::Action::finish, attributes.as<MessageAttributes>().peer};
}

MessageUse message_of_receive(const Attributes& attributes) {
  return {MessageUse::Action::receive, attributes.as<ReceiveAttributes>().way.peer};
}

std::string print_sent(const Attributes& attributes) {
  const auto& way = attributes.as<MessageAttributes>();
  return fmt::format("group={} to={}", name_of(way.group), way.peer);
}

std::string print_receive(const Attributes& attributes) {
  const MessageAttributes& way = attributes.as<ReceiveAttributes>().way;
  return fmt::format("group={} from={}", name_of(way.group), way.peer);
}

}  // namespace

void send(Builder& builder, ValueId x, const MessageAttributes& attributes) {
  emit_collective(builder, kSend, Attributes(attributes), {x}, "send");
}

void finish_send(Builder& builder, ValueId x, const MessageAttributes& attributes) {
  emit_collective(builder, kFinishSend, Attributes(attributes), {x}, "finish_send");
}

ValueId receive(Builder& builder, const ReceiveAttributes& attributes, const std::string& name) {
  return emit_collective(builder, kReceive, Attributes(attributes), std::span<const ValueId>(),
                         name)[0];
}

const OpSpec kSend{.name = "send",
                   .infer = infer_sent,
                   .cost = cost_send,
                   .cpu = {.kernel = send_kernel},
                   .cuda = only_kernel<TROUPE_CUDA(send_cuda_kernel)>,
                   .group = group_of_sent,
                   .links = links_of_send,
                   .message = message_of_send,
                   .print_attributes = print_sent};

const OpSpec kFinishSend{.name = "finish_send",
                         .infer = infer_sent,
                         .cost = cost_finish_send,
                         .cpu = {.kernel = finish_send_kernel},
                         .cuda = only_kernel<TROUPE_CUDA(finish_send_cuda_kernel)>,
                         .group = group_of_sent,
                         .message = message_of_finish_send,
                         .print_attributes = print_sent};

const OpSpec kReceive{.name = "receive",
                      .infer = infer_receive,
                      .cost = cost_receive,
                      .cpu = {.kernel = receive_kernel},
                      .cuda = only_kernel<TROUPE_CUDA(receive_cuda_kernel)>,
                      .group = group_of_receive,
                      .message = message_of_receive,
                      .print_attributes = print_receive};

}  // namespace troupe
