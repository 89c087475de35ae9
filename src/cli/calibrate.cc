// `troupe bench --calibrate`: what this machine reaches, as a file for plans of time.
#include "cli/calibrate.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/text.h"
#include "cli/result_file.h"
#include "options/device_options.h"
#include "train/calibration.h"
#include "train/interrupt.h"
#include "train/work_progress.h"

namespace troupe {
namespace {

constexpr ResultKind kCalibrated = {.flag = "--calibrate",
                                    .heading = "# Measured by `troupe bench --calibrate`",
                                    .name = "result of a calibration"};

std::string json_of(const Calibration& calibration, const std::string& path) {
  nlohmann::ordered_json document = {{"name", calibration.hardware.name},
                                     {"file", path},
                                     {"products", nlohmann::ordered_json::array()}};
  for (const ProductRate& rate : calibration.products) {
    document["products"].push_back(
        {{"dtype", name_of(rate.dtype)}, {"size", rate.size}, {"flops_per_s", rate.flops_per_s}});
  }
  document["copy_bytes_per_s"] = calibration.hardware.memory_bandwidth;
  document["host_bytes_per_s"] = calibration.hardware.host_bandwidth;
  document["launch_s"] = calibration.hardware.launch_seconds;
  return document.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

}  // namespace

ExitStatus run_calibration(const Options& options, const ProcessGroup* processes) {
  if (processes != nullptr || options.ranks > 1) {
    throw_bad_request(
        "--calibrate measures one machine, on all its threads or on its first GPU: start it as one "
        "process, without --ranks.");
  }
  check_result_file(kCalibrated, options.calibrate);
  install_interrupt_handlers(/*quiet=*/true);
  Calibration calibration;
  {
    WorkProgress progress(options.quiet, "measuring", "programs",
                          "Interrupted; nothing was written.");
    calibration = calibrate(device_spec_of(options), progress.report());
  }
  write_result_file(options.calibrate,
                    fmt::format("{}.\n{}", kCalibrated.heading, file_of(calibration)));
  if (options.json) {
    fmt::print("{}", json_of(calibration, options.calibrate));
  } else {
    fmt::print("{0}\nWritten to {1}, for plan --gpus Nx{1} and train --hardware {1}.\n",
               text_of(calibration), printable(options.calibrate));
  }
  return ExitStatus::done;
}

}  // namespace troupe
