// The optimizer that flags ask for, and flags that would be read for nothing.
#include "options/optimizer_options.h"

#include <functional>
#include <gtest/gtest.h>
#include <string>

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

TEST(OptimizerOf, NarrowMomentsAreAskedForTwice) {
  EXPECT_EQ(refused_optimizer([](Options& o) { o.exp_avg_dtype = DType::bf16; }),
            "--exp-avg-dtype bf16: it belongs to --use-precision-aware-optimizer; add that.");
  EXPECT_EQ(refused_optimizer([](Options& o) { o.exp_avg_sq_dtype = DType::bf16; }),
            "--exp-avg-sq-dtype bf16: it belongs to --use-precision-aware-optimizer; add that.");
}

}  // namespace
}  // namespace troupe::testing
