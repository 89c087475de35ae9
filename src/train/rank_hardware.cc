#include "train/rank_hardware.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <vector>

#include "base/error.h"
#include "base/machine.h"
#include "runtime/device_memory.h"

namespace troupe {

int threads_of_rank(const DeviceSpec& spec, const ProcessGroup* group) {
  return std::max(1, spec.thread_count() / ranks_that_share(spec, group, Device::cpu));
}

int ranks_that_share(const DeviceSpec& spec, const ProcessGroup* group, Device device) {
  const auto ranks =
      group == nullptr ? spec.ranks : static_cast<int>(group->ranks_of_machine().size());
  if (device == Device::cuda) return std::min(ranks, spec.ranks_per_gpu);
  if (group == nullptr || spec.threads > 0) return ranks;
  const auto ranks_of_process = static_cast<int>(group->own_ranks().size());
  const int processes = ranks / ranks_of_process;
  const bool share_cores = usable_cores() * processes > installed_cores();
  return share_cores ? ranks : ranks_of_process;
}

int gpu_of_rank(const ProcessGroup* group, int32_t rank, int32_t ranks_per_gpu) {
  require_gpu();
  if (group == nullptr) return 0;
  const std::vector<int32_t>& ranks = group->ranks_of_machine();
  const auto place = std::find(ranks.begin(), ranks.end(), rank) - ranks.begin();
  return gpu_of_place(static_cast<int32_t>(place), static_cast<int32_t>(ranks.size()), gpu_count(),
                      ranks_per_gpu, group->own_ranks().size() == 1);
}

int gpu_of_place(int32_t place, int32_t ranks, int32_t gpus, int32_t ranks_per_gpu,
                 bool is_process) {
  const int32_t wanted = (ranks + ranks_per_gpu - 1) / ranks_per_gpu;
  if (gpus >= wanted || is_process) return place / ranks_per_gpu % gpus;
  throw_bad_request(fmt::format(
      "--device cuda: {} ranks on this machine need {} GPUs, and it has {}. Use as many ranks as "
      "there are GPUs, or let them share: --ranks-per-gpu {}.",
      ranks, wanted, gpus, (ranks + gpus - 1) / gpus));
}

void require_own_gpu(ProcessGroup& group, int32_t rank, uint64_t gpu, int32_t ranks_per_gpu) {
  const std::vector<uint64_t> gpus = group.exchange(rank, gpu);
  std::vector<int32_t> sharing;
  for (const int32_t other : group.ranks_of_machine()) {
    if (gpus[static_cast<size_t>(other)] == gpu) sharing.push_back(other);
  }
  if (static_cast<int32_t>(sharing.size()) <= ranks_per_gpu || sharing.front() != rank) return;
  throw_bad_request(
      fmt::format("--device cuda: the ranks {} of this machine have got the same GPU. Start as "
                  "many ranks as there are GPUs, let each process see all of them or one of its "
                  "own (CUDA_VISIBLE_DEVICES), or let ranks share: --ranks-per-gpu {}.",
                  fmt::join(sharing, ", "), sharing.size()));
}

}  // namespace troupe
