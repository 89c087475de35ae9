// Data parallelism computes what one rank computes: loss, every gradient, auxiliary losses, loads,
// gradient norm, and the state after three updates agree with those of one rank that runs the same
// micro-batches one after the other. Nothing but the order of sums differs.
#include <cmath>
#include <gtest/gtest.h>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/thread_group.h"
#include "parallel/collective_schedule.h"
#include "parallel/rank_communicators.h"
#include "support/adamw_state.h"
#include "train/train_test_support.h"

namespace troupe::testing {
namespace {

constexpr int64_t kSteps = 3;
// f64 and sums of some thousand terms: rounding is about 1e-13 of the largest term. The promise of
// the project is 1e-10.
constexpr double kTolerance = 1e-10;
// A busy machine may hold a rank up for seconds.
constexpr std::chrono::milliseconds kPatient{60'000};

struct Model {
  const char* name;
  ModelConfig config;
};

std::vector<Model> models() {
  ModelConfig plain = trained_model();
  plain.moe_aux_loss_coeff = 0;
  plain.moe_z_loss_coeff = 0;

  ModelConfig aux = trained_model();
  aux.moe_aux_loss_coeff = 0.5;
  aux.moe_z_loss_coeff = 0.1;

  ModelConfig seq_aux = plain;
  seq_aux.moe_seq_aux_loss_coeff = 0.5;

  ModelConfig global_aux = plain;
  global_aux.moe_global_aux_loss_coeff = 0.5;
  global_aux.moe_shared_expert_intermediate_size = 28;
  global_aux.moe_shared_expert_gate = true;

  ModelConfig expert_bias = plain;
  expert_bias.num_experts = 8;
  expert_bias.moe_router_score_function = ScoreFunction::sigmoid;
  expert_bias.moe_router_num_groups = 4;
  expert_bias.moe_router_group_topk = 2;
  expert_bias.moe_router_enable_expert_bias = true;
  expert_bias.moe_router_bias_update_rate = 0.05;

  ModelConfig capacity = aux;
  capacity.moe_expert_capacity_factor = 0.75;

  ModelConfig padded = plain;
  padded.moe_expert_capacity_factor = 1.25;
  padded.moe_token_drop_policy = DropPolicy::position;
  padded.moe_pad_expert_input_to_capacity = true;

  ModelConfig sinkhorn = plain;
  sinkhorn.moe_router_sinkhorn = true;

  ModelConfig random = aux;
  random.hidden_dropout = 0.2;
  random.attention_dropout = 0.2;
  random.moe_input_jitter_eps = 0.1;

  ModelConfig forced = global_aux;
  forced.moe_router_force_load_balancing = true;

  ModelConfig first_dense = aux;
  first_dense.num_layers = 3;
  first_dense.moe_layers = {false, true, true};
  first_dense.ffn_hidden_size = 40;
  first_dense.tie_embeddings = true;

  return {{"plain", plain},
          {"aux_and_z_loss", aux},
          {"seq_aux_loss", seq_aux},
          {"global_aux_loss", global_aux},
          {"expert_bias", expert_bias},
          {"capacity", capacity},
          {"padded_capacity", padded},
          {"sinkhorn", sinkhorn},
          {"dropout_jitter", random},
          {"random_routing", forced},
          {"first_dense_tied", first_dense}};
}

struct Layout {
  Model model;
  int32_t ranks;
  int32_t micro_batch_size;
  int32_t micro_batches;  // of one rank
};

std::string name_of(const Layout& layout) {
  return std::string(layout.model.name) + "_dp" + std::to_string(layout.ranks) + "_mbs" +
         std::to_string(layout.micro_batch_size) + "_acc" + std::to_string(layout.micro_batches);
}

std::vector<Layout> layouts() {
  std::vector<Layout> all;
  for (const Model& model : models()) {
    for (const int32_t ranks : {2, 4}) {
      for (const int32_t micro_batch_size : {1, 2}) {
        for (const int32_t micro_batches : {1, 3}) {
          all.push_back({model, ranks, micro_batch_size, micro_batches});
        }
      }
    }
  }
  return all;
}

// What three steps leave behind, by name.
struct Outcome {
  std::map<std::string, std::vector<double>> values;
  std::vector<std::string> state;  // bytes, after the last step
};

void record(const StepRun& run, int64_t number, Outcome& outcome) {
  const std::string step = "step " + std::to_string(number) + " ";
  outcome.values[step + "loss"] = {run.loss()};
  outcome.values[step + "grad_norm"] = {run.grad_norm()};
  outcome.values[step + "expert_counts"] = run.expert_counts();
  for (const LayerMetrics& layer : run.step.layers) {
    const std::string at = step + "layer " + std::to_string(layer.layer) + " ";
    outcome.values[at + "entropy"] = elements(run.interpreter.view(layer.entropy));
    for (const LayerMetrics::Loss& loss : layer.losses) {
      outcome.values[at + std::string(troupe::name_of(loss.kind))] =
          elements(run.interpreter.view(loss.value));
    }
  }
  for (const Parameter& parameter : run.state.parameters) {
    outcome.values[step + "gradient of " + run.name(parameter)] =
        elements(run.storage.view(parameter.gradient));
  }
  if (number < kSteps) return;
  for (const Parameter& parameter : run.state.parameters) {
    for (const StateId id :
         {parameter.value, exp_avg_of(parameter).values, exp_avg_sq_of(parameter).values}) {
      outcome.values["after it " + (*run.state.table)[id].name] = elements(run.storage.view(id));
    }
  }
  for (const StateId id : run.state.expert_biases) {
    if (!id.valid()) continue;
    outcome.values["after it " + (*run.state.table)[id].name] = elements(run.storage.view(id));
  }
  outcome.state = state_bytes(run.storage);
}

// Runs the steps; this rank takes its samples of every global batch in Megatron's order.
Outcome run_steps(StepRun& run, int32_t ranks, int32_t rank) {
  Outcome outcome;
  const int64_t micro_batch_size = run.options.micro_batch_size;
  const int64_t step_samples = ranks * micro_batch_size * run.options.micro_batches;
  for (int64_t number = 1; number <= kSteps; ++number) {
    for (size_t i = 0; i < run.step.micro_batches.size(); ++i) {
      const int64_t global = static_cast<int64_t>(i) * ranks + rank;
      run.write_micro_batch(i, number * step_samples + global * micro_batch_size);
    }
    run.update(number);
    EXPECT_FALSE(run.skipped());
    record(run, number, outcome);
  }
  return outcome;
}

std::vector<Outcome> run_layout(const Layout& layout) {
  ThreadGroup group(layout.ranks, kPatient);
  std::vector<std::unique_ptr<StepRun>> runs;
  std::vector<const Program*> programs;
  for (int32_t rank = 0; rank < layout.ranks; ++rank) {
    runs.push_back(std::make_unique<StepRun>(
        layout.model.config,
        StepRunOptions{.threads = 1 + rank % 2,
                       .micro_batch_size = layout.micro_batch_size,
                       .micro_batches = layout.micro_batches,
                       .data_parallel_size = layout.ranks,
                       .data_parallel_rank = rank,

                       .communicators = communicators_of(
                           group, troupe::Layout({.world_size = layout.ranks}), rank)}));
    programs.push_back(runs.back()->step.program.get());
  }
  verify_collectives(programs, troupe::Layout({.world_size = layout.ranks}));
  std::vector<Outcome> outcomes(static_cast<size_t>(layout.ranks));
  run_ranks(group, [&](int rank) {
    const auto at = static_cast<size_t>(rank);
    outcomes[at] = run_steps(*runs[at], layout.ranks, rank);
  });
  return outcomes;
}

// In units of the largest element: the elements of one tensor are sums of like terms.
void expect_close(const Outcome& one, const Outcome& ranks) {
  ASSERT_EQ(one.values.size(), ranks.values.size());
  for (const auto& [name, expected] : one.values) {
    ASSERT_TRUE(ranks.values.contains(name)) << name;
    const std::vector<double>& found = ranks.values.at(name);
    ASSERT_EQ(found.size(), expected.size()) << name;
    double largest = 0;
    for (const double value : expected) largest = std::max(largest, std::abs(value));
    for (size_t i = 0; i < expected.size(); ++i) {
      ASSERT_NEAR(found[i], expected[i], kTolerance * largest) << name << " element " << i;
    }
  }
}

class DataParallel : public ::testing::TestWithParam<Layout> {};

TEST_P(DataParallel, EqualsOneRank) {
  const Layout& layout = GetParam();
  SCOPED_TRACE("to reproduce: layout_tests --gtest_filter='*EqualsOneRank/" + name_of(layout) +
               "'");
  StepRun single(layout.model.config, {.micro_batch_size = layout.micro_batch_size,
                                       .micro_batches = layout.micro_batches * layout.ranks});
  const Outcome one = run_steps(single, 1, 0);
  const std::vector<Outcome> ranks = run_layout(layout);
  expect_close(one, ranks.front());
  for (size_t rank = 1; rank < ranks.size(); ++rank) {
    SCOPED_TRACE("rank " + std::to_string(rank));
    ASSERT_EQ(ranks[rank].values, ranks.front().values) << "not the bits of rank 0";
    ASSERT_EQ(ranks[rank].state, ranks.front().state) << "not the bits of rank 0";
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, DataParallel, ::testing::ValuesIn(layouts()),
                         [](const auto& info) { return name_of(info.param); });

// The same bits in a second run: nothing depends on which rank comes first.
TEST(DataParallelBits, DoNotDependOnTiming) {
  const Layout layout{models()[1], 4, 1, 2};
  const std::vector<Outcome> first = run_layout(layout);
  for (int repeat = 0; repeat < 3; ++repeat) {
    ASSERT_EQ(run_layout(layout).front().state, first.front().state);
  }
}

class CollectiveSchedule : public ::testing::Test {
 protected:
  TrainingStep build(int32_t rank, int32_t micro_batches = 2) const {
    return build_training_step(config, state_of(config, rank),
                               {.micro_batches = micro_batches, .sequence = 12});
  }
  static ModelState state_of(const ModelConfig& config, int32_t rank) {
    return declare_model_state(config, DType::f64, /*trained=*/true,
                               data_parallel_part(config.num_layers, 2, rank));
  }
  static std::string refusal(const Program& a, const Program& b) {
    const std::vector<const Program*> programs = {&a, &b};
    try {
      verify_collectives(programs, troupe::Layout({.world_size = 2}));
    } catch (const UserError& error) {
      EXPECT_EQ(error.status(), ExitStatus::does_not_fit);
      return error.what();
    }
    return {};
  }
  static std::vector<int32_t> all_ops_but(const Program& program, int32_t left_out) {
    std::vector<int32_t> order;
    for (int32_t i = 0; i < program.op_count(); ++i) {
      if (i != left_out) order.push_back(i);
    }
    return order;
  }
  static std::vector<int32_t> collectives(const Program& program) {
    std::vector<int32_t> found;
    for (int32_t i = 0; i < program.op_count(); ++i) {
      if (program.op(i).spec->group != nullptr) found.push_back(i);
    }
    return found;
  }

  ModelConfig config = models()[3].config;  // global loss: collectives in every micro-batch
};

TEST_F(CollectiveSchedule, OfAllRanksAgrees) {
  const TrainingStep a = build(0);
  const TrainingStep b = build(1);
  EXPECT_EQ(refusal(*a.program, *b.program), "");
  EXPECT_EQ(hash_collectives(*a.program), hash_collectives(*b.program));
  // Two micro-batches of two layers, a bucket of gradients for each layer and for what is before
  // and after them, the metrics, and the squared norm.
  EXPECT_EQ(collectives(*a.program).size(), 2U * 2 + 4 + 1 + 1);
}

// A bucket ends with the layer whose gradients fill it.
TEST_F(CollectiveSchedule, SuccessiveLayersShareABucket) {
  const ModelState state = state_of(config, 0);
  int64_t after_layers = 0;
  int64_t of_layer = 0;
  for (const Parameter& parameter : state.parameters) {
    const int64_t elements = parameter.held.end - parameter.held.begin;
    if (parameter.name == "final_norm" || parameter.name == "head") {
      after_layers += elements;
    }
    if (parameter.layer == 0) of_layer += elements;
  }
  ASSERT_LT(after_layers, of_layer);
  const size_t others = 2U * 2 + 1 + 1;  // as above
  for (const auto& [least, buckets] :
       {std::pair{int64_t{1}, 4}, std::pair{after_layers, 4}, std::pair{after_layers + 1, 3},
        std::pair{after_layers + of_layer + 1, 2}, std::pair{int64_t{1} << 40, 1}}) {
    const TrainingStep step = build_training_step(
        config, state, {.micro_batches = 2, .sequence = 12, .gradient_bucket_elements = least});
    EXPECT_EQ(collectives(*step.program).size(), others + static_cast<size_t>(buckets))
        << least << " elements";
  }
}

TEST_F(CollectiveSchedule, WithOneLeftOutIsRefused) {
  const TrainingStep a = build(0);
  const size_t count = collectives(*a.program).size();
  for (size_t which = 0; which < count; ++which) {
    const TrainingStep b = build(1);
    const int32_t left_out = collectives(*b.program)[which];
    b.program->select_ops(all_ops_but(*b.program, left_out));
    EXPECT_NE(refusal(*a.program, *b.program), "") << "without operation " << left_out;
    EXPECT_NE(refusal(*b.program, *a.program), "") << "without operation " << left_out;
    EXPECT_NE(hash_collectives(*a.program), hash_collectives(*b.program));
  }
}

TEST_F(CollectiveSchedule, RefusalNamesBothOperations) {
  const TrainingStep a = build(0);
  const TrainingStep b = build(1);
  const int32_t last = collectives(*b.program).back();
  b.program->select_ops(all_ops_but(*b.program, last));
  const std::string message = refusal(*a.program, *b.program);
  EXPECT_NE(message.find("which in rank 0 is operation " + std::to_string(last) +
                         " (sum_over_ranks, group world) of squared_norm f64 [1]"),
            std::string::npos)
      << message;
}

TEST_F(CollectiveSchedule, OfOtherSizesIsRefused) {
  const TrainingStep a = build(0);
  ModelConfig wider = config;
  wider.moe_ffn_hidden_size += 4;
  const TrainingStep b =
      build_training_step(wider, state_of(wider, 1), {.micro_batches = 2, .sequence = 12});
  EXPECT_NE(refusal(*a.program, *b.program), "");
  EXPECT_NE(hash_collectives(*a.program), hash_collectives(*b.program));
}

}  // namespace
}  // namespace troupe::testing
