#include "options/optimizer_options.h"

#include <fmt/format.h>
#include <string>
#include <string_view>

#include "base/error.h"
#include "model/parameter_layout.h"
#include "optimizer/muon_optimizer.h"
#include "options/refusals.h"

namespace troupe {
namespace {

// The dtype of a moment, which the flag gives.
DType moment_dtype(const Options& options, DType dtype, std::string_view name) {
  if (dtype != DType::f32 && !options.use_precision_aware_optimizer) {
    throw_bad_request(
        fmt::format("--{} {}: it belongs to --use-precision-aware-optimizer; add that.", name,
                    value_text(options, name)));
  }
  return dtype;
}

AdamWOptions adamw_of(const Options& options, const ModelConfig& config, const Layout& layout) {
  const AdamWOptions adamw{
      .beta1 = options.adam_beta1,
      .beta2 = options.adam_beta2,
      .epsilon = options.adam_eps,
      .exp_avg = moment_dtype(options, options.exp_avg_dtype, "exp-avg-dtype"),
      .exp_avg_sq = moment_dtype(options, options.exp_avg_sq_dtype, "exp-avg-sq-dtype")};
  if (adamw.exp_avg == DType::f8e4m3) {
    require_accepted(check_moment_blocks(config, layout, Setting::exp_avg_dtype));
  }
  if (adamw.exp_avg_sq == DType::f8e4m3) {
    require_accepted(check_moment_blocks(config, layout, Setting::exp_avg_sq_dtype));
  }
  return adamw;
}

// Flags of Muon without it would be read for nothing.
void refuse_muon_flags(const Options& options) {
  const Options defaults;
  const auto refuse = [](bool given, const char* flag) {
    if (!given) return;
    throw_bad_request(fmt::format(
        "--{}: it belongs to --optimizer muon. Add that, or leave the flag out.", flag));
  };
  refuse(options.muon_momentum != defaults.muon_momentum, "muon-momentum");
  refuse(options.muon_nesterov, "muon-nesterov");
  refuse(options.muon_scale_mode != defaults.muon_scale_mode, "muon-scale-mode");
  refuse(options.muon_extra_scale_factor != defaults.muon_extra_scale_factor,
         "muon-extra-scale-factor");
  refuse(options.muon_coefficient_type != defaults.muon_coefficient_type, "muon-coefficient-type");
  refuse(options.muon_num_ns_steps != defaults.muon_num_ns_steps, "muon-num-ns-steps");
  refuse(options.muon_fp32_matmul_prec != defaults.muon_fp32_matmul_prec, "muon-fp32-matmul-prec");
  refuse(options.muon_no_split_qkv, "muon-no-split-qkv");
  refuse(options.muon_tp_mode != defaults.muon_tp_mode, "muon-tp-mode");
}

// A matrix is orthogonalised whole, or by slices of tensor parallelism.
void refuse_for_muon(const Options& options, StateSharding sharding) {
  const std::string optimizer = value_text(options, "optimizer");
  const auto refuse = [&](bool cuts, const char* flag, const char* instead) {
    if (!cuts) return;
    throw_bad_request(
        fmt::format("--optimizer {} updates whole matrices, and {} cuts them between rows: {}.",
                    optimizer, flag, instead));
  };
  const bool is_spread = options.optimizer == OptimizerKind::dist_muon;
  refuse(options.use_megatron_fsdp && (is_spread || sharding != StateSharding::none),
         "--use-megatron-fsdp", is_spread ? "leave it out" : "use --optimizer dist_muon instead");
  refuse(sharding == StateSharding::optimizer && !is_spread, "--use-distributed-optimizer",
         "use --optimizer dist_muon, which shards whole matrices");
  if (options.muon_tp_mode == MuonTpMode::distributed) {
    throw_bad_request(
        "--muon-tp-mode distributed: matrices are not orthogonalised by several ranks together. "
        "Use duplicated, which gives the same update.");
  }
  if (options.optimizer_cpu_offload) {
    throw_bad_request(
        fmt::format("--optimizer {}: its momentum is read by products, and cannot stay in the "
                    "host's memory. Leave out --optimizer-cpu-offload.",
                    optimizer));
  }
}

}  // namespace

std::shared_ptr<const Optimizer> optimizer_of(const Options& options, const ModelConfig& config,
                                              const Layout& layout, StateSharding sharding) {
  const AdamWOptions adamw = adamw_of(options, config, layout);
  if (options.optimizer == OptimizerKind::adam) {
    refuse_muon_flags(options);
    return std::make_shared<const AdamWOptimizer>(adamw);
  }
  refuse_for_muon(options, sharding);
  const bool is_quintic = options.muon_coefficient_type == NewtonSchulzCoefficients::quintic;
  if (is_quintic && options.muon_num_ns_steps != 5) {
    throw_bad_request(fmt::format(
        "--muon-num-ns-steps {}: the coefficients quintic are those of 5 steps. Use 5, or "
        "--muon-coefficient-type simple.",
        options.muon_num_ns_steps));
  }
  return std::make_shared<const MuonOptimizer>(
      MuonOptions{.beta = options.muon_momentum,
                  .nesterov = options.muon_nesterov,
                  .scale = options.muon_scale_mode,
                  .extra_scale = options.muon_extra_scale_factor,
                  .coefficients = options.muon_coefficient_type,
                  .steps = options.muon_num_ns_steps,
                  .arithmetic = options.muon_fp32_matmul_prec,
                  .split_rows = !options.muon_no_split_qkv,
                  .is_blockwise = options.muon_tp_mode == MuonTpMode::blockwise,
                  .adamw = adamw});
}

}  // namespace troupe
