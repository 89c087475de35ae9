// What would make a training step smaller that does not fit: flags, the bytes that the step plans
// with them, and, on the GPUs of --gpus, what they cost in time. No bytes are estimated: the same
// program is built and planned with each. It takes Options, sets more of them, and resolves
// them again.
//
// Allocates no state. Any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "options/options.h"
#include "train/rank_session.h"

namespace troupe {

struct MemoryRemedy {
  std::string flags;        // to be added to the command line
  uint64_t bytes = 0;       // of the rank with them, on its device
  uint64_t host_bytes = 0;  // on the host, beside those of a GPU
  // How much longer the rank's own work on a sample takes with them, as a part of it: without waits
  // for other places of the pipeline. Known where the options name GPUs; not of more ranks.
  std::optional<double> slowdown;
};

// Of a rank of a run with these options, which need `bytes`: what saves at least a twentieth, what
// costs least time first, or what saves most where times are not known. The last one may be more
// ranks, each on a GPU or machine of its own with `available` bytes, where that is what makes it
// fit. Plans at most twelve steps.
std::vector<MemoryRemedy> find_remedies(const Options& options, int32_t rank, uint64_t bytes,
                                        uint64_t available);

// The same for a person, a line each, at most 80 columns wide; ends with a newline. Without
// remedies it says so.
std::string describe_remedies(const Options& options, int32_t rank, uint64_t bytes,
                              uint64_t available);

// The same for RankSession::check(). Borrows the options.
RankSession::Remedies remedies_of_training(const Options& options, int32_t rank);

}  // namespace troupe
