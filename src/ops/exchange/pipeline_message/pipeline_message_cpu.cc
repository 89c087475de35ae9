#include "ops/exchange/pipeline_message/pipeline_message.h"

namespace troupe {

void send_cpu(const KernelArguments& args) {
  args.communicator->send({.op = args.op, .index = args.op_index}, args.input(0),
                          args.attributes->as<MessageAttributes>().peer);
}

void finish_send_cpu(const KernelArguments& args) {
  args.communicator->finish_send({.op = args.op, .index = args.op_index},
                                 args.attributes->as<MessageAttributes>().peer);
}

void receive_cpu(const KernelArguments& args) {
  args.communicator->receive({.op = args.op, .index = args.op_index}, args.output(0),
                             args.attributes->as<ReceiveAttributes>().way.peer);
}

}  // namespace troupe
