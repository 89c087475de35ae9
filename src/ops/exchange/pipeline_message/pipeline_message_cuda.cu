#include "comm/cuda/peers.h"
#include "ops/exchange/pipeline_message/pipeline_message.h"

namespace troupe {
namespace {

void post(const CudaKernelArguments& args) {
  const int to = args.attributes->as<MessageAttributes>().peer;
  if (args.peers->is_staged()) return args.peers->send_staged(args, to);
  args.peers->post_message(args, to);
}

void finish(const CudaKernelArguments& args) {
  const int to = args.attributes->as<MessageAttributes>().peer;
  if (args.peers->is_staged()) return args.peers->finish_staged(args, to);
  args.peers->finish_message(args, to);
}

void fetch(const CudaKernelArguments& args) {
  const int from = args.attributes->as<ReceiveAttributes>().way.peer;
  if (args.peers->is_staged()) return args.peers->receive_staged(args, from);
  const CudaTensor& y = args.output(0);
  args.peers->await_message(args, from);
  PeerCopies copies(args);
  copies.add(args.peers->message(), y.data,
             y.shape.elements() * static_cast<int64_t>(size_of(y.dtype)));
  copies.launch();
  args.peers->message_fetched(args, from);
}

}  // namespace

CudaKernel send_cuda_kernel(const OpView&) {
  return &post;
}

CudaKernel finish_send_cuda_kernel(const OpView&) {
  return &finish;
}

CudaKernel receive_cuda_kernel(const OpView&) {
  return &fetch;
}

}  // namespace troupe
