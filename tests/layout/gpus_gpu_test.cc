// Several ranks on GPUs: what operations between ranks compute is what the CPU's communicators
// compute, bit by bit; whole training steps in all kinds of layouts are those of one rank on a CPU,
// and have the same bits when they run again and when they are captured as graphs.
//
// The ranks are spread over the GPUs that there are. Where several share one they wait for each
// other on it; what CUDA must know for that is set before it starts. Through NCCL, which needs a
// GPU for each rank, the same is done again where there are as many.
#include "cuda/gpu.h"

#include <array>
#include <cstdlib>
#include <filesystem>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "base/random.h"
#include "comm/thread_group.h"
#include "io/hf_config.h"
#include "ops/emit_collective.h"
#include "ops/exchange/all_gather/all_gather.h"
#include "ops/exchange/all_reduce/all_reduce.h"
#include "ops/exchange/clone_experts/clone_experts.h"
#include "ops/exchange/exchange_heads/exchange_heads.h"
#include "ops/exchange/exchange_rows/exchange_rows.h"
#include "ops/exchange/prefix_sum/prefix_sum.h"
#include "ops/exchange/push_rows/push_rows.h"
#include "ops/exchange/reduce_scatter/reduce_scatter.h"
#include "ops/exchange/sum_over_ranks/sum_over_ranks.h"
#include "ops/optimizer/shards/shards.h"
#include "ops/routing/clone_placement/clone_placement.h"
#include "ops/routing/dispatch_plan/dispatch_plan.h"
#include "program/verify.h"
#include "runtime/device_memory.h"
#include "runtime/make_interpreter.h"
#include "support/coded_weights.h"
#include "support/context_run.h"
#include "support/distance.h"
#include "support/layout_models.h"
#include "support/layout_run.h"
#include "support/random_layouts.h"
#include "train/verify_reference.h"

