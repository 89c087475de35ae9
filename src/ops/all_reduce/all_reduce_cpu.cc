#include "ops/all_reduce/all_reduce.h"

namespace troupe {

void all_reduce_cpu(const KernelArguments& args) {
  args.communicator->all_reduce({.op = args.op, .index = args.op_index}, args.outputs, *args.pool);
}

}  // namespace troupe
