// Pipelines compute what one rank computes: loss, every gradient, auxiliary losses, loads, gradient
// norm, and the state after three updates agree with those of one rank that runs the same
// micro-batches one after the other. Nothing but the order of sums differs.
#include <cmath>
#include <gtest/gtest.h>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "comm/thread_group.h"
#include "model/parameter_layout.h"
#include "parallel/collective_schedule.h"
#include "parallel/rank_communicators.h"
#include "passes/inference_programs.h"
#include "runtime/cpu/cpu_interpreter.h"
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

struct Pipeline {
  std::string name;
  PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
  int32_t ranks = 2;
  int32_t chunks = 1;
  std::string stages = {};  // spelt out; empty: even
  int32_t micro_batches = 4;
  int32_t replicas = 1;  // pipelines side by side
  int32_t group_size = 0;
};

struct Model {
  std::string name;
  ModelConfig config;
};

struct Case {
  Model model;
  Pipeline pipeline;
};

// Keeps GoogleTest from printing a case's bytes.
void PrintTo(const Case& c, std::ostream* out) {
  *out << c.model.name << " on " << c.pipeline.name;
}

std::string name_of(const Case& c) {
  return c.model.name + "_" + c.pipeline.name + "_m" + std::to_string(c.pipeline.micro_batches);
}

std::shared_ptr<const RunLayout> run_layout(const ModelConfig& config, const Pipeline& pipeline) {
  PipelineShape shape{.schedule = pipeline.schedule,
                      .ranks = pipeline.ranks,
                      .chunks = pipeline.chunks,
                      .micro_batches = pipeline.micro_batches,
                      .group_size = pipeline.group_size};
  PipelinePartition partition =
      pipeline.stages.empty()
          ? even_partition(config.num_layers, pipeline.ranks, pipeline.chunks, shape.placement())
                .value()
          : parse_partition(pipeline.stages, config.num_layers, /*mtp_layers=*/0, pipeline.ranks,
                            shape.placement())
                .value();
  shape.chunks = partition.chunks;
  LayoutOptions options;
  options.world_size = pipeline.ranks * pipeline.replicas;
  options.pipeline_parallel = pipeline.ranks;
  options.sequence_parallel = config.num_experts > 0;
  options.embedding_places = partition.embedding_ranks(config.tie_embeddings);
  Layout layout(options);
  EXPECT_FALSE(check_layout(config, layout, 12));
  return std::make_shared<const RunLayout>(
      RunLayout{std::move(layout), std::move(partition), shape});
}

MemoryPlan plan(const Program& program, const ThreadPool& pool, bool oracle) {
  verify_program(program);
  MemoryPlan plan =
      oracle ? plan_oracle(program, pool.threads()) : plan_memory(program, pool.threads());
  verify_memory_plan(program, plan);
  return plan;
}

// Stages hold whole parameters.
void set_initial_weights(const ModelState& state, const StateStorage& storage) {
  for (const Parameter& parameter : state.parameters) {
    const TensorView view = storage.view(parameter.value);
    for (int64_t i = 0; i < view.shape.elements(); ++i) {
      set_element(view, i, initial_value(parameter, /*seed=*/1, i));
    }
  }
}

// The same samples are the same tokens, wherever they are put.
void write(const BatchValues& batch, int64_t first_sample, const ModelConfig& config,
           const CpuInterpreter& interpreter) {
  const auto vocabulary = static_cast<uint64_t>(config.vocab_size);
  for (int64_t i = 0; i < int64_t{batch.batch} * batch.sequence; ++i) {
    const auto position = static_cast<uint64_t>(first_sample * batch.sequence + i);
    const auto draw = [&](uint32_t what) {
      return static_cast<int32_t>(random_below(vocabulary, 1, RandomStream::test, what, position));
    };
    if (batch.tokens.valid()) interpreter.view(batch.tokens).as<int32_t>()[i] = draw(0);
    if (!batch.labels.valid()) continue;
    interpreter.view(batch.labels).as<int32_t>()[i] = draw(1);
    set_element(interpreter.view(batch.mask), i, i % 5 == 3 ? 0.0 : 1.0);
  }
}

