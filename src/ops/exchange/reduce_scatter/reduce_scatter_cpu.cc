#include "ops/exchange/reduce_scatter/reduce_scatter.h"

namespace troupe {

void reduce_scatter_cpu(const KernelArguments& args) {
  TROUPE_CHECK(args.communicator->size() == args.attributes->as<ReduceScatterAttributes>().ranks,
               "reduce_scatter: the group has another size");
  args.communicator->reduce_scatter({.op = args.op, .index = args.op_index}, args.input(0),
                                    args.output(0), *args.pool);
}

}  // namespace troupe
