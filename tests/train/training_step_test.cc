// The training step as a whole: the same bits however it is run, the same gradients however the
// batch is cut, derivatives of everything that is minimised, memory as planned, and what happens to
// steps and tokens that must not count.
#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <string>
#include <vector>

#include "model/blocks/gqa_attention.h"
#include "model/blocks/moe.h"
#include "model/blocks/norm.h"
#include "passes/inference_programs.h"
#include "runtime/cpu/cpu_interpreter.h"
#include "support/distance.h"
#include "support/named_parameter.h"
#include "train/train_test_support.h"

namespace troupe {
namespace {

using namespace testing;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

class TrainingStepBits : public ::testing::TestWithParam<DType> {};

// 512 tokens a micro-batch: enough that the kernels cut their loops into pieces.
TEST_P(TrainingStepBits, DoNotDependOnThreadsOrPlan) {
  constexpr int64_t kSteps = 5;
  const auto options = [](int threads, bool oracle) {
    return StepRunOptions{.dtype = GetParam(),
                          .threads = threads,
                          .oracle = oracle,
                          .micro_batch_size = 4,
                          .micro_batches = 2,
                          .sequence = 128};
  };
  StepRun first(trained_model(), options(1, false));
  std::vector<double> losses;
  for (int64_t number = 1; number <= kSteps; ++number) {
    first.write_samples(8 * number);
    first.update(number);
    ASSERT_FALSE(first.skipped());
    losses.push_back(first.objective());
  }
  EXPECT_TRUE(std::isfinite(losses.back()));
  EXPECT_NE(losses.front(), losses.back());

  for (const bool oracle : {false, true}) {
    for (int threads = 1; threads <= 3; ++threads) {
      if (threads == 1 && !oracle) continue;
      SCOPED_TRACE(std::to_string(threads) + (oracle ? " threads, oracle" : " threads, planned"));
      StepRun other(trained_model(), options(threads, oracle));
      for (int64_t number = 1; number <= kSteps; ++number) {
        other.write_samples(8 * number);
        other.update(number);
        ASSERT_EQ(other.objective(), losses[static_cast<size_t>(number - 1)]) << number;
      }
      EXPECT_EQ(other.grad_norm(), first.grad_norm());
      EXPECT_EQ(other.expert_counts(), first.expert_counts());
      expect_same_state(first.storage, other.storage);
    }
  }
}

// With the oracle's plan, too: no clone reads what is dead.
TEST_P(TrainingStepBits, DoNotDependOnRecompute) {
  ModelConfig model = trained_model();
  model.hidden_dropout = model.attention_dropout = 0.1;
  const auto options = [](const RecomputeOptions& recompute, bool oracle) {
    return StepRunOptions{.dtype = GetParam(),
                          .oracle = oracle,
                          .micro_batch_size = 2,
                          .micro_batches = 2,
                          .sequence = 32,
                          .recompute = recompute};
  };
  const auto run = [](StepRun& step) {
    for (int64_t number = 1; number <= 3; ++number) {
      step.write_samples(4 * number);
      step.update(number);
    }
  };
  StepRun plain(model, options({}, false));
  run(plain);
  using Granularity = RecomputeOptions::Granularity;
  for (const Granularity granularity : {Granularity::selective, Granularity::full}) {
    for (const bool oracle : {false, true}) {
      StepRun other(model, options({.granularity = granularity,
                                    .modules = {&kCoreAttentionModule, &kNormModule, &kMoeModule}},
                                   oracle));
      run(other);
      EXPECT_EQ(other.objective(), plain.objective());
      expect_same_state(plain.storage, other.storage);
    }
  }
}

// In chunks of tokens only the sums over tokens have another order: those of the weight of the head
// (here the embedding's, too) and of the loss. What flows back into the layers is rounded otherwise
// at most where BLAS multiplies the last rows of a chunk with another kernel, as that of OpenBLAS
// for AVX2 does. With the oracle's plan and more threads the chunks have the same bits.
TEST_P(TrainingStepBits, ChunksOfTheLossLeaveAllButTheirSums) {
  const auto options = [](int32_t loss_chunk_tokens, int threads, bool oracle) {
    return StepRunOptions{.dtype = GetParam(),
                          .threads = threads,
                          .oracle = oracle,
                          .micro_batch_size = 2,
                          .micro_batches = 2,
                          .sequence = 96,
                          .loss_chunk_tokens = loss_chunk_tokens};
  };
  StepRun whole(trained_model(), options(0, 1, false));
  whole.update();
  // Of the mean of some hundred losses, of which each chunk rounds its part.
  const double tolerance = GetParam() == DType::f64 ? 1e-14 : 1e-6;
  // Some roundings of a product and of its result, relative to the whole gradient: 16 in its type.
  const double gradient_tolerance = 16 * (GetParam() == DType::f64   ? 1.1e-16
                                          : GetParam() == DType::f32 ? 6e-8
                                                                     : 3.9e-3);
  for (const int32_t tokens : {64, 100}) {
    SCOPED_TRACE(std::to_string(tokens) + " tokens");
    StepRun chunks(trained_model(), options(tokens, 1, false));
    chunks.update();
    EXPECT_NEAR(chunks.loss(), whole.loss(), tolerance * whole.loss());
    for (const Parameter& parameter : whole.state.parameters) {
      if (parameter.layer < 0 && parameter.name != "final_norm") continue;
      EXPECT_LE(distance(elements(chunks.storage.view(parameter.gradient)),
                         elements(whole.storage.view(parameter.gradient))),
                gradient_tolerance)
          << whole.name(parameter);
    }
    for (const bool oracle : {false, true}) {
      StepRun other(trained_model(), options(tokens, 3, oracle));
      other.update();
      EXPECT_EQ(other.loss(), chunks.loss());
      expect_same_state(other.storage, chunks.storage);
    }
  }
}

// The same with offload: no gradient reads what is dead, on the device or on the host.
TEST_P(TrainingStepBits, DoNotDependOnOffload) {
  ModelConfig model = trained_model();
  model.hidden_dropout = model.attention_dropout = 0.1;
  const auto options = [](bool offload, const RecomputeOptions& recompute, bool oracle) {
    return StepRunOptions{
        .dtype = GetParam(),
        .oracle = oracle,
        .micro_batch_size = 2,
        .micro_batches = 2,
        .sequence = 32,
        .recompute = recompute,
        .offload = {.modules =
                        offload ? ModuleSet{&kInputNormModule, &kQkvModule, &kCoreAttentionModule,
                                            &kAttentionOutModule, &kFeedForwardNormModule,
                                            &kExpertFc1Module, &kExpertActivationModule}
                                : ModuleSet{},
                    .least_elements = 1},
        .optimizer_offload = offload ? 0.5 : 0,
    };
  };
  const auto run = [](StepRun& step) {
    for (int64_t number = 1; number <= 3; ++number) {
      step.write_samples(4 * number);
      step.update(number);
    }
  };
  StepRun plain(model, options(false, {}, false));
  run(plain);
  using Granularity = RecomputeOptions::Granularity;
  for (const Granularity granularity :
       {Granularity::none, Granularity::selective, Granularity::full}) {
    for (const bool oracle : {false, true}) {
      StepRun other(
          model,
          options(true,
                  {.granularity = granularity,
                   .modules = granularity == Granularity::selective
                                  ? ModuleSet{&kCoreAttentionModule, &kExpertActivationModule}
                                  : ModuleSet{}},
                  oracle));
      run(other);
      EXPECT_GT(other.interpreter.plan().host_transient_bytes, 0U);
      EXPECT_GT(other.storage.host_bytes(), 0U);
      EXPECT_EQ(other.objective(), plain.objective());
      expect_same_state(plain.storage, other.storage);
    }
  }
}

// With main gradients in bf16 and moments in 8 bits: planned or oracle, with any number of threads,
// with recompute, a run is the same bits.
TEST(NarrowTrainingStep, DoesNotDependOnThreadsPlanOrRecompute) {
  constexpr int64_t kSteps = 4;
  const NarrowState narrow{DType::bf16, DType::f8e4m3, DType::f8e4m3};
  const auto options = [&](int threads, bool oracle) {
    return StepRunOptions{.dtype = DType::bf16,
                          .threads = threads,
                          .oracle = oracle,
                          .micro_batch_size = 4,
                          .micro_batches = 2,
                          .sequence = 128,
                          .narrow = narrow};
  };
  const auto run_steps = [](StepRun& run) {
    for (int64_t number = 1; number <= kSteps; ++number) {
      run.write_samples(8 * number);
      run.update(number);
      ASSERT_FALSE(run.skipped());
    }
  };
  StepRun first(trained_model(), options(1, false));
  run_steps(first);
  EXPECT_TRUE(std::isfinite(first.objective()));
  for (const int threads : {2, 3}) {
    StepRun other(trained_model(), options(threads, threads == 3));
    run_steps(other);
    EXPECT_EQ(other.objective(), first.objective());
    expect_same_state(first.storage, other.storage);
  }
  StepRunOptions recomputed = options(2, false);
  recomputed.recompute.granularity = RecomputeOptions::Granularity::full;
  StepRun other(trained_model(), recomputed);
  run_steps(other);
  EXPECT_EQ(other.objective(), first.objective());
  expect_same_state(first.storage, other.storage);
}

// Of a bf16 parameter: 2 bytes of gradient for 4, and for each moment 1 byte and one for each block
// of 32 in a row for 4. Norms keep f32.
TEST(NarrowTrainingStep, TakesAsManyBytesLessAsItSays) {
  const auto bytes = [](const NarrowState& narrow) {
    const StepRun run(trained_model(), {.dtype = DType::bf16, .narrow = narrow});
    uint64_t sum = 0;
    for (int32_t i = 0; i < run.state.table->size(); ++i) {
      const StateTensor& tensor = (*run.state.table)[StateId{i}];
      sum += static_cast<uint64_t>(tensor.shape.elements()) * size_of(tensor.dtype);
    }
    return sum;
  };
  uint64_t elements = 0;  // of bf16 parameters
  uint64_t blocks = 0;
  const StepRun wide(trained_model(), {.dtype = DType::bf16});
  for (const Parameter& parameter : wide.state.parameters) {
    const Shape& shape = parameter.whole_shape;
    if (shape.rank() == 1) continue;
    const auto size = static_cast<uint64_t>(shape.elements());
    elements += size;
    blocks += size / static_cast<uint64_t>(shape.back()) *
              ((static_cast<uint64_t>(shape.back()) + 31) / 32);
  }
  const uint64_t all = bytes({});
  EXPECT_EQ(bytes({.main_gradients = DType::bf16}), all - 2 * elements);
  EXPECT_EQ(bytes({.exp_avg = DType::f8e4m3}), all - 3 * elements + blocks);
  EXPECT_EQ(bytes({DType::bf16, DType::f8e4m3, DType::f8e4m3}), all - 8 * elements + 2 * blocks);
}

INSTANTIATE_TEST_SUITE_P(DTypes, TrainingStepBits,
                         ::testing::Values(DType::f64, DType::f32, DType::bf16),
                         [](const auto& info) { return std::string(name_of(info.param)); });

// Cutting a batch into micro-batches changes only the order of sums: 1e-12 is some thousand times
// the rounding of f64. Every sample has as many counted tokens as every other, so the mean of the
// micro-batches' means is the mean over all tokens. The z-loss is such a mean, too. The
// load-balancing loss is left out: it is a product of two means over the same tokens (average score
// and load of an expert), and the mean of products over parts is not the product over the whole.
TEST(TrainingStep, GradientsDoNotDependOnTheMicroBatches) {
  ModelConfig config = trained_model();
  config.moe_aux_loss_coeff = 0;
  StepRun whole(config, {.micro_batch_size = 4, .micro_batches = 1});
  whole.update();
  for (const int32_t micro_batches : {2, 4}) {
    SCOPED_TRACE(std::to_string(micro_batches) + " micro-batches");
    StepRun cut(config, {.micro_batch_size = 4 / micro_batches, .micro_batches = micro_batches});
    cut.update();
    EXPECT_NEAR(cut.loss(), whole.loss(), 1e-12 * whole.loss());
    EXPECT_NEAR(cut.objective(), whole.objective(), 1e-12 * whole.objective());
    EXPECT_NEAR(cut.grad_norm(), whole.grad_norm(), 1e-12 * whole.grad_norm());
    EXPECT_EQ(cut.expert_counts(), whole.expert_counts());
    for (const Parameter& parameter : whole.state.parameters) {
      const std::vector<double> a = elements(whole.storage.view(parameter.gradient));
      const std::vector<double> b = elements(cut.storage.view(parameter.gradient));
      double largest = 0;
      for (const double value : a) largest = std::max(largest, std::abs(value));
      ASSERT_GT(largest, 0) << whole.name(parameter);
      for (size_t i = 0; i < a.size(); ++i) {
        ASSERT_NEAR(a[i], b[i], 1e-12 * largest) << whole.name(parameter) << " element " << i;
      }
    }
  }
}

struct DerivativeCase {
  const char* name;
  ModelConfig config;
};

std::vector<DerivativeCase> derivative_cases() {
  // Weights large enough that routing is decided clearly and every gradient matters.
  ModelConfig post_softmax = trained_model();
  post_softmax.init_method_std = 0.15;
  // Strong auxiliary losses: their part of a gradient must not be hidden by the cross-entropy's.
  post_softmax.moe_aux_loss_coeff = 0.5;
  post_softmax.moe_z_loss_coeff = 0.1;

  ModelConfig pre_softmax = post_softmax;
  pre_softmax.num_layers = 3;
  pre_softmax.moe_layers = {false, true, true};
  pre_softmax.ffn_hidden_size = 40;
  pre_softmax.moe_router_pre_softmax = true;
  pre_softmax.tie_embeddings = true;
  pre_softmax.qk_layernorm = false;
  pre_softmax.sliding_window = 5;

  ModelConfig l2_norm = post_softmax;
  l2_norm.qk_layernorm = false;
  l2_norm.qk_l2_norm = true;
  l2_norm.moe_router_fp64 = true;

  ModelConfig top_1 = post_softmax;
  top_1.moe_router_topk = 1;
  top_1.moe_router_pre_softmax = true;

  // As in DeepSeek-V3: sigmoid scores, groups, an expert bias, scaled weights, a shared expert.
  ModelConfig sigmoid = post_softmax;
  sigmoid.num_experts = 8;
  sigmoid.moe_router_score_function = ScoreFunction::sigmoid;
  sigmoid.moe_router_num_groups = 4;
  sigmoid.moe_router_group_topk = 2;
  sigmoid.moe_router_topk_scaling_factor = 2.5;
  sigmoid.moe_router_enable_expert_bias = true;
  sigmoid.moe_router_bias_update_rate = 0;  // repeated runs must see the same bias
  sigmoid.moe_shared_expert_intermediate_size = 20;
  sigmoid.moe_aux_loss_coeff = 0;
  sigmoid.moe_seq_aux_loss_coeff = 0.5;

  // As in Qwen2-MoE, and with a loss that spans the micro-batches.
  ModelConfig gated_shared = post_softmax;
  gated_shared.add_qkv_bias = true;
  gated_shared.qk_layernorm = false;
  gated_shared.moe_shared_expert_intermediate_size = 28;
  gated_shared.moe_shared_expert_gate = true;
  gated_shared.moe_aux_loss_coeff = 0;
  gated_shared.moe_global_aux_loss_coeff = 0.5;

  // As in older GPT models: LayerNorm, biases everywhere, plain GELU.
  ModelConfig biased = post_softmax;
  biased.normalization = Normalization::layer_norm;
  biased.zero_centered_gamma = true;
  biased.qk_layernorm = false;
  biased.add_qkv_bias = true;
  biased.add_bias_linear = true;
  biased.gated_linear_unit = false;
  biased.activation = ActivationFunction::gelu;
  biased.moe_layers = {false, true};
  biased.ffn_hidden_size = 40;

  ModelConfig capacity = post_softmax;
  capacity.moe_expert_capacity_factor = 0.75;
  capacity.qk_norm_scope = QkNormScope::projection;
  capacity.activation = ActivationFunction::quick_gelu;
  capacity.activation_clamp = 7;
  capacity.glu_linear_offset = 1;

  ModelConfig padded = post_softmax;
  padded.moe_expert_capacity_factor = 1.25;
  padded.moe_token_drop_policy = DropPolicy::position;
  padded.moe_pad_expert_input_to_capacity = true;
  padded.add_bias_linear = true;

  ModelConfig random = post_softmax;
  random.hidden_dropout = 0.2;
  random.attention_dropout = 0.2;
  random.moe_input_jitter_eps = 0.1;
  random.moe_expert_row_multiple = 8;

  ModelConfig sinkhorn = post_softmax;
  sinkhorn.moe_router_sinkhorn = true;
  sinkhorn.moe_aux_loss_coeff = 0;
  sinkhorn.moe_router_fp64 = true;

  ModelConfig mtp = dense_model(2);
  mtp.mtp_num_layers = 2;
  ModelConfig mtp_experts = trained_model();
  mtp_experts.mtp_num_layers = 1;
  mtp_experts.mtp_loss_scaling_factor = 0.6;
  ModelConfig mtp_repeated = gated_shared;  // with the global loss
  mtp_repeated.mtp_num_layers = 3;
  mtp_repeated.mtp_use_repeated_layer = true;
  ModelConfig mtp_repeated_aux = mtp_experts;
  mtp_repeated_aux.mtp_num_layers = 2;
  mtp_repeated_aux.mtp_use_repeated_layer = true;
  return {{"post_softmax", post_softmax},
          {"pre_softmax_mixed_tied", pre_softmax},
          {"l2_norm", l2_norm},
          {"top_1", top_1},
          {"sigmoid_groups_bias_shared", sigmoid},
          {"gated_shared_global_loss", gated_shared},
          {"layer_norm_biases_gelu", biased},
          {"capacity_clamped", capacity},
          {"padded_to_capacity_biases", padded},
          {"dropout_jitter_padding", random},
          {"sinkhorn", sinkhorn},
          {"mtp_tied", mtp},
          {"mtp_experts", mtp_experts},
          {"mtp_repeated_global_loss", mtp_repeated},
          {"mtp_repeated_experts", mtp_repeated_aux}};
}

// What the indexers minimise, and what all others do.
double indexer_objective(const StepRun& run) {
  double sum = 0;
  for (const LayerMetrics& layer : run.step.layers) {
    for (const LayerMetrics::Loss& loss : layer.losses) {
      if (loss.kind != AuxiliaryLossKind::indexer) continue;
      sum += coefficient_of(loss.kind, run.config, layer.layer) *
             *run.interpreter.view(loss.value).as<double>();
    }
  }
  return sum;
}
double other_objective(const StepRun& run) {
  return run.objective() - indexer_objective(run);
}

// The indexers of sparse attention learn from their loss alone, and nothing else does. Differences
// and tolerances are those of TrainingStepDerivatives.
TEST(SparseAttentionStep, IndexersAndTheModelLearnApart) {
  constexpr double kShift = 1e-5;
  for (const bool chosen_keys : {false, true}) {
    ModelConfig config = trained_model();
    config.init_method_std = 0.15;
    config.moe_layers[0] = false;
    config.ffn_hidden_size = 40;
    set_latent_attention(config);
    config.dsa_indexer_topk = 4;
    config.dsa_indexer_n_heads = 3;
    config.dsa_indexer_head_dim = 8;
    config.dsa_indexer_loss_coeff = 0.5;
    config.dsa_indexer_use_sparse_loss = chosen_keys;
    StepRun run(config, {.micro_batch_size = 2, .micro_batches = 2});
    run.set_learning_rate(0);
    run.update();
    ASSERT_GT(indexer_objective(run), 1e-4);
    std::vector<std::vector<double>> gradients;
    for (const Parameter& parameter : run.state.parameters) {
      gradients.push_back(elements(run.storage.view(parameter.gradient)));
    }
    for (const Parameter& parameter : run.state.parameters) {
      const bool of_indexer = run.name(parameter).find("index") != std::string::npos;
      const std::vector<double>& gradient = gradients[parameter.number()];
      const TensorView weights = run.storage.view(parameter.value);
      const auto largest =
          std::max_element(gradient.begin(), gradient.end(),
                           [](double a, double b) { return std::abs(a) < std::abs(b); });
      ASSERT_GT(std::abs(*largest), 1e-7) << run.name(parameter) << " gets no gradient";
      const int64_t at = largest - gradient.begin();
      const double weight = element(weights, at);
      double objective[2];
      for (const int side : {0, 1}) {
        set_element(weights, at, weight + (side == 0 ? -kShift : kShift));
        run.update();
        objective[side] = of_indexer ? indexer_objective(run) : other_objective(run);
      }
      set_element(weights, at, weight);
      const double numeric = (objective[1] - objective[0]) / (2 * kShift);
      EXPECT_NEAR(numeric, *largest, 2e-9 + 1e-6 * std::abs(*largest)) << run.name(parameter);
    }
  }
}

class TrainingStepDerivatives : public ::testing::TestWithParam<DerivativeCase> {};

// Central differences with a shift of 1e-5 in f64: the truncation is about 1e-10 of the third
// derivative, the rounding of the loss (about 5) gives 1e-16 * 5 / 1e-5 = 5e-11. Twenty times these
// are accepted absolutely, and 1e-6 of the gradient.
TEST_P(TrainingStepDerivatives, AreThoseOfWhatIsMinimised) {
  constexpr double kShift = 1e-5;
  constexpr int kPerParameter = 5;
  StepRun run(GetParam().config, {.micro_batch_size = 2, .micro_batches = 2});
  run.set_learning_rate(0);  // weights stay exactly as they are
  run.update();
  ASSERT_FALSE(run.skipped());
  const std::vector<double> counts = run.expert_counts();
  std::vector<std::vector<double>> gradients;
  for (const Parameter& parameter : run.state.parameters) {
    gradients.push_back(elements(run.storage.view(parameter.gradient)));
  }

  int wanted = 0;
  int checked = 0;
  for (const Parameter& parameter : run.state.parameters) {
    const std::vector<double>& gradient = gradients[parameter.number()];
    const TensorView weights = run.storage.view(parameter.value);
    // The largest gradient and some at random, which are often zero (tokens that do not occur).
    const auto largest = std::max_element(gradient.begin(), gradient.end(), [](double a, double b) {
      return std::abs(a) < std::abs(b);
    });
    ASSERT_GT(std::abs(*largest), 1e-6) << run.name(parameter) << " gets no gradient";
    for (int i = 0; i < kPerParameter; ++i) {
      const int64_t at =
          i == 0 ? largest - gradient.begin()
                 : static_cast<int64_t>(random_below(gradient.size(), 5, RandomStream::test,
                                                     parameter.number(), static_cast<uint64_t>(i)));
      const double weight = element(weights, at);
      double objective[2];
      bool same_routing = true;
      for (const int side : {0, 1}) {
        set_element(weights, at, weight + (side == 0 ? -kShift : kShift));
        run.update();
        objective[side] = run.objective();
        same_routing = same_routing && run.expert_counts() == counts;
      }
      set_element(weights, at, weight);
      ++wanted;
      if (!same_routing) continue;  // the loss jumps where a token changes its experts
      ++checked;
      const double analytic = gradient[static_cast<size_t>(at)];
      const double numeric = (objective[1] - objective[0]) / (2 * kShift);
      EXPECT_NEAR(numeric, analytic, 2e-9 + 1e-6 * std::abs(analytic))
          << run.name(parameter) << " element " << at;
    }
  }
  EXPECT_GE(wanted, 5 * static_cast<int>(run.state.parameters.size()));
  EXPECT_GE(checked * 10, wanted * 9);
}

INSTANTIATE_TEST_SUITE_P(Models, TrainingStepDerivatives, ::testing::ValuesIn(derivative_cases()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(TrainingStep, HoldsExactlyThePlannedMemory) {
  for (const bool oracle : {false, true}) {
    const uint64_t before = Arena::allocated_bytes();
    {
      const StepRun run(trained_model(),
                        {.threads = 2,
                         .oracle = oracle,
                         .micro_batches = 2,
                         .offload = {.modules = {&kFeedForwardNormModule, &kExpertFc1Module},
                                     .least_elements = 1},
                         .optimizer_offload = 0.5});
      const MemoryPlan& plan = run.interpreter.plan();
      EXPECT_EQ(Arena::allocated_bytes() - before, plan.total_bytes());
      EXPECT_EQ(run.storage.bytes(), plan.state_bytes);
      EXPECT_EQ(run.storage.host_bytes(), plan.host_state_bytes);
      EXPECT_EQ(run.interpreter.allocated_bytes(), plan.own_bytes());
      EXPECT_GT(plan.host_state_bytes, 0U);
      EXPECT_GT(plan.host_transient_bytes, 0U);
    }
    EXPECT_EQ(Arena::allocated_bytes(), before);
  }
}

// A step whose gradients are not finite must leave no trace in weights and moments.
class SkippedStep : public ::testing::TestWithParam<DType> {
 protected:
  SkippedStep() {
    run.update(1);
    EXPECT_FALSE(run.skipped());
    before = state_bytes(run.storage, /*with_gradients=*/false);
  }
  void expect_skipped() {
    const std::vector<std::string> poisoned = state_bytes(run.storage, /*with_gradients=*/false);
    run.update(2);
    EXPECT_TRUE(run.skipped());
    EXPECT_FALSE(std::isfinite(run.grad_norm()));
    EXPECT_EQ(state_bytes(run.storage, /*with_gradients=*/false), poisoned);
  }
  // The step after it, with everything in order again, is an ordinary one.
  void expect_recovery() {
    EXPECT_EQ(state_bytes(run.storage, /*with_gradients=*/false), before);
    run.update(2);
    EXPECT_FALSE(run.skipped());
    EXPECT_TRUE(std::isfinite(run.grad_norm()));
    EXPECT_NE(state_bytes(run.storage, /*with_gradients=*/false), before);
    for (const Parameter& parameter : run.state.parameters) {
      for (const double value : elements(run.storage.view(parameter.value))) {
        ASSERT_TRUE(std::isfinite(value)) << run.name(parameter);
      }
    }
  }

  StepRun run{trained_model(), {.dtype = GetParam(), .threads = 2, .micro_batches = 2}};
  std::vector<std::string> before;
};

TEST_P(SkippedStep, NanInTheMask) {
  const TensorView mask = run.interpreter.view(run.step.micro_batches[1].mask);
  set_element(mask, 4, kNaN);
  expect_skipped();
  set_element(mask, 4, 1);
  expect_recovery();
}

TEST_P(SkippedStep, NanInAnyWeight) {
  for (const Parameter& parameter : run.state.parameters) {
    SCOPED_TRACE(run.name(parameter));
    const TensorView weights = run.storage.view(parameter.value);
    // Of the embedding, a row that is looked up; of the experts, all of them have tokens.
    const int64_t at =
        parameter.name == "embedding"
            ? run.interpreter.view(run.step.micro_batches[0].tokens).as<int32_t>()[0] *
                  weights.shape[1]
            : 0;
    const double weight = element(weights, at);
    set_element(weights, at, kNaN);
    expect_skipped();
    set_element(weights, at, weight);
  }
  expect_recovery();
}

INSTANTIATE_TEST_SUITE_P(DTypes, SkippedStep,
                         ::testing::Values(DType::f64, DType::f32, DType::bf16),
                         [](const auto& info) { return std::string(name_of(info.param)); });

TEST(TrainingStep, LabelsOfMaskedTokensAreNotLookedAt) {
  StepRun plain(trained_model(), {.dtype = DType::f32, .micro_batch_size = 2});
  StepRun other(trained_model(), {.dtype = DType::f32, .micro_batch_size = 2});
  const BatchValues& batch = other.step.micro_batches[0];
  const TensorView mask = other.interpreter.view(batch.mask);
  auto* labels = other.interpreter.view(batch.labels).as<int32_t>();
  const int32_t garbage[] = {-1, -100, 1 << 30, other.config.vocab_size, 0};
  int masked = 0;
  for (int64_t i = 0; i < mask.shape.elements(); ++i) {
    if (element(mask, i) == 0) labels[i] = garbage[masked++ % 5];
  }
  ASSERT_GE(masked, 4);
  plain.update();
  other.update();
  EXPECT_EQ(plain.loss(), other.loss());
  expect_same_state(plain.storage, other.storage);
}

TEST(TrainingStep, NoTokenCountsAtAll) {
  ModelConfig config = trained_model();
  config.moe_aux_loss_coeff = 0;
  config.moe_z_loss_coeff = 0;
  StepRun run(config, {});
  const TensorView mask = run.interpreter.view(run.step.micro_batches[0].mask);
  for (int64_t i = 0; i < mask.shape.elements(); ++i) set_element(mask, i, 0);
  run.update();
  EXPECT_EQ(run.loss(), 0);
  EXPECT_EQ(run.grad_norm(), 0);
  EXPECT_FALSE(run.skipped());
}

// Masked tokens leave the mean, too: the loss is the mean over the others, token by token.
TEST(TrainingStep, LossIsTheMeanOverCountedTokens) {
  StepRun run(trained_model(), {});
  const TensorView mask = run.interpreter.view(run.step.micro_batches[0].mask);
  const std::vector<double> counted = elements(mask);
  run.set_learning_rate(0);
  run.update();
  const double loss = run.loss();
  double sum = 0;
  double tokens = 0;
  for (size_t only = 0; only < counted.size(); ++only) {
    if (counted[only] == 0) continue;
    for (size_t i = 0; i < counted.size(); ++i) {
      set_element(mask, static_cast<int64_t>(i), i == only ? 1 : 0);
    }
    run.update();
    sum += run.loss();
    tokens += 1;
  }
  EXPECT_LT(tokens, static_cast<double>(counted.size()));
  EXPECT_NEAR(loss, sum / tokens, 1e-13 * loss);  // only the order of a few sums differs
}

// As Megatron logs it: over all tokens that count, while what is minimised is the mean of the
// micro-batches' means.
TEST(TrainingStep, LossIsTheMeanOverTheTokensOfAllMicroBatches) {
  const auto mask_all_but = [](StepRun& run, size_t micro_batch, int64_t tokens) {
    const TensorView mask = run.interpreter.view(run.step.micro_batches[micro_batch].mask);
    for (int64_t i = 0; i < mask.shape.elements(); ++i) set_element(mask, i, i < tokens ? 1 : 0);
  };
  StepRun both(trained_model(), {.micro_batches = 2});
  mask_all_but(both, 0, 2);
  mask_all_but(both, 1, 9);
  both.update();
  std::vector<double> losses;
  for (const int64_t tokens : {2, 9}) {
    StepRun one(trained_model(), {});
    one.write_samples(static_cast<int64_t>(losses.size()));
    mask_all_but(one, 0, tokens);
    one.update();
    losses.push_back(one.loss());
  }
  ASSERT_GT(std::abs(losses[0] - losses[1]), 0.01);
  EXPECT_DOUBLE_EQ(both.loss(), (2 * losses[0] + 9 * losses[1]) / 11);
}

// The losses of a router in fp64 have its type, their gradients, too, however the loss is weighed.
TEST(TrainingStep, RouterInDoublePrecisionHasItsLosses) {
  for (const DType dtype : {DType::bf16, DType::f32, DType::f64}) {
    for (const bool per_token : {false, true}) {
      std::vector<double> objectives;
      for (const bool fp64 : {false, true}) {
        ModelConfig config = trained_model();
        config.moe_seq_aux_loss_coeff = 0.01;
        config.moe_global_aux_loss_coeff = 0.01;
        config.moe_router_fp64 = fp64;
        StepRun run(config,
                    {.dtype = dtype, .micro_batches = 2, .change = [&](TrainingStepOptions& step) {
                       step.per_token_loss = per_token;
                     }});
        run.update();
        EXPECT_FALSE(run.skipped());
        objectives.push_back(run.objective());
      }
      // No choice flips: logits in fp32 differ from those in fp64 by some 1e-7.
      EXPECT_NEAR(objectives[0], objectives[1], 1e-5 * objectives[0]) << name_of(dtype);
    }
  }
}

// The scale is a factor of every loss's gradient, and comes out again: a power of two without any
// rounding. In fp64 nothing vanishes or overflows.
TEST(TrainingStep, ALossScaleOfAPowerOfTwoChangesNoBit) {
  for (const DerivativeCase& each : derivative_cases()) {
    for (const bool per_token : {false, true}) {
      const auto update = [&](bool scaled, double scale) {
        auto run = std::make_unique<StepRun>(
            each.config,
            StepRunOptions{
                .dtype = DType::f64, .micro_batches = 2, .change = [&](TrainingStepOptions& step) {
                  step.per_token_loss = per_token;
                  step.ignore_padding = per_token;
                  step.scale_loss = scaled;
                }});
        if (scaled) *run->interpreter.view(run->step.loss_scale).as<double>() = scale;
        run->update();
        EXPECT_FALSE(run->skipped());
        return run;
      };
      SCOPED_TRACE(std::string(each.name) + (per_token ? ", per token" : ""));
      const auto plain = update(false, 0);
      const auto scaled = update(true, 65536);
      EXPECT_EQ(plain->grad_norm(), scaled->grad_norm());
      EXPECT_EQ(state_bytes(plain->storage, false), state_bytes(scaled->storage, false));
      const auto other = update(true, 3);
      EXPECT_NEAR(plain->grad_norm(), other->grad_norm(), 1e-12 * plain->grad_norm());
    }
  }
}

// A token's share of the step is then the same, and so is that of an auxiliary loss.
TEST(TrainingStep, ALossPerTokenIsThatOfMicroBatchesWhereAllTokensCount) {
  for (const int32_t sequences : {1, 2, 3}) {
    ModelConfig config = trained_model();
    config.moe_aux_loss_coeff = 1;
    config.moe_z_loss_coeff = 1;
    std::vector<double> losses;
    std::vector<double> norms;
    for (const bool per_token : {false, true}) {
      // The first three tokens of a sequence are not masked.
      StepRun run(config,
                  {.micro_batch_size = sequences,
                   .micro_batches = 2,
                   .sequence = 3,
                   .change = [&](TrainingStepOptions& step) { step.per_token_loss = per_token; }});
      run.update();
      losses.push_back(run.loss());
      norms.push_back(run.grad_norm());
    }
    // Two orders of products in f64.
    EXPECT_NEAR(losses[1], losses[0], 1e-12 * losses[0]) << sequences;
    EXPECT_NEAR(norms[1], norms[0], 1e-12 * norms[0]) << sequences;
  }
}

// Megatron's sinkhorn does not scale its weights.
TEST(TrainingStep, SinkhornTakesNoScalingFactor) {
  ModelConfig config = trained_model();
  config.moe_router_sinkhorn = true;
  config.moe_aux_loss_coeff = 0;
  StepRun plain(config, {});
  config.moe_router_topk_scaling_factor = 2;
  StepRun scaled(config, {});
  plain.update();
  scaled.update();
  EXPECT_EQ(plain.loss(), scaled.loss());
  EXPECT_EQ(plain.grad_norm(), scaled.grad_norm());
}

// A capacity of one token less than there are drops one where all choose the same expert.
TEST(TrainingStep, CapacityOfAllTokensButOneDropsOne) {
  ModelConfig config = trained_model();
  config.num_experts = 1;
  config.moe_router_topk = 1;
  config.moe_router_pre_softmax = true;
  for (const double tokens : {12.0, 11.0, 10.0}) {
    // The capacity is rounded up.
    config.moe_expert_capacity_factor = (tokens - 0.5) / 12;
    StepRun run(config, {.sequence = 12});
    run.update();
    EXPECT_EQ(run.expert_counts(), std::vector<double>(2, tokens));
  }
}

// The second sequence keeps as much as the first one.
TEST(TrainingStep, PositionsAreDroppedFromAllSequencesAlike) {
  ModelConfig config = trained_model();
  config.num_experts = 1;
  config.moe_router_topk = 1;
  config.moe_router_pre_softmax = true;
  config.moe_expert_capacity_factor = 0.5;
  config.moe_token_drop_policy = DropPolicy::position;
  // Without its second half each sequence has what a step of shorter sequences has.
  const auto norm_of = [&](int32_t micro_batch_size, int32_t micro_batches, int64_t counted) {
    StepRun run(config, {.micro_batch_size = micro_batch_size, .micro_batches = micro_batches});
    for (const BatchValues& batch : run.step.micro_batches) {
      const TensorView mask = run.interpreter.view(batch.mask);
      for (int64_t i = 0; i < mask.shape.elements(); ++i) {
        set_element(mask, i, i % batch.sequence < counted ? 1 : 0);
      }
    }
    run.update();
    EXPECT_EQ(run.expert_counts(), std::vector<double>(2, 12.0));
    return run.loss();
  };
  EXPECT_NEAR(norm_of(2, 1, 6), norm_of(1, 2, 6), 1e-12);
}

TEST(TrainingStep, SkipsAnUpdateWhoseGradientsAreTooLarge) {
  double norm = 0;
  for (const double limit : {0.0, 0.5, 1.0}) {  // of the norm; 0: none
    StepRun run(trained_model(), {.change = [&](TrainingStepOptions& step) {
                  if (limit > 0) step.skip_norm = limit * norm;
                }});
    const std::vector<std::string> before = state_bytes(run.storage, /*with_gradients=*/false);
    run.update();
    norm = run.grad_norm();
    EXPECT_EQ(run.skipped(), limit == 0.5);
    EXPECT_EQ(before == state_bytes(run.storage, /*with_gradients=*/false), limit == 0.5);
  }
}

// Rows of experts and of the embedding that no token reaches, and all of a step without tokens.
TEST(TrainingStep, CountsZeroGradientsAndMeasuresItsWeights) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    StepRun run(trained_model(), {.dtype = dtype, .change = [](TrainingStepOptions& step) {
                                    step.count_zero_gradients = step.parameter_norm = true;
                                  }});
    run.update();
    double zeros = 0;
    double squares = 0;
    for (const Parameter& parameter : run.state.parameters) {
      for (const double each : elements(run.storage.view(parameter.gradient))) zeros += each == 0;
      const StateId weights = parameter.master.valid() ? parameter.master : parameter.value;
      for (const double each : elements(run.storage.view(weights))) squares += each * each;
    }
    EXPECT_GT(zeros, 1000);
    EXPECT_EQ(*run.interpreter.view(run.step.zero_gradients).as<double>(), zeros);
    // Sums of some 20,000 squares in double, in two orders.
    EXPECT_NEAR(*run.interpreter.view(run.step.squared_parameter_norm).as<double>(), squares,
                1e-12 * squares);
  }
}

TEST(TrainingStep, EmbeddingAndOutputMayHaveARateOfTheirOwn) {
  StepRun plain(trained_model(), {});
  StepRun other(trained_model(),
                {.change = [](TrainingStepOptions& step) { step.decoupled_learning_rate = true; }});
  ASSERT_FALSE(plain.step.decoupled_learning_rate.valid());
  *other.interpreter.view(other.step.decoupled_learning_rate).as<double>() = 0;
  const std::vector<std::string> before = state_bytes(other.storage);
  plain.update();
  other.update();
  for (const Parameter& parameter : other.state.parameters) {
    const bool is_apart = parameter.name == "embedding" || parameter.name == "head";
    const std::string after = bytes_of(other.storage.view(parameter.value));
    EXPECT_EQ(after == before[static_cast<size_t>(parameter.value.index)], is_apart)
        << other.name(parameter);
    if (is_apart) continue;
    EXPECT_EQ(after, bytes_of(plain.storage.view(parameter.value))) << other.name(parameter);
  }
}

// A decay of everything leaves nothing but the update, which moves by the learning rate.
TEST(TrainingStep, WeightDecayMayApplyToTheNormsOfQueriesAndKeys) {
  for (const bool decays : {false, true}) {
    StepRun run(trained_model(),
                {.change = [&](TrainingStepOptions& step) { step.decay_qk_norms = decays; }});
    run.set_learning_rate(1e-3);
    *run.interpreter.view(run.step.weight_decay).as<double>() = 1e3;
    run.update();
    for (const Parameter& parameter : run.state.parameters) {
      const bool is_qk = parameter.name == "q_norm" || parameter.name == "k_norm";
      const double weight = element(run.storage.view(parameter.value), 0);
      if (is_qk) {
        EXPECT_NEAR(weight, decays ? 0 : 1, 1.1e-3) << run.name(parameter);
      } else if (parameter.name == "input_norm") {
        EXPECT_NEAR(weight, 1, 1.1e-3) << run.name(parameter);
      }
    }
  }
}

// Gains of 1 that are no weights: queries and keys have the same length whatever the projection.
TEST(TrainingStep, L2NormOfQueriesAndKeysIsThatWithGainsOfOne) {
  ModelConfig config = trained_model();
  StepRun with_gains(config, {});
  config.qk_layernorm = false;
  config.qk_l2_norm = true;
  StepRun without(config, {});
  for (const Parameter& parameter : without.state.parameters) {
    const TensorView to = without.storage.view(parameter.value);
    const StateId from = get_parameter(with_gains.state, parameter.name, parameter.layer).value;
    std::memcpy(to.data, with_gains.storage.view(from).data, bytes_of(to).size());
  }
  with_gains.update();
  without.update();
  EXPECT_EQ(with_gains.loss(), without.loss());
  EXPECT_EQ(with_gains.state.parameters.size(), without.state.parameters.size() + 4);
  const auto gradient = [](StepRun& run) {
    return bytes_of(run.storage.view(get_parameter(run.state, "w_qkv", 1).gradient));
  };
  EXPECT_EQ(gradient(with_gains), gradient(without));
}

// All experts equal: without the bias loads are even, with a large one few experts get all.
TEST(TrainingStep, ForcedBiasMakesLoadsUneven) {
  const auto largest_share = [](double bias, int64_t number) {
    ModelConfig config = trained_model();
    config.moe_router_force_biased = bias;
    StepRun run(config, {.micro_batch_size = 4, .micro_batches = 2, .sequence = 64});
    run.update(number);
    EXPECT_FALSE(run.skipped());
    return run.expert_counts();
  };
  const std::vector<double> uneven = largest_share(50, 1);
  for (size_t layer = 0; layer < 2; ++layer) {
    std::vector<double> counts(uneven.begin() + static_cast<std::ptrdiff_t>(4 * layer),
                               uneven.begin() + static_cast<std::ptrdiff_t>(4 * layer + 4));
    std::sort(counts.begin(), counts.end());
    // 512 tokens, two experts each. Numbers of deviation 50 differ by less than 5 one time in ten.
    EXPECT_GT(counts[2] + counts[3], 900);
  }
  EXPECT_EQ(largest_share(-50, 1).size(), 8U);
}

TEST(TrainingStep, EvaluationSeesTheSameLoss) {
  StepRun run(trained_model(), {.micro_batch_size = 2});
  run.set_learning_rate(0);
  run.update();
  const InferenceStep evaluation = build_evaluation_step(run.config, run.state, 2, 12);
  CpuInterpreter interpreter(*evaluation.program, plan_memory(*evaluation.program, 1), run.storage,
                             run.pool);
  const BatchValues& from = run.step.micro_batches[0];
  const BatchValues& to = evaluation.batch;
  for (const auto& [source, target] :
       {std::pair{from.tokens, to.tokens}, std::pair{from.labels, to.labels},
        std::pair{from.mask, to.mask}}) {
    const std::string bytes = bytes_of(run.interpreter.view(source));
    std::memcpy(interpreter.view(target).data, bytes.data(), bytes.size());
  }
  interpreter.run();
  // The step multiplies by the number of tokens and divides again.
  EXPECT_DOUBLE_EQ(*interpreter.view(evaluation.loss).as<double>(), run.loss());
}

TEST(TrainingStep, StartsFromTheInitialValues) {
  const StepRun run(trained_model(), {.dtype = DType::f64, .seed = 5});
  for (const Parameter& parameter : run.state.parameters) {
    const std::vector<double> weights = elements(run.storage.view(parameter.value));
    std::vector<double> expected(weights.size());
    fill_initial_values(parameter, 5, 0, static_cast<int64_t>(weights.size()), expected.data());
    EXPECT_EQ(weights, expected) << run.name(parameter);
  }
}

// AdamW's first update moves every weight by the learning rate against the sign of its gradient
// (m / sqrt(v) = 1), after the decay, which norms are spared.
TEST(TrainingStep, UpdatesEveryWeight) {
  StepRun run(trained_model(), {});
  std::vector<std::vector<double>> before;
  for (const Parameter& parameter : run.state.parameters) {
    before.push_back(elements(run.storage.view(parameter.value)));
  }
  run.update(1);
  const double clip = std::min(1.0, 1.0 / (run.grad_norm() + 1e-6));
  for (const Parameter& parameter : run.state.parameters) {
    const std::vector<double> after = elements(run.storage.view(parameter.value));
    const std::vector<double> gradient = elements(run.storage.view(parameter.gradient));
    const double decay = parameter.decay ? 1 - 1e-3 * 0.1 : 1;
    for (size_t i = 0; i < after.size(); ++i) {
      const double g = clip * gradient[i];
      // 1e-14: a few roundings of numbers of at most about 1.
      ASSERT_NEAR(after[i], before[parameter.number()][i] * decay - 1e-3 * g / (std::abs(g) + 1e-8),
                  1e-14)
          << run.name(parameter) << " element " << i;
    }
  }
}

}  // namespace
}  // namespace troupe