// One rank of a run, ready to step.
class RankRun {
 public:
  RankRun(const ModelConfig& model, std::shared_ptr<const RunLayout> layout, int32_t rank,
          int32_t micro_batches, const Communicators& communicators, bool oracle = false)
      : config(model),
        pool(1 + rank % 2),
        state(declare_model_state(config, DType::f64, /*trained=*/true, {layout, rank})),
        step(build_training_step(
            config, state,
            {.micro_batch_size = 2, .micro_batches = micro_batches, .sequence = 12, .seed = 1})),
        storage(state.table),
        interpreter(*step.program, plan(*step.program, pool, oracle), storage, pool,
                    communicators) {
    set_initial_weights(state, storage);
    *interpreter.view(step.learning_rate).as<double>() = 1e-3;
    *interpreter.view(step.weight_decay).as<double>() = 0.1;
  }

  void run(int64_t number) {
    *interpreter.view(step.update_number).as<int64_t>() = number;
    if (step.step_number.valid()) {
      *interpreter.view(step.step_number).as<int64_t>() = number;
    }
    const Layout& layout = state.part.layout();
    const auto micro_batches = static_cast<int64_t>(step.micro_batches.size());
    for (int64_t i = 0; i < micro_batches; ++i) {
      const int64_t in_step = i * layout.dp() + state.part.dense().dp;
      write(step.micro_batches[static_cast<size_t>(i)],
            2 * (number * micro_batches * layout.dp() + in_step), config, interpreter);
    }
    interpreter.run();
  }

  ModelConfig config;
  ThreadPool pool;
  ModelState state;
  TrainingStep step;
  StateStorage storage;
  CpuInterpreter interpreter;
};

using Outcome = std::map<std::string, std::vector<double>>;

void record(const RankRun& run, int64_t number, Outcome& outcome) {
  const std::string step = "step " + std::to_string(number) + " ";
  const auto keep = [&](const std::string& name, ValueId id) {
    outcome[step + name] = elements(run.interpreter.view(id));
  };
  keep("loss", run.step.loss);
  keep("grad_norm", run.step.grad_norm);
  for (const LayerMetrics& layer : run.step.layers) {
    const std::string at = "layer " + std::to_string(layer.layer) + " ";
    keep(at + "counts", layer.counts);
    keep(at + "entropy", layer.entropy);
    for (const LayerMetrics::Loss& loss : layer.losses) {
      keep(at + std::string(troupe::name_of(loss.kind)), loss.value);
    }
  }
  for (const Parameter& parameter : run.state.parameters) {
    const std::string& name = (*run.state.table)[parameter.value].name;
    outcome[step + "gradient of " + name] = elements(run.storage.view(parameter.gradient));
    if (number < kSteps) continue;
    for (const StateId id :
         {parameter.value, exp_avg_of(parameter).values, exp_avg_sq_of(parameter).values}) {
      outcome["after it " + (*run.state.table)[id].name] = elements(run.storage.view(id));
    }
  }
  for (const StateId id : run.state.expert_biases) {
    if (!id.valid()) continue;
    outcome[step + "after it " + (*run.state.table)[id].name] = elements(run.storage.view(id));
  }
}

Outcome run_steps(RankRun& run) {
  Outcome outcome;
  for (int64_t number = 1; number <= kSteps; ++number) {
    run.run(number);
    EXPECT_EQ(*run.interpreter.view(run.step.skipped).as<int32_t>(), 0);
    record(run, number, outcome);
  }
  return outcome;
}

// By rank.
std::vector<Outcome> run_pipeline(const Model& model, const Pipeline& pipeline,
                                  bool oracle = false) {
  const auto layout = run_layout(model.config, pipeline);
  const int32_t world = layout->layout.world_size();
  ThreadGroup group(world, kPatient);
  std::vector<std::unique_ptr<RankRun>> runs;
  std::vector<const Program*> programs;
  for (int32_t rank = 0; rank < world; ++rank) {
    runs.push_back(std::make_unique<RankRun>(model.config, layout, rank, pipeline.micro_batches,
                                             communicators_of(group, layout->layout, rank),
                                             oracle));
    programs.push_back(runs.back()->step.program.get());
  }
  verify_collectives(programs, layout->layout);
  std::vector<Outcome> outcomes(static_cast<size_t>(world));
  run_ranks(group, [&](int rank) {
    outcomes[static_cast<size_t>(rank)] = run_steps(*runs[static_cast<size_t>(rank)]);
  });
  return outcomes;
}

