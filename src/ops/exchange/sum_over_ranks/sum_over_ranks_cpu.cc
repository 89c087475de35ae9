#include "ops/exchange/sum_over_ranks/sum_over_ranks.h"

namespace troupe {

void sum_over_ranks_cpu(const KernelArguments& args) {
  args.communicator->sum({.op = args.op, .index = args.op_index}, args.input(0), args.output(0),
                         *args.pool);
}

}  // namespace troupe
