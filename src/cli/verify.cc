// `troupe verify HF_DIR`: does this build compute what the reference computed?
#include <algorithm>
#include <cstdio>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "cli/command.h"
#include "data/json_text.h"
#include "io/file.h"
#include "io/hf_config.h"
#include "options/device_options.h"
#include "options/layout_options.h"
#include "options/model_options.h"
#include "train/interrupt.h"
#include "train/rank_run.h"
#include "train/verify_reference.h"
#include "train/work_progress.h"

namespace troupe {

ExitStatus run_verify(const Options& options, ProcessGroup* processes) {
  end_at_once_when_interrupted(/*quiet=*/!leads(processes));
  WorkProgress progress(options.quiet || !leads(processes), "verifying", "steps");
  const DType dtype = options.compute_dtype;
  if (dtype == DType::f16) {
    throw_bad_request(
        "verify --fp16: its gradients need a loss scale, which the reference does not have. Use "
        "--bf16, fp32 or fp64.");
  }
  const ModelConfig config = read_hf_config(join_path(options.hf_dir, "config.json"));
  Options of_reference = options;
  const ReferenceShape shape = reference_shape(options.hf_dir);
  of_reference.seq_length = shape.tokens;
  // As micro-batches of a sequence, which the interleaved schedule takes.
  const int32_t replicas = data_parallel_size_of(options);
  of_reference.global_batch_size = std::max(shape.sequences / replicas, 1) * replicas;
  const ReferenceComparison result = verify_reference(
      options.hf_dir, dtype, options.oracle,
      {.spec = device_spec_of(options),
       .layout = std::make_shared<const RunLayout>(run_layout_of(of_reference, config, processes)),
       .group = processes,
       .context_exchange = context_exchange_of(options)},
      progress.report());
  progress.clear();
  const ExitStatus status = result.pass ? ExitStatus::done : ExitStatus::failed;
  if (!leads(processes)) return status;
  if (options.json) {
    nlohmann::ordered_json document = {
        {"loss", result.loss},
        {"loss_ref", result.loss_ref},
        {"logits_max_abs", result.logits_max_abs},
        {"grad_worst_rel", result.grad_worst_rel},
        {"grad_worst_name", result.grad_worst_name},
        {"grad_all_rel", result.grad_all_rel},
        {"grad_norm", result.grad_norm},
        {"grad_norm_ref", result.grad_norm_ref},
        {"trajectory_max_abs", result.trajectory_max_abs},
        {"pass", result.pass},
    };
    if (result.routing_replayed) document["routing"] = "replayed from fp32";
    if (result.oracle_checked) document["oracle_identical"] = result.oracle_identical;
    fmt::print("{}", printed_json(document));
  } else {
    const ReferenceTolerance tolerance = reference_tolerance(dtype);
    const bool relative = dtype == DType::bf16;
    fmt::print("loss          {:.8f}  reference {:.8f}  (tolerance {:.0e})\n", result.loss,
               result.loss_ref, tolerance.loss);
    fmt::print("logits        largest difference {:.2e}  (tolerance {:.0e}{})\n",
               result.logits_max_abs, tolerance.logits,
               relative ? fmt::format(" of the largest logit {:.2f}", result.logits_largest) : "");
    fmt::print(
        "gradients     worst {:.2e} relative  (tolerance {:.0e})\n"
        "              of {}\n"
        "              {:.2e} of all together{}\n",
        result.grad_worst_rel, tolerance.gradient, result.grad_worst_name, result.grad_all_rel,
        relative ? fmt::format("  (tolerance {:.1e})", tolerance.all_gradients) : "");
    fmt::print("gradient norm {:.8f}  reference {:.8f}\n", result.grad_norm, result.grad_norm_ref);
    fmt::print("trajectory    largest difference {:.2e}  (tolerance {:.0e})\n",
               result.trajectory_max_abs, tolerance.trajectory);
    if (result.routing_replayed) {
      fmt::print("routing       the experts that fp32 chooses\n");
    }
    if (result.oracle_checked) {
      fmt::print("oracle        {}\n",
                 result.oracle_identical ? "identical, every bit" : "DIFFERS");
    }
    fmt::print("{}\n", result.pass ? "pass" : "FAIL");
  }
  return status;
}

}  // namespace troupe