// In units of the largest element: the elements of one tensor are sums of like terms.
void expect_close(const std::vector<double>& expected, const std::vector<double>& found,
                  const std::string& name) {
  ASSERT_EQ(found.size(), expected.size()) << name;
  double largest = 0;
  for (const double value : expected) largest = std::max(largest, std::abs(value));
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_NEAR(found[i], expected[i], kTolerance * largest) << name << " element " << i;
  }
}

class PipelineRuns : public ::testing::TestWithParam<Case> {};

TEST_P(PipelineRuns, EqualOneRank) {
  const auto& [model, pipeline] = GetParam();
  SCOPED_TRACE("to reproduce: layout_tests --gtest_filter='*EqualOneRank/" + name_of(GetParam()) +
               "'");
  RankRun single(model.config,
                 std::make_shared<const RunLayout>(layout_of_one_rank(model.config.num_layers)), 0,
                 pipeline.micro_batches * pipeline.replicas, {});
  const Outcome one = run_steps(single);

  std::map<std::string, bool> seen;
  const std::vector<Outcome> outcomes = run_pipeline(model, pipeline);
  for (size_t rank = 0; rank < outcomes.size(); ++rank) {
    SCOPED_TRACE("rank " + std::to_string(rank));
    for (const auto& [name, found] : outcomes[rank]) {
      ASSERT_TRUE(one.contains(name)) << name;
      expect_close(one.at(name), found, name);
      if (HasFatalFailure()) return;
      seen[name] = true;
    }
  }
  for (const auto& [name, expected] : one) EXPECT_TRUE(seen[name]) << "on no rank: " << name;
}

std::vector<Model> models() {
  ModelConfig dense = dense_model(8);
  dense.tie_embeddings = false;

  ModelConfig tied = dense_model(8);

  ModelConfig layer_norm = dense;
  layer_norm.normalization = Normalization::layer_norm;
  layer_norm.add_bias_linear = true;
  layer_norm.hidden_dropout = 0.1;
  layer_norm.attention_dropout = 0.1;

  ModelConfig moe = moe_model(8);
  moe.moe_aux_loss_coeff = 0.5;
  moe.moe_z_loss_coeff = 0.1;
  moe.moe_seq_aux_loss_coeff = 0.2;
  moe.moe_global_aux_loss_coeff = 0.3;
  moe.moe_shared_expert_intermediate_size = 28;
  moe.hidden_dropout = 0.1;
  moe.moe_input_jitter_eps = 0.1;

  ModelConfig expert_bias = moe_model(8);
  expert_bias.tie_embeddings = true;
  expert_bias.moe_layers.assign(8, true);
  expert_bias.moe_layers[0] = expert_bias.moe_layers[5] = false;
  expert_bias.ffn_hidden_size = 40;
  expert_bias.moe_aux_loss_coeff = 0;
  expert_bias.moe_z_loss_coeff = 0;
  expert_bias.moe_router_score_function = ScoreFunction::sigmoid;
  expert_bias.moe_router_enable_expert_bias = true;
  expert_bias.moe_router_bias_update_rate = 0.05;
  return {{"dense", dense},
          {"tied", tied},
          {"layer_norm", layer_norm},
          {"moe", moe},
          {"expert_bias_tied", expert_bias}};
}

