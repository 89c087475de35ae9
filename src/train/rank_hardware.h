// What of a machine a rank of a run gets: threads, and a GPU.
//
// Any thread, except where ranks exchange. Errors are UserErrors (bad request) that name the flag.
#pragma once

#include <cstdint>

#include "base/device.h"
#include "comm/process_group.h"
#include "options/device_options.h"

namespace troupe {

// The threads of each rank of `group` (null: of a run of one rank). --threads are those of a
// machine and divided among its ranks, as are its cores without --threads. Processes that a
// launcher has bound to cores of their own keep these.
int threads_of_rank(const DeviceSpec& spec, const ProcessGroup* group);

// Among how many ranks what one process of the run may use is divided: its thread_count() threads,
// or on Device::cuda a GPU. `group`: null where all ranks are this process's.
int ranks_that_share(const DeviceSpec& spec, const ProcessGroup* group, Device device);

// The GPU of a rank among those that this process sees: each rank of a machine has the next one, or
// `ranks_per_gpu` of them share each. A bad request when there are too few, or none can be used.
// `group`: null for a run of one rank.
//
// A launcher may let each process see only some of a machine's GPUs (CUDA_VISIBLE_DEVICES). Where a
// process sees too few for all ranks, its rank takes one of those, and require_own_gpu() tells.
int gpu_of_rank(const ProcessGroup* group, int32_t rank, int32_t ranks_per_gpu);

// The same by numbers: the rank at `place` among `ranks` of a machine, in a process that sees
// `gpus`, of which there is at least one.
int gpu_of_place(int32_t place, int32_t ranks, int32_t gpus, int32_t ranks_per_gpu,
                 bool is_process);

// Refuses (bad request) ranks of a machine more of which have got the same GPU than may share one.
// All ranks must ask, each with what tells its GPU apart (gpu_identity()).
void require_own_gpu(ProcessGroup& group, int32_t rank, uint64_t gpu, int32_t ranks_per_gpu);

}  // namespace troupe
