// What this machine's memory can do, as a limit for memory-bound operations to be compared with.
#pragma once

#include "base/thread_pool.h"

namespace troupe {

// Bytes per second of copying 256 MiB with all threads of the pool, read and write counted: the
// best of several runs of the library's memcpy and of a plain loop (which of them is faster depends
// on the processor). Takes about a second and 512 MiB.
double measure_copy_limit(ThreadPool& pool);

}  // namespace troupe
