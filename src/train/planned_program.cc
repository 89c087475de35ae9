#include "train/planned_program.h"

#include <fmt/format.h>
#include <string_view>

#include "base/units.h"
#include "options/cluster_options.h"
#include "options/device_options.h"
#include "program/verify.h"

namespace troupe {

MemoryPlan plan_program(const Program& program, int threads, Device device, const DeviceTraits& gpu,
                        bool oracle) {
  verify_program(program);
  MemoryPlan plan = oracle ? plan_oracle(program, threads, device, gpu)
                           : plan_memory(program, threads, device, gpu);
  verify_memory_plan(program, plan);
  return plan;
}

MemoryPlan plan_program(const Program& program, const Options& options) {
  return plan_program(program, device_spec_of(options).threads_per_rank(), options.device,
                      planned_traits_of(options));
}

std::string describe_memory(const MemoryPlan& plan, uint64_t evaluation_bytes,
                            uint64_t other_runs) {
  std::string text;
  const auto add_line = [&](std::string_view name, uint64_t bytes, const char* where) {
    if (bytes == 0) return;
    text += fmt::format("  {:<14} {:>12}{}\n", name, format_bytes(bytes), where);
  };
  const auto add_host = [&](const char* where) {
    for (const Role role : {Role::optimizer, Role::offloaded}) {
      add_line(name_of(role), plan.host_bytes_by_role[static_cast<size_t>(role)], where);
    }
  };
  for (int i = 0; i < kRoleCount; ++i) {
    add_line(name_of(static_cast<Role>(i)), plan.bytes_by_role[static_cast<size_t>(i)], "");
  }
  const bool on_gpu = plan.device == Device::cuda;
  if (!on_gpu) add_host("  offloaded to the host");
  add_line("evaluation", evaluation_bytes, "");
  add_line("other runs", other_runs, "");
  add_line("total", plan.total_bytes() + evaluation_bytes + other_runs, "");
  if (on_gpu) add_host("  in the host's memory");
  return text;
}

}  // namespace troupe
