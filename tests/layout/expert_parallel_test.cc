// Expert parallelism computes what one rank computes, with every dispatcher: loss, every gradient,
// loads, gradient norm and the state after three updates, put together from the ranks' slices,
// agree with those of one rank that runs the same micro-batches; nothing but the order of sums
// differs. The dispatchers agree with each other to the bit, in every dtype, except the
// hierarchical one, which sums on each node first.
#include <cmath>
#include <functional>
#include <gtest/gtest.h>
#include <map>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "comm/thread_group.h"
#include "parallel/rank_communicators.h"
#include "runtime/cpu/cpu_interpreter.h"
#include "support/adamw_state.h"
#include "support/slice_elements.h"
#include "train/train_test_support.h"

namespace troupe::testing {
namespace {

constexpr int64_t kSteps = 3;
constexpr int32_t kSequence = 12;
// f64 and sums of some thousand terms: rounding is about 1e-13 of the largest term. The promise of
// the project is 1e-10.
constexpr double kTolerance = 1e-10;
// A busy machine may hold a rank up for seconds.
constexpr std::chrono::milliseconds kPatient{60'000};

constexpr TokenDispatcher kDispatchers[] = {TokenDispatcher::allgather, TokenDispatcher::alltoall,
                                            TokenDispatcher::flex};

// Which experts the tokens use.
enum class Choice : uint8_t {
  routers,     // what the router likes
  first_half,  // the second half of the experts gets nothing
  last_one,    // k = 1: all tokens go to one expert
};

struct Case {
  std::string name;
  ModelConfig config;
  int32_t ranks = 2;
  int32_t ep = 2;
  int32_t etp = 1;
  int32_t micro_batches = 1;
  Choice choice = Choice::routers;
  std::string order = std::string(kDefaultRankOrder);
  int32_t node_ranks = 0;  // 0: tokens reach their experts in one step
};

void PrintTo(const Case& c, std::ostream* out) {
  *out << c.name;
}

int32_t choose(Choice choice, const ModelConfig& config, int64_t token, int32_t slot) {
  const int32_t experts = config.num_experts;
  if (choice == Choice::last_one) return experts - 1;
  return static_cast<int32_t>((token * 7 + slot) % (experts / 2));
}

// One rank of a layout: its slices, its program, its interpreter.
class RankRun {
 public:
  RankRun(const Case& c, const ModelPart& part, DType dtype, TokenDispatcher dispatcher,
          int32_t micro_batches, bool oracle, const Communicators& communicators)
      : case_(c),
        dp_(part.layout().dp()),
        dp_rank_(part.dense().dp),
        pool_(1 + part.rank % 2),
        state(declare_model_state(c.config, dtype, /*trained=*/true, part)),
        step(build_training_step(
            c.config, state,
            {.micro_batch_size = 1,
             .micro_batches = micro_batches,
             .sequence = kSequence,
             .seed = 1,
             .routing_trace =
                 c.choice == Choice::routers ? RoutingTrace::none : RoutingTrace::replayed,
             .dispatcher = dispatcher})),
        storage(state.table),
        interpreter_(*step.program, plan(*step.program, pool_.threads(), oracle), storage, pool_,
                     communicators) {
    for (const Parameter& parameter : state.parameters) {
      for (const StateId id : {parameter.value, parameter.master}) {
        if (id.valid()) initialize(parameter, storage.view(id));
      }
    }
    *interpreter_.view(step.learning_rate).as<double>() = 1e-3;
    *interpreter_.view(step.weight_decay).as<double>() = 0.1;
    for (const auto& layers : step.selected) {
      for (const ValueId selected : layers) {
        if (selected.valid()) write_choice(interpreter_.view(selected));
      }
    }
  }

  void update(int64_t number) {
    for (size_t i = 0; i < step.micro_batches.size(); ++i) {
      const auto size = static_cast<int64_t>(step.micro_batches.size());
      const int64_t first = number * size * dp_;
      write_sample(step.micro_batches[i], first + static_cast<int64_t>(i) * dp_ + dp_rank_);
    }
    *interpreter_.view(step.update_number).as<int64_t>() = number;
    if (step.step_number.valid()) *interpreter_.view(step.step_number).as<int64_t>() = number;
    interpreter_.run();
  }

  // What every rank has alike.
  std::map<std::string, std::vector<double>> metrics() const {
    std::map<std::string, std::vector<double>> values;
    values["loss"] = elements(interpreter_.view(step.loss));
    values["grad_norm"] = elements(interpreter_.view(step.grad_norm));
    for (const LayerMetrics& layer : step.layers) {
      const std::string at = "layer " + std::to_string(layer.layer) + " ";
      values[at + "counts"] = elements(interpreter_.view(layer.counts));
      values[at + "entropy"] = elements(interpreter_.view(layer.entropy));
      for (const LayerMetrics::Loss& loss : layer.losses) {
        values[at + std::string(name_of(loss.kind))] = elements(interpreter_.view(loss.value));
      }
    }
    return values;
  }

 private:
  const Case& case_;
  const int32_t dp_;
  const int32_t dp_rank_;
  ThreadPool pool_;

 public:
  ModelState state;
  TrainingStep step;
  StateStorage storage;

 private:
  static MemoryPlan plan(const Program& program, int threads, bool oracle) {
    verify_program(program);
    return oracle ? plan_oracle(program, threads) : plan_memory(program, threads);
  }

  static void initialize(const Parameter& parameter, const TensorView& view) {
    for_each_element(parameter, [&](int64_t here, int64_t whole) {
      set_element(view, here, initial_value(parameter, 1, whole));
    });
  }

  void write_choice(const TensorView& selected) const {
    const auto top_k = static_cast<int32_t>(selected.shape[1]);
    for (int64_t token = 0; token < selected.shape[0]; ++token) {
      for (int32_t slot = 0; slot < top_k; ++slot) {
        selected.as<int32_t>()[token * top_k + slot] =
            choose(case_.choice, case_.config, token, slot);
      }
    }
  }

  void write_sample(const BatchValues& batch, int64_t sample) const {
    const auto vocabulary = static_cast<uint64_t>(case_.config.vocab_size);
    const auto draw = [&](uint32_t what, int64_t position) {
      return static_cast<int32_t>(random_below(vocabulary, 1, RandomStream::test, what,
                                               static_cast<uint64_t>(sample * 100 + position)));
    };
    for (int32_t i = 0; i < batch.sequence; ++i) {
      interpreter_.view(batch.tokens).as<int32_t>()[i] = draw(0, i);
      interpreter_.view(batch.labels).as<int32_t>()[i] = draw(1, i);
      set_element(interpreter_.view(batch.mask), i, i % 5 == 3 ? 0.0 : 1.0);
    }
  }

  CpuInterpreter interpreter_;
};

// What the steps leave behind: metrics, and whole tensors put together from all ranks' slices.
struct Outcome {
  std::map<std::string, std::vector<double>> values;
  std::vector<std::vector<std::string>> states;  // by rank: bytes of the state after the last step
};

// Where several ranks hold an element, all must have the same bits.
void record_tensors(const std::vector<std::unique_ptr<RankRun>>& runs, const std::string& prefix,
                    const std::function<StateId(const Parameter&)>& which, Outcome& outcome) {
  for (const auto& run : runs) {
    for (const Parameter& parameter : run->state.parameters) {
      const std::string name = prefix + (*run->state.table)[parameter.value].name;
      const TensorView view = run->storage.view(which(parameter));
      std::vector<double>& whole = outcome.values[name];
      whole.resize(static_cast<size_t>(parameter.whole_shape.elements()), std::nan(""));
      for_each_element(parameter, [&](int64_t here, int64_t at) {
        double& element_of_whole = whole[static_cast<size_t>(at)];
        const double value = element(view, here);
        ASSERT_TRUE(std::isnan(element_of_whole) || element_of_whole == value)
            << name << " element " << at << ": the ranks that hold it differ";
        element_of_whole = value;
      });
    }
  }
}

ModelPart part_of(const Case& c, int32_t rank) {
  LayoutOptions options;
  options.world_size = c.ranks;
  options.expert_parallel = c.ep;
  options.expert_tensor_parallel = c.etp;
  options.order = c.order;
  options.dispatch_node_ranks = c.node_ranks;
  return {.run = std::make_shared<const RunLayout>(RunLayout{
              .layout = Layout(options),
              .partition = even_partition(c.config.num_layers, 1, 1, StagePlacement::loop).value(),
              .schedule = {}}),
          .rank = rank};
}

Case on_one_rank(Case c) {
  c.micro_batches *= c.ranks;
  c.ranks = 1;
  c.ep = 1;
  c.etp = 1;
  c.node_ranks = 0;
  return c;
}

// The same on nodes of some of the ranks that share the experts, all sizes that are allowed.
std::vector<Case> on_nodes(const Case& c) {
  std::vector<Case> all;
  for (Case each = c; each.node_ranks < c.ep * c.etp; ++each.node_ranks) {
    const LayoutOptions options{.world_size = c.ranks,
                                .expert_parallel = c.ep,
                                .expert_tensor_parallel = c.etp,
                                .dispatch_node_ranks = each.node_ranks,
                                .order = c.order};
    if (each.node_ranks > 0 && try_layout(options).refusal() == nullptr) all.push_back(each);
  }
  return all;
}

Outcome run_case(const Case& c, DType dtype, TokenDispatcher dispatcher, int64_t steps = kSteps,
                 bool oracle = false) {
  ThreadGroup group(c.ranks, kPatient);
  std::vector<std::unique_ptr<RankRun>> runs;
  for (int32_t rank = 0; rank < c.ranks; ++rank) {
    const ModelPart part = part_of(c, rank);
    runs.push_back(std::make_unique<RankRun>(c, part, dtype, dispatcher, c.micro_batches, oracle,
                                             communicators_of(group, part.layout(), rank)));
  }
  Outcome outcome;
  for (int64_t number = 1; number <= steps; ++number) {
    run_ranks(group, [&](int rank) { runs[static_cast<size_t>(rank)]->update(number); });
    const std::string step = "step " + std::to_string(number) + " ";
    for (const auto& run : runs) {
      for (const auto& [name, values] : run->metrics()) {
        const auto [at, is_new] = outcome.values.emplace(step + name, values);
        EXPECT_EQ(at->second, values) << step << name << ": the ranks differ";
      }
    }
    record_tensors(
        runs, step + "gradient of ", [](const Parameter& p) { return p.gradient; }, outcome);
  }
  record_tensors(
      runs, "after it ", [](const Parameter& p) { return p.value; }, outcome);
  record_tensors(
      runs, "moment of ", [](const Parameter& p) { return exp_avg_sq_of(p).values; }, outcome);
  for (const auto& run : runs) {
    outcome.states.push_back(state_bytes(run->storage));
    for (const StateId id : run->state.expert_biases) {
      if (!id.valid()) continue;
      outcome.values["after it " + (*run->state.table)[id].name] = elements(run->storage.view(id));
    }
  }
  return outcome;
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

std::vector<Case> cases() {
  ModelConfig plain = trained_model();
  plain.num_experts = 8;
  plain.moe_aux_loss_coeff = 0;
  plain.moe_z_loss_coeff = 0;

  std::vector<Case> all;
  for (const int32_t top_k : {1, 2, 4}) {
    ModelConfig config = plain;
    config.moe_router_topk = top_k;
    config.moe_router_pre_softmax = top_k == 1;
    const std::string k = "_top" + std::to_string(top_k);
    all.push_back({.name = "ep2" + k, .config = config, .ranks = 2, .ep = 2});
    all.push_back({.name = "ep4" + k, .config = config, .ranks = 4, .ep = 4});
    all.push_back({.name = "ep8" + k, .config = config, .ranks = 8, .ep = 8});
    all.push_back({.name = "etp2" + k, .config = config, .ranks = 2, .ep = 1, .etp = 2});
    all.push_back({.name = "ep2_etp2" + k, .config = config, .ranks = 4, .ep = 2, .etp = 2});
    all.push_back(
        {.name = "ep2_edp2" + k, .config = config, .ranks = 4, .ep = 2, .micro_batches = 2});
    all.push_back({.name = "ep2_etp2_edp2" + k, .config = config, .ranks = 8, .ep = 2, .etp = 2});
    all.push_back({.name = "ep2_etp2_ep_first" + k,
                   .config = config,
                   .ranks = 4,
                   .ep = 2,
                   .etp = 2,
                   .order = "ep-tp-cp-dp-pp"});
  }
  // Nodes of two ranks have slices of one expert here, or all experts of one slice and of two.
  for (const char* order : {"tp-ep-cp-dp-pp", "ep-tp-cp-dp-pp"}) {
    all.push_back({.name = std::string("ep2_etp4_") + (*order == 'e' ? "ep_first" : "etp_first"),
                   .config = plain,
                   .ranks = 8,
                   .ep = 2,
                   .etp = 4,
                   .order = order});
  }
  const auto add = [&](const std::string& name, const ModelConfig& config) {
    all.push_back(
        {.name = name + "_ep4", .config = config, .ranks = 4, .ep = 4, .micro_batches = 2});
    if (config.add_bias_linear) return;
    all.push_back({.name = name + "_ep2_etp2", .config = config, .ranks = 4, .ep = 2, .etp = 2});
  };

  all.push_back({.name = "half_of_the_ranks_idle",
                 .config = plain,
                 .ranks = 4,
                 .ep = 4,
                 .choice = Choice::first_half});
  all.push_back({.name = "half_of_the_ranks_idle_etp2",
                 .config = plain,
                 .ranks = 4,
                 .ep = 2,
                 .etp = 2,
                 .choice = Choice::first_half});
  ModelConfig single = plain;
  single.moe_router_topk = 1;
  single.moe_router_pre_softmax = true;
  all.push_back({.name = "one_expert_for_all",
                 .config = single,
                 .ranks = 4,
                 .ep = 4,
                 .choice = Choice::last_one});

  ModelConfig losses = plain;
  losses.moe_aux_loss_coeff = 0.5;
  losses.moe_z_loss_coeff = 0.1;
  losses.moe_global_aux_loss_coeff = 0.2;
  losses.moe_seq_aux_loss_coeff = 0.3;
  add("all_losses", losses);

  ModelConfig shared = plain;
  shared.moe_shared_expert_intermediate_size = 28;
  shared.moe_shared_expert_gate = true;
  add("shared_expert", shared);

  ModelConfig biases = plain;
  biases.add_bias_linear = true;
  add("biases", biases);

  ModelConfig expert_bias = plain;
  expert_bias.moe_router_score_function = ScoreFunction::sigmoid;
  expert_bias.moe_router_enable_expert_bias = true;
  expert_bias.moe_router_bias_update_rate = 0.05;
  add("expert_bias", expert_bias);

  // The ranks' micro-batches are those of one rank, and so is what each of them drops.
  ModelConfig drops = plain;
  drops.moe_expert_capacity_factor = 0.75;
  add("drops", drops);

  ModelConfig padded = drops;
  padded.moe_pad_expert_input_to_capacity = true;
  padded.moe_token_drop_policy = DropPolicy::position;
  add("padded", padded);

  ModelConfig multiple = plain;
  multiple.moe_expert_row_multiple = 8;
  add("row_multiple", multiple);

  ModelConfig random = losses;
  random.hidden_dropout = 0.2;
  random.moe_input_jitter_eps = 0.1;
  add("dropout_jitter", random);

  ModelConfig first_dense = plain;
  first_dense.num_layers = 3;
  first_dense.moe_layers = {false, true, true};
  first_dense.ffn_hidden_size = 40;
  first_dense.tie_embeddings = true;
  add("first_dense_tied", first_dense);
  return all;
}

class ExpertParallel : public ::testing::TestWithParam<Case> {};

TEST_P(ExpertParallel, EqualsOneRank) {
  const Case& c = GetParam();
  SCOPED_TRACE("to reproduce: layout_tests --gtest_filter='*ExpertParallel.EqualsOneRank/" +
               c.name + "'");
  const Outcome one = run_case(on_one_rank(c), DType::f64, TokenDispatcher::allgather);
  expect_close(one, run_case(c, DType::f64, TokenDispatcher::allgather));
}

TEST_P(ExpertParallel, EqualsOneRankWhereTokensGoFromNodeToNode) {
  const Case& c = GetParam();
  const Outcome one = run_case(on_one_rank(c), DType::f64, TokenDispatcher::allgather, 1);
  const std::vector<Case> cases = on_nodes(c);
  ASSERT_FALSE(cases.empty());
  for (const Case& each : cases) {
    SCOPED_TRACE("nodes of " + std::to_string(each.node_ranks));
    expect_close(one, run_case(each, DType::f64, TokenDispatcher::hierarchical, 1));
  }
}

// One update is enough: it has the bits of every gradient and of what is made of them.
TEST_P(ExpertParallel, HasTheSameBitsWithEveryDispatcher) {
  const Case& c = GetParam();
  SCOPED_TRACE("to reproduce: layout_tests --gtest_filter='*ExpertParallel.*Bits*/" + c.name + "'");
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    const Outcome expected = run_case(c, dtype, TokenDispatcher::allgather, 1);
    for (const TokenDispatcher dispatcher : kDispatchers) {
      if (dispatcher == TokenDispatcher::allgather) continue;
      SCOPED_TRACE(std::string(name_of(dispatcher)) + " in " + std::string(name_of(dtype)));
      const Outcome found = run_case(c, dtype, dispatcher, 1);
      ASSERT_EQ(found.values, expected.values);
      ASSERT_EQ(found.states, expected.states);
    }
  }
}

// The oracle reuses no memory, and fills what is dead with NaN: from the second step on, rows that
// no rank sent are NaN.
TEST(ExpertParallelMemory, PlannedRunsEqualTheOracle) {
  for (const Case& c : cases()) {
    if (c.name != "ep2_etp2_edp2_top2" && c.name != "half_of_the_ranks_idle" &&
        c.name != "biases_ep4") {
      continue;
    }
    for (const TokenDispatcher dispatcher :
         {TokenDispatcher::allgather, TokenDispatcher::alltoall, TokenDispatcher::flex,
          TokenDispatcher::hierarchical}) {
      SCOPED_TRACE(c.name + " " + std::string(name_of(dispatcher)));
      Case each = c;
      if (dispatcher == TokenDispatcher::hierarchical) each.node_ranks = 2;
      const Outcome expected = run_case(each, DType::f32, dispatcher, kSteps, /*oracle=*/true);
      const Outcome found = run_case(each, DType::f32, dispatcher);
      ASSERT_EQ(found.values, expected.values);
      ASSERT_EQ(found.states, expected.states);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, ExpertParallel, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace troupe::testing