std::vector<Pipeline> pipelines() {
  using enum PipelineSchedule;
  std::vector<Pipeline> all;
  const auto add = [&](const Pipeline& pipeline, std::initializer_list<int32_t> micro_batches) {
    for (const int32_t count : micro_batches) {
      all.push_back(pipeline);
      all.back().micro_batches = count;
    }
  };
  add({.name = "pp2", .ranks = 2}, {1, 2, 5});
  add({.name = "pp4", .ranks = 4}, {1, 3, 6});
  add({.name = "pp2_dp2", .ranks = 2, .replicas = 2}, {2});
  add({.name = "uneven", .ranks = 4, .stages = "Et|t*3||t*2|t||t|L"}, {8});
  add({.name = "bare_ends", .ranks = 4, .stages = "E|t*5|t*3|L"}, {3});
  add({.name = "interleaved_pp2", .ranks = 2, .chunks = 2}, {2, 4});
  add({.name = "groups_of_3", .ranks = 2, .chunks = 2, .group_size = 3}, {5});
  add({.name = "interleaved_pp4", .ranks = 4, .chunks = 2}, {4, 8});
  add({.name = "zb_h1_pp2", .schedule = zb_h1, .ranks = 2}, {1, 4});
  add({.name = "zb_h1_pp4", .schedule = zb_h1, .ranks = 4}, {2, 6});
  add({.name = "zb_v_pp2", .schedule = zb_v, .ranks = 2, .chunks = 2}, {1, 4});
  add({.name = "zb_v_pp4", .schedule = zb_v, .ranks = 4, .chunks = 2}, {2, 6});
  add({.name = "zb_v_uneven", .schedule = zb_v, .ranks = 2, .chunks = 2, .stages = "Ett|t|t*5|L"},
      {3});
  return all;
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const Model& model : models()) {
    for (const Pipeline& pipeline : pipelines()) all.push_back({model, pipeline});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Schedules, PipelineRuns, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return name_of(info.param); });

// Memory that is used again, and the timing of ranks, leave no trace: the same bits.
TEST(PipelineBits, PlannedRunsEqualTheOracle) {
  const Model moe = models()[3];
  for (const Pipeline& pipeline : pipelines()) {
    SCOPED_TRACE(name_of(Case{moe, pipeline}));
    EXPECT_EQ(run_pipeline(moe, pipeline), run_pipeline(moe, pipeline, /*oracle=*/true));
  }
}

// Programs that only look: forward through all stages, with the result at the last.
class ForwardRun {
 public:
  ForwardRun(const ModelConfig& model, std::shared_ptr<const RunLayout> layout, int32_t rank,
             const Communicators& communicators)
      : config(model),
        pool(1),
        state(declare_model_state(config, DType::f64, /*trained=*/false, {layout, rank})),
        storage(state.table),
        evaluation(build_evaluation_step(config, state, /*batch=*/2, /*sequence=*/12)),
        logits(build_logits_step(config, state, 2, 12, /*with_loss=*/true, RoutingTrace::recorded)),
        evaluator(*evaluation.program, plan(*evaluation.program, pool, false), storage, pool,
                  communicators),
        reader(*logits.program, plan(*logits.program, pool, false), storage, pool, communicators) {
    set_initial_weights(state, storage);
  }

  void run() {
    write(evaluation.batch, 0, config, evaluator);
    write(logits.batch, 0, config, reader);
    evaluator.run();
    reader.run();
  }

  Outcome outcome() const {
    Outcome outcome;
    outcome["loss"] = elements(evaluator.view(evaluation.loss));
    outcome["loss beside the logits"] = elements(reader.view(logits.loss));
    for (const LayerMetrics& layer : evaluation.layers) {
      const std::string at = "layer " + std::to_string(layer.layer) + " ";
      outcome[at + "counts"] = elements(evaluator.view(layer.counts));
      outcome[at + "entropy"] = elements(evaluator.view(layer.entropy));
    }
    for (size_t layer = 0; layer < logits.selected.size(); ++layer) {
      if (!logits.selected[layer].valid()) continue;
      const TensorView view = reader.view(logits.selected[layer]);
      std::vector<double>& selected = outcome["selected in " + std::to_string(layer)];
      for (int64_t i = 0; i < view.shape.elements(); ++i) {
        selected.push_back(view.as<int32_t>()[i]);
      }
    }
    if (logits.logits.valid()) outcome["logits"] = elements(reader.view(logits.logits));
    return outcome;
  }

  ModelConfig config;
  ThreadPool pool;
  ModelState state;
  StateStorage storage;
  InferenceStep evaluation;
  InferenceStep logits;
  CpuInterpreter evaluator;
  CpuInterpreter reader;
};

