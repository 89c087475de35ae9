// What ranks hold are slices of one model: initial weights, Hugging Face weights and checkpoints
// give every rank, in every layout, the bits that one rank has at the same elements.
#include <algorithm>
#include <cstring>
#include <exception>
#include <gtest/gtest.h>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/random.h"
#include "comm/thread_group.h"
#include "io/disk_death.h"
#include "io/hf_config.h"
#include "io/hf_weights.h"
#include "model/parameter_layout.h"
#include "support/adamw_state.h"
#include "train/initialize.h"
#include "train/train_test_support.h"
#include "train/training_checkpoint.h"

namespace troupe::testing {
namespace {

constexpr std::chrono::milliseconds kPatient{60'000};

// ---- Layouts ----

ModelConfig model(bool tied, bool biases) {
  ModelConfig config;
  config.num_layers = 4;
  config.hidden_size = 8;
  config.vocab_size = 19;
  config.num_attention_heads = 4;
  config.num_query_groups = 2;
  config.kv_channels = 2;
  config.qk_layernorm = true;
  config.qk_norm_scope = biases ? QkNormScope::projection : QkNormScope::head;
  config.add_qkv_bias = true;
  config.add_bias_linear = biases;
  config.max_position_embeddings = 64;
  config.ffn_hidden_size = 8;
  config.num_experts = 8;
  config.moe_router_topk = 2;
  config.moe_ffn_hidden_size = 4;
  config.moe_layers = {false, true, true, true};
  config.moe_router_score_function = ScoreFunction::sigmoid;
  config.moe_router_enable_expert_bias = true;
  config.moe_shared_expert_intermediate_size = biases ? 0 : 8;
  config.moe_shared_expert_gate = !biases;
  config.tie_embeddings = tied;
  return config;
}

struct Sizes {
  int32_t world, tp, cp, pp, ep, etp, chunks;
  bool v = false;
  StateSharding sharding = StateSharding::none;
  int32_t instances = 1;
};

// Nothing when the model cannot be cut so.
std::shared_ptr<const RunLayout> make_layout(const ModelConfig& config, const Sizes& sizes) {
  OrRefusal<PipelinePartition> partition =
      even_partition(config.num_layers, sizes.pp, sizes.chunks,
                     sizes.v ? StagePlacement::v : StagePlacement::loop);
  if (partition.refusal() != nullptr) return nullptr;
  partition.value().stages.back().mtp_layers = config.mtp_num_layers;
  OrRefusal<Layout> layout =
      try_layout({.world_size = sizes.world,
                  .tensor_parallel = sizes.tp,
                  .context_parallel = sizes.cp,
                  .pipeline_parallel = sizes.pp,
                  .expert_parallel = sizes.ep,
                  .expert_tensor_parallel = sizes.etp,
                  .optimizer_instances = sizes.instances,
                  .sequence_parallel = true,
                  .embedding_places = partition.value().embedding_ranks(config.tie_embeddings)});
  if (layout.refusal() != nullptr || check_layout(config, layout.value(), 64)) return nullptr;
  RunLayout run{std::move(layout.value()), std::move(partition.value()), {}, sizes.sharding};
  run.amax_history = 2;
  return std::make_shared<const RunLayout>(std::move(run));
}

std::string name_of(const RunLayout& run) {
  const Layout& layout = run.layout;
  return std::to_string(layout.world_size()) + " ranks, tp " + std::to_string(layout.tp()) +
         " cp " + std::to_string(layout.cp()) + " pp " + std::to_string(layout.pp()) + " ep " +
         std::to_string(layout.ep()) + " etp " + std::to_string(layout.etp()) + " chunks " +
         std::to_string(run.partition.chunks) + " sharding " +
         std::to_string(static_cast<int>(run.sharding)) + " instances " +
         std::to_string(layout.options().optimizer_instances);
}

std::shared_ptr<const RunLayout> random_layout(const ModelConfig& config, uint64_t number) {
  for (uint64_t attempt = 0;; ++attempt) {
    const auto draw = [&](uint32_t what) {
      return int32_t{1} << random_below(4, number, RandomStream::test, what, attempt);
    };
    const Sizes sizes{.world = draw(0),
                      .tp = draw(1),
                      .cp = draw(2),
                      .pp = draw(3),
                      .ep = draw(4),
                      .etp = draw(5),
                      .chunks = std::min(2, draw(6)),
                      .v = draw(7) > 4,
                      .sharding = draw(8) > 2   ? StateSharding::parameters
                                  : draw(8) > 1 ? StateSharding::optimizer
                                                : StateSharding::none,
                      .instances = std::min(2, draw(9))};
    if (sizes.pp > 4) continue;
    if (auto layout = make_layout(config, sizes)) return layout;
  }
}

std::vector<Sizes> telling_sizes() {
  return {{8, 2, 1, 2, 2, 2, 1},
          {8, 4, 1, 1, 8, 1, 1},
          {4, 4, 1, 1, 1, 4, 1},
          {8, 1, 2, 4, 2, 1, 1},
          {8, 2, 2, 1, 4, 2, 1},
          {4, 1, 1, 2, 2, 1, 2},
          {2, 1, 1, 2, 1, 1, 2, true},
          {6, 1, 1, 1, 2, 1, 1},
          {1, 1, 1, 1, 1, 1, 1},
          {4, 1, 1, 1, 1, 1, 1, false, StateSharding::optimizer},
          {8, 2, 2, 1, 2, 1, 1, false, StateSharding::parameters, 2},
          {6, 2, 1, 1, 1, 1, 1, false, StateSharding::optimizer}};
}

// ---- One rank's state ----

struct RankState {
  RankState(const ModelConfig& config, DType dtype, bool trained,
            std::shared_ptr<const RunLayout> run, int32_t rank)
      : state(declare_model_state(config, dtype, trained, {.run = std::move(run), .rank = rank})),
        storage(state.table) {}
  ModelState state;
  StateStorage storage;
};

std::vector<std::unique_ptr<RankState>> all_ranks(const ModelConfig& config, DType dtype,
                                                  bool trained,
                                                  const std::shared_ptr<const RunLayout>& run) {
  std::vector<std::unique_ptr<RankState>> ranks;
  for (int32_t rank = 0; rank < run->layout.world_size(); ++rank) {
    ranks.push_back(std::make_unique<RankState>(config, dtype, trained, run, rank));
  }
  return ranks;
}

// The number in the whole tensor of each of a slice's elements, straight from the ranges.
std::vector<int64_t> elements_of(const ParameterSlice& slice, const Shape& whole) {
  std::vector<int64_t> numbers = {0};
  for (int dimension = 0; dimension < whole.rank(); ++dimension) {
    std::vector<int64_t> next;
    for (const int64_t before : numbers) {
      for (const IndexRange& range : slice.ranges[static_cast<size_t>(dimension)]) {
        for (int64_t i = range.begin; i < range.end; ++i) {
          next.push_back(before * whole[dimension] + i);
        }
      }
    }
    numbers = std::move(next);
  }
  return numbers;
}

std::string element_bytes(const TensorView& view, int64_t element) {
  const size_t size = size_of(view.dtype);
  return {static_cast<const char*>(view.data) + static_cast<size_t>(element) * size, size};
}

// The state tensors of parameters that a checkpoint holds.
std::vector<StateId> kept(const Parameter& parameter) {
  std::vector<StateId> ids;
  for (const StateId id : {parameter.value, parameter.master, exp_avg_of(parameter).values,
                           exp_avg_sq_of(parameter).values}) {
    if (id.valid()) ids.push_back(id);
  }
  return ids;
}

using Coverage = std::map<std::string, std::set<int64_t>>;

// The numbers of what the rank has of one of a parameter's state tensors.
std::vector<int64_t> elements_held(const Parameter& parameter, StateId id) {
  std::vector<int64_t> numbers = elements_of(parameter.slice, parameter.whole_shape);
  const IndexRange& part = id.index == parameter.value.index ? parameter.held : parameter.shard;
  return {numbers.begin() + part.begin, numbers.begin() + part.end};
}

// Every element of the rank's weights (and masters) is the whole model's.
void expect_slices_of(const RankState& whole, const RankState& rank, Coverage& covered) {
  for (const Parameter& own : rank.state.parameters) {
    const Parameter& of_whole = whole.state.parameters.at(own.number());
    const std::string& name = (*rank.state.table)[own.value].name;
    ASSERT_EQ(name, (*whole.state.table)[of_whole.value].name);
    for (const auto& [id, whole_id] :
         {std::pair(own.value, of_whole.value), std::pair(own.master, of_whole.master)}) {
      if (!id.valid()) {
        ASSERT_TRUE(!whole_id.valid() || own.shard.begin == own.shard.end);
        continue;
      }
      ASSERT_TRUE(whole_id.valid());
      const std::vector<int64_t> numbers = elements_held(own, id);
      ASSERT_EQ(static_cast<int64_t>(numbers.size()), (*rank.state.table)[id].shape.elements());
      covered[(*rank.state.table)[id].name].insert(numbers.begin(), numbers.end());
      const TensorView found = rank.storage.view(id);
      const TensorView expected = whole.storage.view(whole_id);
      for (size_t i = 0; i < numbers.size(); ++i) {
        ASSERT_EQ(element_bytes(found, static_cast<int64_t>(i)),
                  element_bytes(expected, numbers[i]))
            << name << ", rank " << rank.state.part.rank << ", element " << numbers[i];
      }
    }
  }
}

void expect_complete(const RankState& whole, const Coverage& covered) {
  for (const Parameter& parameter : whole.state.parameters) {
    for (const StateId id : {parameter.value, parameter.master}) {
      if (!id.valid()) continue;
      const StateTensor& tensor = (*whole.state.table)[id];
      ASSERT_TRUE(covered.contains(tensor.name)) << tensor.name << " is on no rank";
      EXPECT_EQ(static_cast<int64_t>(covered.at(tensor.name).size()), tensor.shape.elements())
          << tensor.name;
    }
  }
}

// ---- Runs ----

TEST(SliceRuns, AreTheElementsInOrder) {
  for (const bool biases : {false, true}) {
    const ModelConfig config = model(false, biases);
    for (const Sizes& sizes : telling_sizes()) {
      const auto run = make_layout(config, sizes);
      if (run == nullptr) continue;
      for (int32_t rank = 0; rank < sizes.world; ++rank) {
        const ModelState state =
            declare_model_state(config, DType::f32, false, {.run = run, .rank = rank});
        for (const Parameter& parameter : state.parameters) {
          std::vector<int64_t> numbers;
          for (const SliceRun& stretch : runs_of(parameter.slice, parameter.whole_shape)) {
            ASSERT_GT(stretch.elements, 0);
            ASSERT_EQ(stretch.own, static_cast<int64_t>(numbers.size()));
            for (int64_t i = 0; i < stretch.elements; ++i) numbers.push_back(stretch.whole + i);
          }
          ASSERT_EQ(numbers, elements_of(parameter.slice, parameter.whole_shape))
              << (*state.table)[parameter.value].name;
        }
      }
    }
  }
}

// ---- Shards ----

TEST(ShardPieces, AreTheElementsInOrder) {
  const ModelConfig config = model(false, false);
  std::vector<Sizes> all = telling_sizes();
  all.push_back({24, 1, 1, 1, 8, 1, 1});  // the second of three shards begins and ends in an expert
  for (Sizes sizes : all) {
    sizes.sharding = StateSharding::optimizer;
    const auto run = make_layout(config, sizes);
    ASSERT_NE(run, nullptr);
    for (int32_t rank = 0; rank < sizes.world; ++rank) {
      const ModelState state =
          declare_model_state(config, DType::f32, true, {.run = run, .rank = rank});
      for (const Parameter& parameter : state.parameters) {
        if (!exp_avg_of(parameter).values.valid()) continue;
        std::vector<int64_t> numbers;
        for (const SlicePiece& piece : pieces_of(parameter.slice, parameter.shard)) {
          ASSERT_EQ(piece.first, static_cast<int64_t>(numbers.size()));
          ParameterSlice box;
          for (int i = 0; i < parameter.whole_shape.rank(); ++i) {
            const int64_t begin = piece.offset[static_cast<size_t>(i)];
            box.ranges.push_back({{begin, begin + piece.shape[i]}});
          }
          const std::vector<int64_t> own = elements_of(box, parameter.whole_shape);
          numbers.insert(numbers.end(), own.begin(), own.end());
        }
        ASSERT_EQ(numbers, elements_held(parameter, exp_avg_of(parameter).values))
            << (*state.table)[parameter.value].name;
      }
    }
  }
}

// ---- Initial weights ----

void expect_same_start(const ModelConfig& config, DType dtype,
                       const std::shared_ptr<const RunLayout>& run) {
  SCOPED_TRACE(name_of(*run));
  ThreadPool pool(2);
  RankState whole(config, dtype, true,
                  std::make_shared<const RunLayout>(
                      layout_of_one_rank(config.num_layers, config.mtp_num_layers)),
                  0);
  initialize_parameters(whole.state, whole.storage, 7, pool);
  Coverage covered;
  for (const auto& rank : all_ranks(config, dtype, true, run)) {
    initialize_parameters(rank->state, rank->storage, 7, pool);
    ASSERT_NO_FATAL_FAILURE(expect_slices_of(whole, *rank, covered));
  }
  expect_complete(whole, covered);
}

TEST(SlicedInitialWeights, AreThoseOfOneRank) {
  for (const bool tied : {false, true}) {
    for (const bool biases : {false, true}) {
      ModelConfig config = model(tied, biases);
      config.mtp_num_layers = tied ? 2 : 0;
      int made = 0;
      for (const Sizes& sizes : telling_sizes()) {
        const auto run = make_layout(config, sizes);
        if (run == nullptr) continue;  // experts with biases cannot be sliced
        ++made;
        expect_same_start(config, sizes.tp > 1 ? DType::bf16 : DType::f64, run);
      }
      EXPECT_GE(made, biases ? 5 : 9);
      for (uint64_t number = 0; number < 10; ++number) {
        expect_same_start(config, DType::f32, random_layout(config, number));
      }
    }
  }
}

// ---- Hugging Face weights ----

class SlicedHfWeights : public ::testing::TestWithParam<const char*> {};

TEST_P(SlicedHfWeights, AreThoseOfOneRank) {
  const std::string folder = std::string(TROUPE_FIXTURE_DIR) + "/hf/" + GetParam();
  const ModelConfig config = read_hf_config(folder + "/config.json");
  int made = 0;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    RankState whole(config, dtype, true,
                    std::make_shared<const RunLayout>(
                        layout_of_one_rank(config.num_layers, config.mtp_num_layers)),
                    0);
    load_hf_weights(folder, config, whole.state, whole.storage);
    std::vector<Sizes> all;
    for (const int32_t tp : {1, 2}) {
      for (const int32_t pp : {1, 2}) {
        for (const int32_t ep : {1, 2}) {
          for (const int32_t etp : {1, 2}) {
            all.push_back({4, tp, 1, pp, ep, etp, 1});
            all.push_back({4, tp, 1, pp, ep, etp, 1, false, StateSharding::parameters});
          }
        }
      }
    }
    for (const Sizes& sizes : all) {
      const auto run = make_layout(config, sizes);
      if (run == nullptr) continue;
      ++made;
      SCOPED_TRACE(name_of(*run));
      Coverage covered;
      for (const auto& rank : all_ranks(config, dtype, true, run)) {
        load_hf_weights(folder, config, rank->state, rank->storage);
        ASSERT_NO_FATAL_FAILURE(expect_slices_of(whole, *rank, covered));
      }
      expect_complete(whole, covered);
    }
  }
  EXPECT_GE(made, 4);
}

INSTANTIATE_TEST_SUITE_P(Fixtures, SlicedHfWeights,
                         ::testing::Values("mixtral_window_tied", "qwen3_moe_mixed_layers",
                                           "qwen2_moe", "olmoe", "llama_dense", "deepseek_v2",
                                           "deepseek_v3", "deepseek_v32", "glm4_moe_biased",
                                           "gpt_oss", "minimax_m2", "ling_v2", "qwen3_next",
                                           "qwen3_5_moe"),
                         [](const auto& info) { return std::string(info.param); });

// ---- Checkpoints ----

// What element `number` of a tensor holds: a function of its name, so that every rank knows it.
void put(const std::string& name, uint64_t variant, int64_t number, std::byte* target,
         size_t size) {
  uint64_t value = (variant + 1) * 1'000'003 + static_cast<uint64_t>(number);
  for (const char c : name) value = (value ^ static_cast<uint8_t>(c)) * 0x9e3779b97f4a7c15U;
  std::memcpy(target, &value, size);
}

// All elements that a checkpoint holds, with their bytes as `variant` has them.
template <class Visit>
void for_each_element(const RankState& rank, const Visit& visit) {
  const auto tensor = [&](StateId id, const std::vector<int64_t>& numbers) {
    const TensorView view = rank.storage.view(id);
    const std::string& name = (*rank.state.table)[id].name;
    const size_t size = size_of(view.dtype);
    for (size_t i = 0; i < numbers.size(); ++i) {
      visit(name, numbers[i], static_cast<std::byte*>(view.data) + i * size, size);
    }
  };
  for (const Parameter& parameter : rank.state.parameters) {
    for (const StateId id : kept(parameter)) tensor(id, elements_held(parameter, id));
    if (!rank.state.trained || !parameter.amax_history.valid()) continue;
    const Shape& history = (*rank.state.table)[parameter.amax_history].shape;
    const bool experts = parameter.gradient_class == GradientClass::expert;
    std::vector<int64_t> numbers(static_cast<size_t>(history.elements()));
    std::iota(numbers.begin(), numbers.end(),
              experts ? parameter.slice.ranges[0][0].begin * history.row_elements() : 0);
    tensor(parameter.amax_history, numbers);
  }
  for (const StateId id : rank.state.expert_biases) {
    if (!id.valid()) continue;
    std::vector<int64_t> numbers;
    for (int64_t i = 0; i < (*rank.state.table)[id].shape.elements(); ++i) numbers.push_back(i);
    tensor(id, numbers);
  }
}

void fill(const RankState& rank, uint64_t variant) {
  for_each_element(rank, [&](const std::string& name, int64_t number, std::byte* data,
                             size_t size) { put(name, variant, number, data, size); });
}

void expect_filled(const RankState& rank, uint64_t variant) {
  for_each_element(
      rank, [&](const std::string& name, int64_t number, const std::byte* data, size_t size) {
        std::byte expected[sizeof(uint64_t)];
        put(name, variant, number, expected, size);
        ASSERT_EQ(std::memcmp(data, expected, size), 0)
            << name << ", rank " << rank.state.part.rank << ", element " << number;
      });
}

RunIdentity identity_of(const ModelConfig& config, DType dtype) {
  RunIdentity identity;
  identity.model = config;
  identity.compute_dtype = dtype;
  identity.sequence = 64;
  identity.split = "1,0,0";
  identity.tokenizer.type = "byte";
  identity.tokenizer.contents = "the bytes of a tokenizer's file";
  identity.schedules = {.learning_rate = {.max_lr = 1e-3, .decay_samples = 96},
                        .weight_decay = {.end = 0.1, .samples = 96}};
  identity.ordered_samples = 10;
  identity.data = "data";
  identity.options_json = "{}";
  return identity;
}

// Saves `step`, filled with the variant of that number, by all ranks at the same time.
void save(const std::string& dir, int64_t step, const ModelConfig& config, DType dtype,
          bool trained, const std::shared_ptr<const RunLayout>& run,
          const CheckpointOptions& options = {}) {
  ThreadGroup group(run->layout.world_size(), kPatient);
  const auto ranks = all_ranks(config, dtype, trained, run);
  for (const auto& rank : ranks) fill(*rank, static_cast<uint64_t>(step));
  std::vector<std::exception_ptr> failures(ranks.size());
  run_ranks(group, [&](int number) {
    const auto at = static_cast<size_t>(number);
    const RankState& rank = *ranks[at];
    try {
      save_training_checkpoint(dir, identity_of(config, dtype), {.step = step}, rank.state,
                               rank.storage, group.size() > 1 ? &group : nullptr, options);
    } catch (const SaveFailed&) {
      failures[at] = std::current_exception();
    }
  });
  // One for all, and rank 0 knows why.
  for (const std::exception_ptr& failure : failures) {
    EXPECT_EQ(failure == nullptr, failures[0] == nullptr);
  }
  if (failures[0] != nullptr) std::rethrow_exception(failures[0]);
}

void load_and_compare(const std::string& path, int64_t step, const ModelConfig& config, DType dtype,
                      bool trained, const std::shared_ptr<const RunLayout>& run) {
  const Checkpoint checkpoint = Checkpoint::open(path);
  const StoredRun stored = read_stored_run(checkpoint);
  EXPECT_EQ(stored.position.step, step);
  EXPECT_EQ(stored.identity.tokenizer.contents, identity_of(config, dtype).tokenizer.contents);
  for (const auto& rank : all_ranks(config, dtype, trained, run)) {
    fill(*rank, 99);  // so that what is not loaded is wrong
    load_training_state(checkpoint, config, rank->state, rank->storage);
    ASSERT_NO_FATAL_FAILURE(expect_filled(*rank, static_cast<uint64_t>(step)));
  }
}

TEST(SlicedCheckpoint, OfAnyLayoutLoadsInAnyLayout) {
  for (uint64_t number = 0; number < 24; ++number) {
    ModelConfig config = model(number % 2 == 0, number % 4 >= 2);
    config.mtp_num_layers = static_cast<int32_t>(number % 3);
    config.mtp_use_repeated_layer = number % 6 >= 3;
    const DType dtype = number % 3 == 0 ? DType::bf16 : DType::f32;
    const auto saved = random_layout(config, 100 + number);
    const auto loaded = random_layout(config, 200 + number);
    SCOPED_TRACE(name_of(*saved) + " into " + name_of(*loaded));
    const TempFolder folder;
    // Shards of some slices each.
    ASSERT_NO_THROW(
        save(folder.path(), 5, config, dtype, true, saved, {.max_shard_bytes = 4000, .hook = {}}));
    const std::string path = newest_checkpoint(folder.path()).value().path;
    ASSERT_NO_FATAL_FAILURE(load_and_compare(path, 5, config, dtype, true, loaded));
    // For use without training, on one rank.
    const auto one = std::make_shared<const RunLayout>(
        layout_of_one_rank(config.num_layers, config.mtp_num_layers));
    ASSERT_NO_FATAL_FAILURE(load_and_compare(path, 5, config, dtype, false, one));
  }
}

TEST(SlicedCheckpoint, IsSpreadOverTheRanksThatHoldIt) {
  const ModelConfig config = model(true, false);
  const auto run = make_layout(config, {8, 2, 1, 2, 4, 1, 1});  // dp 2: half hold dense replicas
  const TempFolder folder;
  save(folder.path(), 1, config, DType::f32, true, run);
  const Checkpoint checkpoint = Checkpoint::open(newest_checkpoint(folder.path()).value().path);
  std::set<std::string> files;
  for (const StoredTensor& tensor : checkpoint.tensors()) {
    for (const StoredSlice& slice : tensor.slices) files.insert(slice.file.substr(0, 11));
  }
  // Every rank has experts that no other one has.
  EXPECT_EQ(files.size(), 8U);
}

TEST(SlicedCheckpoint, OfAnotherModelIsRefused) {
  const ModelConfig config = model(false, false);
  const auto run = make_layout(config, {4, 2, 1, 2, 1, 1, 1});
  const TempFolder folder;
  save(folder.path(), 1, config, DType::f32, true, run);
  const Checkpoint checkpoint = Checkpoint::open(newest_checkpoint(folder.path()).value().path);
  const auto refusal_of = [&](const ModelConfig& other, DType dtype, int32_t rank) {
    const RankState state(other, dtype, true, run, rank);
    try {
      load_training_state(checkpoint, other, state.state, state.storage);
    } catch (const UserError& error) {
      EXPECT_EQ(error.status(), ExitStatus::bad_request);
      return std::string(error.what());
    }
    return std::string();
  };
  ModelConfig wider = config;
  wider.moe_ffn_hidden_size *= 2;
  EXPECT_NE(refusal_of(wider, DType::f32, 0).find("different: \"layers.1.w_gate_up\""),
            std::string::npos)
      << refusal_of(wider, DType::f32, 0);
  ModelConfig gateless = config;  // what is too much is found by ranks that would not hold it
  gateless.moe_shared_expert_gate = false;
  EXPECT_NE(refusal_of(gateless, DType::f32, 0).find("layers.3.w_shared_gate"), std::string::npos)
      << refusal_of(gateless, DType::f32, 0);
  EXPECT_NE(refusal_of(config, DType::bf16, 3), "");
}

// ---- Saves cut short ----

// Four ranks that hold different things, and few tensors.
struct SmallRun {
  ModelConfig config = [] {
    ModelConfig small = model(true, false);
    small.num_layers = 2;
    small.moe_layers = {false, true};
    return small;
  }();
  std::shared_ptr<const RunLayout> run = make_layout(config, {4, 2, 1, 2, 2, 1, 1});

