#include "ops/optimizer/shards/shards.h"

namespace troupe {

void reduce_shards_cpu(const KernelArguments& args) {
  args.communicator->reduce_shards({.op = args.op, .index = args.op_index}, args.outputs,
                                   args.attributes->as<ShardsAttributes>().owners(), *args.pool);
}

void gather_shards_cpu(const KernelArguments& args) {
  args.communicator->gather_shards({.op = args.op, .index = args.op_index}, args.outputs,
                                   args.attributes->as<ShardsAttributes>().owners(), *args.pool);
}

}  // namespace troupe
