// The optimizer that flags ask for, and flags that would be read for nothing.
#include "options/optimizer_options.h"

#include <fmt/format.h>
#include <functional>
#include <gtest/gtest.h>
#include <string>

#include "optimizer/muon_optimizer.h"
#include "options/options.h"
#include "parallel/layout.h"
#include "program/test_models.h"
#include "support/errors.h"

namespace troupe::testing {
namespace {

std::string refused_optimizer(const std::function<void(Options&)>& change,
                              StateSharding sharding = StateSharding::none) {
  Options options;
  change(options);
  return message_of(ExitStatus::bad_request, [&] {
    optimizer_of(options, moe_model(2), try_layout({.world_size = 2}).value(), sharding);
  });
}

const auto kMuon = [](Options& o) { o.optimizer = OptimizerKind::muon; };

TEST(OptimizerOf, MuonsFlagsBelongToIt) {
  struct Case {
    const char* flag;
    std::function<void(Options&)> change;
  };
  const Case cases[] = {
      {"muon-momentum", [](Options& o) { o.muon_momentum = 0.5; }},
      {"muon-nesterov", [](Options& o) { o.muon_nesterov = true; }},
      {"muon-scale-mode", [](Options& o) { o.muon_scale_mode = MuonScale::shape_scaling; }},
      {"muon-coefficient-type",
       [](Options& o) { o.muon_coefficient_type = NewtonSchulzCoefficients::simple; }},
      {"muon-fp32-matmul-prec",
       [](Options& o) { o.muon_fp32_matmul_prec = NewtonSchulzArithmetic::accumulation; }},
      {"muon-extra-scale-factor", [](Options& o) { o.muon_extra_scale_factor = 0.5; }},
      {"muon-num-ns-steps", [](Options& o) { o.muon_num_ns_steps = 7; }},
      {"muon-no-split-qkv", [](Options& o) { o.muon_no_split_qkv = true; }},
      {"muon-tp-mode", [](Options& o) { o.muon_tp_mode = MuonTpMode::distributed; }}};
  for (const Case& each : cases) {
    EXPECT_EQ(refused_optimizer(each.change),
              std::string("--") + each.flag +
                  ": it belongs to --optimizer muon. Add that, or leave the flag out.");
  }
}

TEST(OptimizerOf, MuonKeepsMatricesWhole) {
  const auto with = [](OptimizerKind kind, bool fsdp) {
    return [=](Options& o) {
      o.optimizer = kind;
      o.use_megatron_fsdp = fsdp;
    };
  };
  EXPECT_EQ(refused_optimizer(with(OptimizerKind::muon, true), StateSharding::optimizer),
            "--optimizer muon updates whole matrices, and --use-megatron-fsdp cuts them between "
            "rows: use --optimizer dist_muon instead.");
  EXPECT_EQ(refused_optimizer(with(OptimizerKind::dist_muon, true)),
            "--optimizer dist_muon updates whole matrices, and --use-megatron-fsdp cuts them "
            "between rows: leave it out.");
  EXPECT_EQ(refused_optimizer(kMuon, StateSharding::optimizer),
            "--optimizer muon updates whole matrices, and --use-distributed-optimizer cuts them "
            "between rows: use --optimizer dist_muon, which shards whole matrices.");
}

TEST(OptimizerOf, WhatMuonCannotDo) {
  expect_phrase(refused_optimizer([](Options& o) {
                  kMuon(o);
                  o.muon_tp_mode = MuonTpMode::distributed;
                }),
                "--muon-tp-mode distributed: matrices are not orthogonalised by several ranks");
  expect_phrase(
      refused_optimizer([](Options& o) {
        kMuon(o);
        o.optimizer_cpu_offload = true;
      }),
      "--optimizer muon: its momentum is read by products, and cannot stay in the host's");
  expect_phrase(refused_optimizer([](Options& o) {
                  kMuon(o);
                  o.muon_coefficient_type = NewtonSchulzCoefficients::quintic;
                  o.muon_num_ns_steps = 6;
                }),
                "--muon-num-ns-steps 6: the coefficients quintic are those of 5 steps");
}

// Every field of the optimizer's, in one line.
std::string text_of_muon(const Options& options) {
  const auto optimizer = optimizer_of(options, moe_model(2), try_layout({.world_size = 2}).value(),
                                      StateSharding::none);
  const auto* muon = dynamic_cast<const MuonOptimizer*>(optimizer.get());
  if (muon == nullptr) return "no Muon";
  const MuonOptions& o = muon->options();
  return fmt::format("{} {} {} {} {} {} {} {} {}; {} {} {} {} {}", o.beta, o.nesterov,
                     static_cast<int>(o.scale), o.extra_scale, static_cast<int>(o.coefficients),
                     o.steps, static_cast<int>(o.arithmetic), o.split_rows, o.is_blockwise,
                     o.adamw.beta1, o.adamw.beta2, o.adamw.epsilon, name_of(o.adamw.exp_avg),
                     name_of(o.adamw.exp_avg_sq));
}

TEST(OptimizerOf, MuonHasWhatItsFlagsSay) {
  Options options;
  EXPECT_EQ(text_of_muon(options), "no Muon");
  options.optimizer = OptimizerKind::muon;
  EXPECT_EQ(text_of_muon(options), "0.9 false 0 1 0 5 1 true false; 0.9 0.999 1e-08 f32 f32");
  options.muon_momentum = 0.5;
  options.muon_nesterov = true;
  options.muon_scale_mode = MuonScale::shape_scaling;
  options.muon_extra_scale_factor = 0.25;
  options.muon_coefficient_type = NewtonSchulzCoefficients::simple;
  options.muon_num_ns_steps = 7;
  options.muon_fp32_matmul_prec = NewtonSchulzArithmetic::accumulation;
  options.muon_no_split_qkv = true;
  options.muon_tp_mode = MuonTpMode::blockwise;
  options.adam_beta1 = 0.75;
  options.adam_beta2 = 0.875;
  options.adam_eps = 0.125;
  options.use_precision_aware_optimizer = true;
  options.exp_avg_dtype = DType::bf16;
  EXPECT_EQ(text_of_muon(options), "0.5 true 2 0.25 1 7 0 false true; 0.75 0.875 0.125 bf16 f32");
}

TEST(OptimizerOf, NarrowMomentsAreAskedForTwice) {
  EXPECT_EQ(refused_optimizer([](Options& o) { o.exp_avg_dtype = DType::bf16; }),
            "--exp-avg-dtype bf16: it belongs to --use-precision-aware-optimizer; add that.");
  EXPECT_EQ(refused_optimizer([](Options& o) { o.exp_avg_sq_dtype = DType::bf16; }),
            "--exp-avg-sq-dtype bf16: it belongs to --use-precision-aware-optimizer; add that.");
}

}  // namespace
}  // namespace troupe::testing