  void save_step(const std::string& dir, int64_t step, const DiskHook& hook = {}) const {
    save(dir, step, config, DType::f32, /*trained=*/false, run,
         {.max_shard_bytes = 8000, .hook = hook});
  }
  // The steps of the complete checkpoints, each of which must load in full.
  std::vector<int64_t> loadable_steps(const std::string& dir) const {
    std::vector<int64_t> steps;
    for (const CheckpointInfo& info : list_checkpoints(dir)) {
      steps.push_back(info.step);
      load_and_compare(info.path, info.step, config, DType::f32, false, run);
    }
    return steps;
  }
};

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

TEST(SlicedCheckpointFault, AnErrorOnAnyRankIsReportedAndCommitsNothing) {
  const SmallRun small;
  for (int at = 0;; ++at) {
    SCOPED_TRACE(at);
    const TempFolder dir;
    small.save_step(dir.path(), 1);
    std::mutex mutex;
    int count = 0;
    const DiskHook hook = [&](std::string_view, const std::string& path) {
      const std::lock_guard lock(mutex);
      if (count++ == at) throw_failed(path + ": cannot write: No space left on device");
    };
    bool failed = false;
    try {
      small.save_step(dir.path(), 2, hook);
    } catch (const UserError& error) {
      failed = true;
      EXPECT_EQ(error.status(), ExitStatus::failed);
      const std::string message = error.what();
      const size_t begin = message.starts_with("rank ") ? std::string("rank 1: ").size() : 0;
      EXPECT_EQ(message.find("saving step 2 failed (earlier checkpoints are intact)"), begin)
          << message;
      EXPECT_NE(message.find("No space left on device"), std::string::npos) << message;
    }
    const std::vector<int64_t> steps = small.loadable_steps(dir.path());
    const std::vector<std::string> names = names_in(dir / "checkpoints");
    for (const std::string& name : names) {
      EXPECT_EQ(name.rfind("step_", 0), 0U) << name << " was left behind";
    }
    if (!failed) {
      EXPECT_EQ(steps, (std::vector<int64_t>{1, 2}));
      EXPECT_GT(at, 4 * 10);
      break;
    }
    // The last operation makes a commitment durable that has been made.
    if (steps != std::vector<int64_t>{1}) {
      EXPECT_EQ(steps, (std::vector<int64_t>{1, 2}));
    }
  }
}

TEST(SlicedCheckpointFault, DyingAtAnyMomentKeepsTheOldOnesAndMayAddTheNewOne) {
  const SmallRun small;
  bool seen_without = false;
  bool seen_with = false;
  for (int at = 0;; ++at) {
    SCOPED_TRACE(at);
    const TempFolder dir;
    small.save_step(dir.path(), 1);
    const bool died = io_test::dies_at_step(
        at, [&](const DiskHook& hook) { small.save_step(dir.path(), 2, hook); });
    const std::vector<int64_t> steps = small.loadable_steps(dir.path());
    if (steps == std::vector<int64_t>{1}) {
      seen_without = true;
      EXPECT_FALSE(seen_with && died) << "a checkpoint vanished between two steps";
    } else {
      EXPECT_EQ(steps, (std::vector<int64_t>{1, 2}));
      seen_with = true;
    }
    // The next save puts everything in order.
    small.save_step(dir.path(), 3);
    EXPECT_EQ(small.loadable_steps(dir.path()).size(), steps.size() + 1);
    for (const std::string& name : names_in(dir / "checkpoints")) {
      EXPECT_EQ(name.rfind("step_", 0), 0U) << name << " was left behind";
    }
    if (!died) break;
  }
  EXPECT_TRUE(seen_without && seen_with);
}

}  // namespace
}  // namespace troupe::testing
