// `troupe bench --calibrate`: what this machine reaches, as a file for plans of time.
#include "cli/calibrate.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "base/text.h"
#include "cli/result_file.h"
#include "data/json_text.h"
#include "options/device_options.h"
#include "train/calibration.h"
#include "train/interrupt.h"
#include "train/rank_run.h"
#include "train/work_progress.h"

namespace troupe {
namespace {

constexpr ResultKind kCalibrated = {.flag = "--calibrate",
                                    .heading = "# Measured by `troupe bench --calibrate`",
                                    .name = "result of a calibration"};

nlohmann::ordered_json json_of(const LinkCalibration& link) {
  nlohmann::ordered_json document = {{"ranks", link.ranks},
                                     {"bytes_per_s", link.bandwidth},
                                     {"latency_s", link.latency},
                                     {"collectives", nlohmann::ordered_json::array()}};
  for (const CollectiveTime& time : link.times) {
    document["collectives"].push_back({{"kind", time.kind},
                                       {"bytes", time.bytes},
                                       {"sent_bytes", time.sent_bytes},
                                       {"time_s", time.seconds}});
  }
  return document;
}

std::string json_of(const Calibration& calibration, const std::string& path) {
  nlohmann::ordered_json document = {{"name", calibration.hardware.name},
                                     {"file", path},
                                     {"products", nlohmann::ordered_json::array()}};
  for (const ProductRate& rate : calibration.products) {
    document["products"].push_back(
        {{"dtype", name_of(rate.dtype)}, {"size", rate.size}, {"flops_per_s", rate.flops_per_s}});
  }
  document["attention"] = nlohmann::ordered_json::array();
  for (const AttentionRate& rate : calibration.attention) {
    document["attention"].push_back({{"sequence", rate.sequence},
                                     {"flops_per_s", rate.flops_per_s},
                                     {"gradient_flops_per_s", rate.gradient_flops_per_s}});
  }
  document["attention_scale"] = calibration.hardware.attention_scale;
  document["share_under_load"] = calibration.share_under_load;
  for (const auto& [name, link] :
       {std::pair("within_machine", calibration.links.within_machine),
        std::pair("across_machines", calibration.links.across_machines)}) {
    if (link) document[name] = json_of(*link);
  }
  document["copy_bytes_per_s"] = calibration.hardware.memory_bandwidth;
  document["host_bytes_per_s"] = calibration.hardware.host_bandwidth;
  document["launch_s"] = calibration.hardware.launch_seconds;
  return printed_json(document);
}

}  // namespace

ExitStatus run_calibration(const Options& options, ProcessGroup* processes) {
  const DeviceSpec spec = device_spec_of(options);
  if (spec.ranks_per_gpu > 1) {
    throw_bad_request("--calibrate measures GPUs with one rank each: leave --ranks-per-gpu out.");
  }
  const bool writes = leads(processes);
  if (writes) check_result_file(kCalibrated, options.calibrate);
  install_interrupt_handlers(/*quiet=*/true);
  std::optional<Calibration> calibration;
  {
    WorkProgress progress(options.quiet || !writes, "measuring", "programs",
                          "Interrupted; nothing was written.");
    calibration = calibrate(spec, processes, progress.report());
  }
  if (!calibration) return ExitStatus::done;
  write_result_file(options.calibrate,
                    fmt::format("{}.\n{}", kCalibrated.heading, file_of(*calibration)));
  if (options.json) {
    fmt::print("{}", json_of(*calibration, options.calibrate));
  } else {
    fmt::print("{0}\nWritten to {1}, for plan --gpus Nx{1} and train --hardware {1}.\n",
               text_of(*calibration), printable(options.calibrate));
  }
  return ExitStatus::done;
}

}  // namespace troupe