namespace troupe::testing {
namespace {

constexpr int kMostStreams = 32;  // CUDA's most

const bool kIsPrepared = [] {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", std::to_string(kMostStreams).c_str(), 1);
  setenv("NCCL_NVLS_ENABLE", "0", 1);
  return true;
}();

// Of tests on streams and of NCCL. Ranks that share a GPU wait for each other on it, and CUDA does
// not promise that all their streams go on at the same time. As in `troupe`, they then have one
// stream each. NCCL does not take them.
#define TROUPE_NEED_GPU_FOR_EACH_OF(ranks)                                        \
  do {                                                                            \
    TROUPE_NEED_GPU();                                                            \
    if (gpu_count() < (ranks)) {                                                  \
      GTEST_SKIP() << (ranks) << " ranks, and " << gpu_count() << " GPU(s) here"; \
    }                                                                             \
  } while (false)

constexpr std::chrono::milliseconds kPatient{10'000};
constexpr std::array kFloats = {DType::f64, DType::f32, DType::bf16};

// A program of one rank that uses every operation between ranks on tensors of several types and
// sizes, some of which are no multiples of anything.
struct CollectivesProgram {
  CollectivesProgram(int ranks, int rank)
      : table(std::make_shared<const StateTable>()), program(table), builder(program) {
    for (const auto& [tokens, width] : {std::pair<int64_t, int64_t>{7, 5}, {130, 256}}) {
      for (const DType dtype : kFloats) {
        add_floats(dtype, tokens, width, ranks, rank);
      }
    }
    add_integers();
    add_reductions();
    verify_program(program);
  }

  void add_floats(DType dtype, int64_t tokens, int64_t width, int ranks, int rank) {
    constexpr RankGroup kGroup = RankGroup::world;
    const ValueId x = input("x", dtype, {tokens, width});
    const ValueId all = input("all", dtype, {tokens * ranks, width});
    result(all_gather(builder, x, {.group = kGroup, .ranks = ranks}, "gathered"));
    result(reduce_scatter(builder, all, {.group = kGroup, .ranks = ranks}, "scattered"));
    result(sum_over_ranks(builder, x, {.group = kGroup}, "summed"));

    // More than the four rows of a token that a kernel reads at once.
    constexpr int kTopK = 7;
    const ValueId indices = input("indices", DType::i32, {tokens, kTopK});
    const DispatchPlan plan = dispatch_plan(builder, indices,
                                            {.experts = 2 * ranks,
                                             .parts = ranks,
                                             .slices = 1,
                                             .part_stride = 1,
                                             .slice_stride = ranks},
                                            "plan");
    const RowExchange exchange = exchange_counts(
        builder, plan, {.group = kGroup, .copies = std::min(ranks, kTopK)}, "offsets");
    result(exchange.offsets);
    const ValueId sent = send_rows(builder, x, exchange, "sent");
    const ValueId chosen = send_rows(builder, indices, exchange, "chosen");
    result(return_rows(builder, sent, exchange, "returned"));
    ragged.push_back({sent, exchange.offsets, ranks});
    ragged.push_back({chosen, exchange.offsets, ranks});
    program.add_result(sent);
    program.add_result(chosen);
    const std::array both = {x, indices};
    const PushedRows pushed = push_rows(builder, both, plan, {.group = kGroup}, "pushed");
    result(pushed.received);
    result(push_rows_back(builder, pushed.rows[0], plan, pushed.received, {.group = kGroup},
                          "pushed_back"));

    const int32_t head_dim = width == 5 ? 5 : 64;
    const ExchangeHeadsAttributes heads{.group = kGroup,
                                        .chunks = {.ranks = ranks, .rank = rank},
                                        .batch = 2,
                                        .sequence = 6 * ranks,
                                        .heads = 2 * ranks,
                                        .groups = ranks,
                                        .head_dim = head_dim};
    const ValueId by_sequence = input("by_sequence", dtype, {2 * 6, int64_t{4} * ranks * head_dim});
    const ValueId by_heads = sequence_to_heads(builder, by_sequence, heads, "by_heads");
    result(by_heads);
    result(heads_to_sequence(builder, by_heads, heads, "by_sequence_again"));
    add_clones(dtype, width, ranks);
  }

  // Two experts on each rank, and copies where the ranks' counts together say.
  void add_clones(DType dtype, int64_t width, int ranks) {
    const ValueId counts = input("rows", DType::i32, {2 * int64_t{ranks}});
    const ValueId loads =
        prefix_sum(builder, counts, {}, {.group = RankGroup::world}, "loads").total;
    const ClonePlacement placement =
        place_clones(builder, loads, {.parts = ranks, .clones = 2}, "placement");
    const CloneExpertsAttributes attributes{.group = RankGroup::world, .ranks = ranks, .own = 2};
    const ValueId weight = input("weight", dtype, {2, 3, width});
    result(placement.experts);
    result(clone_experts(builder, weight, placement.experts, attributes, "copied"));
    if (dtype != accumulation_dtype(dtype)) return;
    const ValueId gradient = input("gradient", dtype, {2, 3, width});
    const ValueId none;
    result(emit_collective(builder, kReturnClones, Attributes(attributes),
                           {gradient, placement.experts, none}, "returned_clones")[0]);
  }

  void add_integers() {
    const ValueId counts = input("counts", DType::i32, {37});
    const ValueId previous = input("previous", DType::i32, {37});
    const PrefixSumResult first =
        prefix_sum(builder, counts, {}, {.group = RankGroup::world}, "first");
    const PrefixSumResult second =
        prefix_sum(builder, counts, previous, {.group = RankGroup::world}, "second");
    for (const ValueId id : {first.running, first.total, second.running, second.total}) result(id);
  }

  // More tensors than one launch takes.
  void add_reductions() {
    std::vector<ValueId> sums;
    std::vector<ValueId> shards;
    for (int i = 0; i < 70; ++i) {
      const DType dtype = std::array{DType::f64, DType::f32, DType::i32}[i % 3];
      sums.push_back(metric(dtype, {i == 3 ? 20'000 : 1 + i, 3 + i % 4}));
      shards.push_back(metric(dtype, {i == 4 ? 20'000 : 1 + i, 3 + i % 4}));
    }
    all_reduce(builder, sums, {.group = RankGroup::world});
    all_reduce(builder, {sums.data() + 5, 8}, {.group = RankGroup::world, .first_row = 2});
    all_reduce(builder, {sums.data() + 40, 8},
               {.group = RankGroup::world, .shard = {.place = 1, .count = 3}});
    const ShardedTensors cut{.cut = shards, .owned = {}, .owners = {}};
    reduce_shards(builder, cut, RankGroup::world);
    gather_shards(builder, cut, RankGroup::world);
    ShardedTensors owned;
    for (size_t i = 0; i < shards.size(); ++i)
      owned.add(shards[i], i % 3 == 0 ? -1 : static_cast<int32_t>(i % 2));
    reduce_shards(builder, owned, RankGroup::world);
    gather_shards(builder, owned, RankGroup::world);
  }

  ValueId input(const std::string& name, DType dtype, const Shape& shape) {
    inputs.push_back(builder.input(name, dtype, shape));
    return inputs.back();
  }
  ValueId metric(DType dtype, const Shape& shape) {
    inputs.push_back(builder.metric("metric", dtype, shape));
    results.push_back(inputs.back());
    return inputs.back();
  }
  void result(ValueId id) {
    program.add_result(id);
    results.push_back(id);
  }

  struct Ragged {
    ValueId rows;
    ValueId counter;
    int element;
  };
  std::shared_ptr<const StateTable> table;
  Program program;
  Builder builder;
  std::vector<ValueId> inputs;
  std::vector<ValueId> results;
  std::vector<Ragged> ragged;
};

void draw_input(const Value& value, const TensorView& view, int ranks, int rank, int number) {
  for (int64_t i = 0; i < view.shape.elements(); ++i) {
    const auto stream = static_cast<uint32_t>(number * ranks + rank);
    const double normal = random_normal(11, RandomStream::test, stream, static_cast<uint64_t>(i));
    switch (view.dtype) {
      case DType::f64:
        view.as<double>()[i] = normal;
        break;
      case DType::f32:
        view.as<float>()[i] = static_cast<float>(normal);
        break;
      case DType::bf16:
        view.as<bf16>()[i] = static_cast<bf16>(static_cast<float>(normal));
        break;
      default:
        view.as<int32_t>()[i] = static_cast<int32_t>(
            random_below(value.name == "indices" ? static_cast<uint32_t>(2 * ranks) : 1000U, 11,
                         RandomStream::test, stream, static_cast<uint64_t>(i)));
    }
  }
}

std::string bytes_of(const TensorView& view, int64_t rows) {
  const auto bytes = static_cast<size_t>(rows * view.shape.row_elements()) * size_of(view.dtype);
  return {static_cast<const char*>(view.data), bytes};
}

// How the GPUs of CollectivesProgram exchange, and whether ranks may share one.
struct CollectivesOn {
  bool nccl = false;
  bool shares_gpu = true;
  bool capture = false;
};

// The bytes of all results, by rank.
std::vector<std::vector<std::string>> run_collectives(int ranks, Device device,
                                                      const CollectivesOn& on = {}) {
  ThreadGroup group(ranks, kPatient);
  std::vector<std::vector<std::string>> outcomes(static_cast<size_t>(ranks));
  run_ranks(group, [&](int rank) {
    CollectivesProgram of_rank(ranks, rank);
    StagedGroups staged{};
    if (on.nccl) staged[static_cast<size_t>(RankGroup::world)] = ranks;
    of_rank.program.set_staged_groups(staged);
    const Program& program = of_rank.program;
    Communicators communicators;
    communicators.of(RankGroup::world) = &group.member(rank);
    const StateStorage storage(of_rank.table, device,
                               device == Device::cuda ? rank % gpu_count() : 0);
    ThreadPool pool(1);
    const auto interpreter =
        make_interpreter(program, plan_memory(program, 1, device), storage, pool, communicators,
                         {.capture = on.capture, .shares_gpu = on.shares_gpu});
    int number = 0;
    for (const ValueId id : of_rank.inputs) {
      draw_input(program.value(id), interpreter->view(id), ranks, rank, ++number);
    }
    // Twice: flags and counts go on, and what was reduced in place is reduced again.
    interpreter->run();
    interpreter->run();
    std::vector<std::string>& outcome = outcomes[static_cast<size_t>(rank)];
    for (const ValueId id : of_rank.results) {
      const TensorView view = interpreter->view(id);
      outcome.push_back(bytes_of(view, view.shape[0]));
    }
    for (const auto& each : of_rank.ragged) {
      const int32_t rows = interpreter->view(each.counter).as<int32_t>()[each.element];
      outcome.push_back(bytes_of(interpreter->view(each.rows), rows));
    }
  });
  return outcomes;
}

class GpuCollectives : public ::testing::TestWithParam<int> {};

TEST_P(GpuCollectives, HaveTheBitsOfTheCpu) {
  TROUPE_NEED_GPU();
  const int ranks = GetParam();
  if (ranks > kMostStreams * gpu_count()) {
    GTEST_SKIP() << ranks << " ranks, and a GPU goes on with at most " << kMostStreams
                 << " that wait for each other; " << gpu_count() << " GPU(s) here";
  }
  const auto expected = run_collectives(ranks, Device::cpu);
  const auto found = run_collectives(ranks, Device::cuda);
  int different = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    const auto& of_cpu = expected[static_cast<size_t>(rank)];
    const auto& of_gpu = found[static_cast<size_t>(rank)];
    ASSERT_EQ(of_cpu.size(), of_gpu.size());
    for (size_t i = 0; i < of_cpu.size(); ++i) {
      const bool same = of_cpu[i] == of_gpu[i];
      different += same ? 0 : 1;
      EXPECT_TRUE(same) << "rank " << rank << " result " << i << ", " << of_cpu[i].size()
                        << " bytes";
    }
  }
  report(fmt::format("collectives of {} ranks on {} GPUs: {} results, {} different", ranks,
                     gpu_count(), expected[0].size() * static_cast<size_t>(ranks), different));
}

// Without, and captured in the second run, with a stream for each queue.
TEST_P(GpuCollectives, HaveTheBitsOfTheCpuThroughNccl) {
  const int ranks = GetParam();
  TROUPE_NEED_GPU_FOR_EACH_OF(ranks);
  const auto expected = run_collectives(ranks, Device::cpu);
  for (const bool capture : {false, true}) {
    const auto found = run_collectives(ranks, Device::cuda,
                                       {.nccl = true, .shares_gpu = false, .capture = capture});
    int different = 0;
    for (size_t rank = 0; rank < expected.size(); ++rank) {
      ASSERT_EQ(expected[rank].size(), found[rank].size());
      for (size_t i = 0; i < expected[rank].size(); ++i) {
        const bool same = expected[rank][i] == found[rank][i];
        different += same ? 0 : 1;
        EXPECT_TRUE(same) << "rank " << rank << " result " << i << ", " << expected[rank][i].size()
                          << " bytes";
      }
    }
    report(fmt::format("collectives of {} ranks through NCCL{}: {} results, {} different", ranks,
                       capture ? ", captured" : "", expected[0].size() * static_cast<size_t>(ranks),
                       different));
  }
}

// 40: more than a warp has lanes.
INSTANTIATE_TEST_SUITE_P(Ranks, GpuCollectives, ::testing::Values(2, 3, 4, 8, 40),
                         [](const auto& info) { return std::to_string(info.param); });

// Of the random layouts of at most four ranks those that bring something, by their names, that none
// before them has: all kinds of groups, exchanges, schedules and shardings.
std::vector<LayoutCase> layouts() {
  std::vector<LayoutCase> chosen;
  std::set<std::string> seen;
  for (LayoutCase& c : random_layouts(320)) {
    if (c.layout.world_size > 4) continue;
    bool is_new = false;
    std::istringstream words(c.name);
    for (std::string word; std::getline(words, word, '_');) is_new |= seen.insert(word).second;
    if (is_new) chosen.push_back(std::move(c));
  }
  for (const TokenDispatcher dispatcher :
       {TokenDispatcher::allgather, TokenDispatcher::alltoall, TokenDispatcher::flex}) {
    LayoutCase c;
    c.name = "messages_in_8_bits_" + std::string(name_of(dispatcher));
    c.model = moe_model(2);
    c.model.hidden_size = 64;
    c.layout.world_size = 2;
    c.layout.expert_parallel = 2;
    c.dispatcher = dispatcher;
    c.precision = {.messages = {.dispatched = true, .combine_gradients = true}};
    chosen.push_back(c);
  }
  // Stashes that suffice, that lack pages in every step, and rooms that do.
  for (const TokenDispatcher dispatcher : {TokenDispatcher::alltoall, TokenDispatcher::flex}) {
    for (const auto& [name, factor, room] : {std::tuple{"stashed_", 8.0, 0.0},
                                             {"without_pages_", 0.25, 0.0},
                                             {"without_room_", 8.0, 0.5}}) {
      LayoutCase c;
      c.name = name + std::string(name_of(dispatcher));
      c.model = moe_model(3);
      c.layout.world_size = 2;
      c.layout.expert_parallel = 2;
      c.dispatcher = dispatcher;
      c.micro_batches = 2;
      c.expert_room = room;
      c.stash = {.factor = factor, .page_bytes = 256};
      chosen.push_back(c);
    }
  }
  // Copies of the experts that all tokens choose, with a room that is too small without.
  for (const TokenDispatcher dispatcher : {TokenDispatcher::alltoall, TokenDispatcher::flex}) {
    LayoutCase c;
    c.name = "copied_experts_" + std::string(name_of(dispatcher));
    c.model = moe_model(3);
    c.model.add_bias_linear = true;
    c.model.num_experts = 8;
    c.layout.world_size = 4;
    c.layout.expert_parallel = 4;
    c.layout.expert_tensor_parallel = 1;
    c.dispatcher = dispatcher;
    c.micro_batches = 2;
    c.expert_clones = 1;
    c.expert_room = 1.3;
    c.crowded_layers = {0, 2};
    chosen.push_back(c);
  }
  LayoutCase stored;
  stored.name = "stored_activations";
  stored.model = moe_model(2);
  stored.model.moe_ffn_hidden_size = 64;
  stored.layout.world_size = 2;
  stored.layout.expert_tensor_parallel = 2;
  stored.precision.stores_activation_inputs = true;
  chosen.push_back(stored);
  for (const Fp8Recipe recipe : kRecipes) {
    // Whose gradients are 0 up to the order of sums: precision_test.cc.
    if (recipe == Fp8Recipe::delayed) continue;
    LayoutCase c = coded_weights("codes_of_shards", recipe, 2);
    c.sharding = StateSharding::parameters;
    c.early_collectives = true;
    chosen.push_back(c);
  }
  return chosen;
}

// Queues on streams of their own: what the ranks exchange does not change, and the first run, in
// which hosts meet, works as it does on one stream.
class GpuStreams : public ::testing::TestWithParam<int> {};

TEST_P(GpuStreams, CollectivesHaveTheBitsOfTheCpu) {
  TROUPE_NEED_GPU_FOR_EACH_OF(GetParam());
  EXPECT_TRUE(run_collectives(GetParam(), Device::cpu) ==
              run_collectives(GetParam(), Device::cuda, {.shares_gpu = false}));
}

INSTANTIATE_TEST_SUITE_P(Ranks, GpuStreams, ::testing::Values(2, 4),
                         [](const auto& info) { return std::to_string(info.param); });

class GpuLayout : public ::testing::TestWithParam<LayoutCase> {};

TEST_P(GpuLayout, EqualsOneRank) {
  TROUPE_NEED_GPU();
  const LayoutCase& c = GetParam();
  const Outcome gpus = run_layout(c, {.device = Device::cuda});
  expect_same_outcome(run_one_rank(c), gpus);
  expect_same_bits(gpus, run_layout(c, {.device = Device::cuda, .capture = true}));
  report("layout " + c.name + (HasFailure() ? " FAIL" : " same as one rank, captured or not"));
}

// What NCCL brings is summed by the same kernels in the same order, so the bits are those of GPUs
// that reach each other's memory.
TEST_P(GpuLayout, HasTheSameBitsThroughNccl) {
  const LayoutCase& c = GetParam();
  TROUPE_NEED_GPU_FOR_EACH_OF(c.layout.world_size);
  const Outcome expected = run_layout(c, {.device = Device::cuda});
  for (const bool capture : {false, true}) {
    SCOPED_TRACE(capture ? "captured" : "launched one by one");
    expect_same_bits(
        expected,
        run_layout(c, {.device = Device::cuda, .capture = capture, .nccl = true, .streams = true}));
  }
  report("NCCL " + c.name + (HasFailure() ? " FAIL" : " same bits, captured or not"));
}

// Queues on streams of their own, launched one by one and captured with fork and join, have the
// bits of one stream; on CPUs, queue_order_test.cc holds that of any order that events allow.
TEST_P(GpuLayout, HasTheSameBitsOnStreams) {
  const LayoutCase& c = GetParam();
  TROUPE_NEED_GPU_FOR_EACH_OF(c.layout.world_size);
  const Outcome expected = run_layout(c, {.device = Device::cuda});
  for (const bool capture : {false, true}) {
    SCOPED_TRACE(capture ? "captured" : "launched one by one");
    expect_same_bits(expected,
                     run_layout(c, {.device = Device::cuda, .capture = capture, .streams = true}));
  }
  report("streams " + c.name + (HasFailure() ? " FAIL" : " same bits as one, captured or not"));
}

// As weight_codes_test.cc on CPUs.
TEST(GpuWeightCodes, ShardsOfMastersGiveTheBitsOfWholeOnes) {
  TROUPE_NEED_GPU();
  for (const Fp8Recipe recipe : kRecipes) {
    SCOPED_TRACE(recipe_name(recipe));
    LayoutCase c = coded_weights("dp2", recipe, 2);
    c.dtype = DType::bf16;
    const Outcome whole = run_layout(c, {.device = Device::cuda});
    for (const StateSharding sharding : {StateSharding::optimizer, StateSharding::parameters}) {
      c.sharding = sharding;
      expect_same_codes(whole, run_layout(c, {.device = Device::cuda, .capture = true}), sharding);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, GpuLayout, ::testing::ValuesIn(layouts()),
                         [](const auto& info) { return info.param.name; });

// Attention over the context in bf16, with heads that cuDNN takes, and with dropout and documents,
// which it does not: on every rank each chunk of queries has another number of keys. Few cases,
// since every rank chooses kernels for each of them.
std::vector<ContextCase> context_cases() {
  const AttentionAttributes small{
      .batch = 2, .sequence = 512, .heads = 4, .groups = 4, .head_dim = 64, .scale = 0.125};
  AttentionAttributes grouped{
      .batch = 2, .sequence = 600, .heads = 4, .groups = 2, .head_dim = 128, .scale = 0.09};
  std::vector<ContextCase> cases;
  const auto add = [&](const std::string& name, int32_t ranks, const AttentionAttributes& whole) {
    cases.push_back({name + "_on_" + std::to_string(ranks), ranks, whole, DType::bf16});
  };
  add("whole_tiles", 2, small);
  add("odd_chunks", 4, grouped);
  grouped.window = 40;
  add("window_within_a_chunk", 2, grouped);
  grouped.window = 320;
  add("window_over_chunks", 4, grouped);
  // Rows of two sequences of 600 tokens, in chunks of 75 and 150.
  const std::vector<int64_t> documents = {1, 75, 140, 300, 520, 599, 750, 761};
  cases.push_back({"documents_window_on_4", 4, grouped, DType::bf16, documents});
  grouped.window = 0;
  cases.push_back({"documents_on_2", 2, grouped, DType::bf16, documents});
  grouped.window = 320;
  grouped.seed = 3;
  grouped.probability = 0.2;
  add("dropout", 4, grouped);
  add("heads_of_40", 2,
      {.batch = 1, .sequence = 300, .heads = 4, .groups = 2, .head_dim = 40, .scale = 0.16});
  return cases;
}

class GpuContextAttention : public ::testing::TestWithParam<ContextCase> {};

// As for single operations in bf16 (tests/cuda/operations_gpu_test.cc).
TEST_P(GpuContextAttention, EqualsOneRankOfTheCpu) {
  TROUPE_NEED_GPU();
  constexpr double kTolerance = 1e-2;
  const ContextCase& c = GetParam();
  const ContextOutcome expected = run_context(c, 1, ContextExchange::p2p);
  const auto run = [&](ContextExchange exchange, bool capture) {
    const ContextOutcome found =
        run_context(c, c.ranks, exchange, {.device = Device::cuda, .capture = capture});
    const double out = distance(found.out, expected.out);
    const double gradient = distance(found.d_qkv, expected.d_qkv);
    EXPECT_LE(out, kTolerance);
    EXPECT_LE(gradient, kTolerance);
    report(fmt::format("context {} {} out {:.1e} gradients {:.1e}{}", c.name, name_of(exchange),
                       out, gradient, HasFailure() ? " FAIL" : ""));
    return found;
  };
  const ContextOutcome ring = run(ContextExchange::p2p, false);
  const ContextOutcome captured = run(ContextExchange::p2p, true);
  EXPECT_TRUE(captured.out == ring.out && captured.d_qkv == ring.d_qkv) << "captured";
  EXPECT_TRUE(run(ContextExchange::allgather, false).out == ring.out) << "all keys gathered";
}

INSTANTIATE_TEST_SUITE_P(Cases, GpuContextAttention, ::testing::ValuesIn(context_cases()),
                         [](const auto& info) { return info.param.name; });

struct ReferenceCase {
  std::string name;
  std::string fixture;
  DType dtype;
  LayoutOptions layout;
  StateSharding sharding = StateSharding::none;
};

std::vector<ReferenceCase> reference_cases() {
  std::vector<ReferenceCase> cases;
  const auto add = [&](const std::string& name, const std::string& fixture,
                       const LayoutOptions& layout, StateSharding sharding = StateSharding::none) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      cases.push_back({name + "_" + fixture + "_" + std::string(name_of(dtype)), fixture, dtype,
                       layout, sharding});
    }
  };
  add("ep2", "qwen3_moe", {.world_size = 2, .expert_parallel = 2});
  add("ep4", "qwen3_moe", {.world_size = 4, .expert_parallel = 4});
  add("tp2_ep4", "olmoe",
      {.world_size = 4,
       .tensor_parallel = 2,
       .expert_parallel = 4,
       .expert_tensor_parallel = 1,
       .sequence_parallel = true});
  add("pp2_ep2", "mixtral", {.world_size = 4, .pipeline_parallel = 2, .expert_parallel = 2});
  add("cp2_ep4", "qwen3_moe", {.world_size = 4, .context_parallel = 2, .expert_parallel = 4});
  add("tp2_cp2_ep4", "qwen2_moe",
      {.world_size = 8,
       .tensor_parallel = 2,
       .context_parallel = 2,
       .expert_parallel = 4,
       .expert_tensor_parallel = 1,
       .sequence_parallel = true});
  add("fsdp_ep2", "mixtral", {.world_size = 4, .context_parallel = 2, .expert_parallel = 2},
      StateSharding::parameters);
  return cases;
}

class GpuReference : public ::testing::TestWithParam<ReferenceCase> {};

void expect_reference(const ReferenceCase& c, bool nccl) {
  const std::string built = TROUPE_FIXTURE_DIR "/hf/";
  const std::string folder =
      (std::filesystem::exists(built) ? built : "tests/fixtures/hf/") + c.fixture;
  LayoutCase layout;
  layout.model = read_hf_config(folder + "/config.json");
  layout.layout = c.layout;
  layout.sharding = c.sharding;
  const int32_t ranks = c.layout.world_size;
  const auto run = std::make_shared<RunLayout>(*run_layout_of(layout));
  run->is_staged.fill(nccl);
  const ReferenceComparison result =
      verify_reference(folder, c.dtype, /*with_oracle=*/true,
                       {.spec = {.device = Device::cuda,
                                 .ranks = ranks,
                                 .ranks_per_gpu = (ranks + gpu_count() - 1) / gpu_count(),
                                 .collective_timeout = kPatient},
                        .layout = run});
  report(fmt::format(
      "reference {:<28}{} {} logits {:.1e} loss {:.1e} gradients {:.1e} ({}), all {:.1e} "
      "trajectory {:.1e} oracle {}",
      c.name, nccl ? " NCCL" : "", result.pass ? "pass" : "FAIL", result.logits_max_abs,
      std::abs(result.loss - result.loss_ref), result.grad_worst_rel, result.grad_worst_name,
      result.grad_all_rel, result.trajectory_max_abs,
      result.oracle_identical ? "identical" : "DIFFERS"));
  EXPECT_TRUE(result.oracle_identical);
  EXPECT_TRUE(result.pass);
}

TEST_P(GpuReference, Agrees) {
  TROUPE_NEED_GPU();
  expect_reference(GetParam(), /*nccl=*/false);
}

TEST_P(GpuReference, AgreesThroughNccl) {
  TROUPE_NEED_GPU_FOR_EACH_OF(GetParam().layout.world_size);
  expect_reference(GetParam(), /*nccl=*/true);
}

INSTANTIATE_TEST_SUITE_P(Models, GpuReference, ::testing::ValuesIn(reference_cases()),
                         [](const auto& info) { return info.param.name; });

// One of two, with what it runs.
struct RankOfTwo {
  struct On {
    bool nccl = false;
    bool shares_gpu = false;
  };
  CollectivesProgram program;
  StateStorage storage;
  ThreadPool pool;
  std::unique_ptr<Interpreter> interpreter;
  RankOfTwo(ThreadGroup& group, int rank, const On& on)
      : program(2, rank), storage(program.table, Device::cuda, on.shares_gpu ? 0 : rank), pool(1) {
    Communicators communicators;
    StagedGroups staged{};
    if (on.nccl) staged[static_cast<size_t>(RankGroup::world)] = 2;
    program.program.set_staged_groups(staged);
    communicators.of(RankGroup::world) = &group.member(rank);
    interpreter = make_interpreter(program.program, plan_memory(program.program, 1, Device::cuda),
                                   storage, pool, communicators, {.shares_gpu = on.shares_gpu});
  }
};

// What a rank asks of CUDA between two runs may wait for all that the GPU does: another rank that
// shares it must not wait there for this one yet.
TEST(GpuRanks, BeginARunTogetherWhereTheyShareAGpu) {
  TROUPE_NEED_GPU();
  ThreadGroup group(2, kPatient);
  RankOfTwo first(group, 0, {.shares_gpu = true});
  RankOfTwo second(group, 1, {.shares_gpu = true});
  run_ranks(group, [&](int rank) {
    RankOfTwo& own = rank == 0 ? first : second;
    own.interpreter->run();
    if (rank == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      const DeviceMemory freed(1 << 20, "nothing", 0);  // for which CUDA waits
    }
    own.interpreter->run();
  });
}

// A rank that stays away ends the run of all with a message that names it. Each has a GPU: where
// they share one, they wait for each other before the run, on their hosts.
void expect_end_of_wait(bool nccl) {
  ThreadGroup group(2, std::chrono::milliseconds(2'000));
  // They outlive the wait: a rank that is late still has its memory.
  RankOfTwo first(group, 0, {.nccl = nccl});
  RankOfTwo second(group, 1, {.nccl = nccl});
  std::string message;
  try {
    run_ranks(group, [&](int rank) {
      (rank == 0 ? first : second).interpreter->run();
      if (rank == 0) first.interpreter->run();
    });
  } catch (const UserError& error) {
    message = error.what();
  }
  EXPECT_NE(message.find("Rank 0 timed out (2 s) in operation"), std::string::npos) << message;
  EXPECT_NE(message.find(nccl ? "waiting for rank 1." : "waiting for: rank 1 (is missing)."),
            std::string::npos)
      << message;
}

TEST(GpuRanks, DoNotWaitForEver) {
  TROUPE_NEED_GPU_FOR_EACH_OF(2);
  expect_end_of_wait(/*nccl=*/false);
}

TEST(GpuRanks, DoNotWaitForEverThroughNccl) {
  TROUPE_NEED_GPU_FOR_EACH_OF(2);
  expect_end_of_wait(/*nccl=*/true);
}

}  // namespace
}  // namespace troupe::testing
