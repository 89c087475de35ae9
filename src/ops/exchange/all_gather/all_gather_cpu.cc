#include "ops/exchange/all_gather/all_gather.h"

namespace troupe {

void all_gather_cpu(const KernelArguments& args) {
  TROUPE_CHECK(args.communicator->size() == args.attributes->as<AllGatherAttributes>().ranks,
               "all_gather: the group has another size");
  args.communicator->all_gather({.op = args.op, .index = args.op_index}, args.input(0),
                                args.output(0), *args.pool);
}

}  // namespace troupe