TEST(PipelineForward, EqualsOneRank) {
  const ModelConfig config = models()[3].config;
  ForwardRun single(
      config, std::make_shared<const RunLayout>(layout_of_one_rank(config.num_layers)), 0, {});
  single.run();
  const Outcome one = single.outcome();
  for (const Pipeline& pipeline : pipelines()) {
    if (pipeline.replicas > 1) continue;  // all would evaluate the same samples here
    SCOPED_TRACE(pipeline.name);
    const auto layout = run_layout(config, pipeline);
    ThreadGroup group(pipeline.ranks, kPatient);
    std::vector<std::unique_ptr<ForwardRun>> runs;
    std::vector<const Program*> evaluations;
    std::vector<const Program*> readings;
    for (int32_t rank = 0; rank < pipeline.ranks; ++rank) {
      runs.push_back(std::make_unique<ForwardRun>(config, layout, rank,
                                                  communicators_of(group, layout->layout, rank)));
      evaluations.push_back(runs.back()->evaluation.program.get());
      readings.push_back(runs.back()->logits.program.get());
    }
    verify_collectives(evaluations, layout->layout);
    verify_collectives(readings, layout->layout);
    run_ranks(group, [&](int rank) { runs[static_cast<size_t>(rank)]->run(); });
    // What is measured adds up over the ranks; what is chosen and read is on one of them.
    Outcome all;
    for (const auto& run : runs) {
      for (const auto& [name, found] : run->outcome()) {
        const auto [place, is_new] = all.emplace(name, found);
        if (is_new) continue;
        for (size_t i = 0; i < found.size(); ++i) place->second[i] += found[i];
      }
    }
    ASSERT_EQ(all.size(), one.size()) << "something is on no rank";
    for (const auto& [name, found] : all) {
      ASSERT_TRUE(one.contains(name)) << name;
      expect_close(one.at(name), found, name);
    }
  }
}

// The programs of all ranks, not run.
class PipelinePrograms : public ::testing::Test {
 protected:
  void SetUp() override {
    for (int32_t rank = 0; rank < pipeline.ranks; ++rank) {
      states.push_back(declare_model_state(config, DType::f32, /*trained=*/true, {layout, rank}));
      programs.push_back(
          build_training_step(config, states.back(),
                              {.micro_batches = pipeline.micro_batches, .sequence = 12})
              .program);
    }
  }

  std::string refusal() const {
    std::vector<const Program*> all;
    for (const auto& program : programs) all.push_back(program.get());
    try {
      verify_collectives(all, layout->layout);
    } catch (const UserError& error) {
      EXPECT_EQ(error.status(), ExitStatus::does_not_fit);
      return error.what();
    }
    return {};
  }

  const ModelConfig config = models()[4].config;  // tied: copies of the embedding
  const Pipeline pipeline{.name = "pp4", .ranks = 4, .chunks = 2, .micro_batches = 4};
  const std::shared_ptr<const RunLayout> layout = run_layout(config, pipeline);
  std::vector<ModelState> states;
  std::vector<std::unique_ptr<Program>> programs;
};

TEST_F(PipelinePrograms, WithOneMessageOrCollectiveLeftOutAreRefused) {
  EXPECT_EQ(refusal(), "");
  for (auto& program : programs) {
    const Program whole = *program;
    for (int32_t left_out = 0; left_out < whole.op_count(); ++left_out) {
      if (whole.op(left_out).spec->group == nullptr) continue;
      std::vector<int32_t> order;
      for (int32_t i = 0; i < whole.op_count(); ++i) {
        if (i != left_out) order.push_back(i);
      }
      program->select_ops(order);
      EXPECT_NE(refusal(), "") << "without operation " << left_out;
      *program = whole;
    }
  }
}

// Sends are not all put off to the end of the step: their memory would be kept until then.
TEST_F(PipelinePrograms, FinishSendsDuringTheStep) {
  for (const auto& program : programs) {
    int open = 0;
    int most = 0;
    for (int32_t i = 0; i < program->op_count(); ++i) {
      const std::string_view kind = program->op(i).spec->name;
      if (kind == "send") most = std::max(most, ++open);
      if (kind == "finish_send") --open;
    }
    EXPECT_EQ(open, 0);
    EXPECT_LE(most, 5) << "of 14 or 16 sends";
  }
}

}  // namespace
}  // namespace troupe::testing
