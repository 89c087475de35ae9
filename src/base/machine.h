// What this machine offers to this process. Linux; any thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace troupe {

// Cores that the process may run on (its affinity mask), at least 1.
int usable_cores();
// Cores of the machine, at least 1.
int installed_cores();

// Bytes that can be allocated without swapping, as the kernel estimates (MemAvailable); 0 when the
// kernel does not say.
uint64_t available_memory_bytes();

// The name by which the machine knows itself; "localhost" when it knows none.
std::string host_name();

// The file of the running program, in the folder that it lies in now; empty when the kernel does
// not say.
std::filesystem::path program_file();

}  // namespace troupe
