#include "support/layout_run.h"

#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <utility>

#include "base/random.h"
#include "comm/thread_group.h"
#include "ops/optimizer/adamw/moment_blocks.h"
#include "ops/precision/code_counts/code_counts.h"
#include "parallel/collective_schedule.h"
#include "parallel/rank_communicators.h"
#include "passes/step_programs.h"
#include "plan/fallback_step.h"
#include "program/verify.h"
#include "runtime/cpu/cpu_interpreter.h"
#include "runtime/device_memory.h"
#include "runtime/make_interpreter.h"
#include "support/adamw_state.h"
#include "support/interleaving.h"
#include "support/slice_elements.h"

namespace troupe::testing {
namespace {

constexpr int64_t kSteps = 3;
constexpr uint64_t kSeed = 1;
// A busy machine may hold a rank up for seconds; those of GPUs have one for themselves.
constexpr double kCrowding = 50;  // of a router's bias: far beyond what its logits differ by
constexpr std::chrono::milliseconds kPatient{60'000};
constexpr std::chrono::milliseconds kPatientOnGpus{10'000};

}  // namespace

double start_value(const Parameter& parameter, int64_t element) {
  const double drawn = random_uniform(kSeed, RandomStream::test, 1000 + parameter.number(),
                                      static_cast<uint64_t>(element));
  // Numbers drawn evenly take less time than normal ones, and deviate about as much.
  const double spread = 0.2 + std::sqrt(3.0) * parameter.init_std;
  const bool is_normal =
      parameter.init_std > 0 && parameter.init_bound == 0 && parameter.init_log_bound == 0;
  return (is_normal ? 0 : initial_value(parameter, kSeed, element)) + spread * (2 * drawn - 1);
}

namespace {

using PassWatch = std::function<void(const PassRecord&, const Program&)>;

// Verifies the program after each of its passes.
void verify_pass(const PassRecord&, const Program& program) {
  verify_program(program);
}

TrainingStepOptions step_options(const LayoutCase& wanted, const PassWatch& watch = verify_pass) {
  return {
      .micro_batch_size = wanted.micro_batch_size,
      .micro_batches = wanted.micro_batches,
      .sequence = wanted.sequence,
      .decoupled_learning_rate = true,
      .decay_qk_norms = true,
      .count_zero_gradients = true,
      .parameter_norm = true,
      .seed = kSeed,
      .dispatcher = wanted.dispatcher,
      .context_exchange = wanted.context_exchange,
      .per_token_loss = wanted.per_token_loss,
      .ignore_padding = wanted.ignore_padding,
      .reset_attention_mask = wanted.reset_attention_mask,
      .gradient_bucket_elements = wanted.gradient_bucket_elements,
      .overlap_gradient_sums = wanted.early_collectives,
      .overlap_parameter_gathers = wanted.early_collectives,
      .loss_chunk_tokens = wanted.loss_chunk_tokens,
      .overlap = wanted.overlap,
      .precision = wanted.precision,
      .recompute = wanted.recompute,
      .offload = wanted.offload,
      .stash = wanted.stash,
      .passes = {.skipped = wanted.skipped_passes, .added = wanted.added_passes, .watch = watch}};
}

TrainingStep build_step(const LayoutCase& wanted, const ModelState& state,
                        const PassWatch& watch = verify_pass) {
  return build_training_step(wanted.model, state, step_options(wanted, watch));
}

double read_element(const TensorView& view, int64_t i) {
  switch (view.dtype) {
    case DType::f64:
      return view.as<double>()[i];
    case DType::f32:
      return view.as<float>()[i];
    case DType::bf16:
      return view.as<bf16>()[i];
    case DType::f8e4m3:
      return view.as<f8e4m3>()[i];
    default:
      TROUPE_CHECK(false, "no number");
  }
}

void write_element(const TensorView& view, int64_t i, double value) {
  switch (view.dtype) {
    case DType::f64:
      view.as<double>()[i] = value;
      break;
    case DType::f32:
      view.as<float>()[i] = static_cast<float>(value);
      break;
    default:
      view.as<bf16>()[i] = bf16(value);
      break;
  }
}

// What LayoutCase::crowded_layers add to an element of a parameter.
double crowding(const LayoutCase& wanted, const Parameter& parameter, int64_t element) {
  const auto& layers = wanted.crowded_layers;
  if (std::find(layers.begin(), layers.end(), parameter.layer) == layers.end() ||
      !parameter.name.ends_with("b_router")) {
    return 0;
  }
  const int32_t top_k = wanted.model.moe_router_topk;
  const int64_t first = int64_t{parameter.layer} * top_k % wanted.model.num_experts;
  return element >= first && element < first + top_k ? kCrowding : 0;
}

// One rank of a run.
class Rank {
 public:
  Rank(const LayoutCase& wanted, const RunOn& on, std::shared_ptr<const RunLayout> run,
       int32_t rank, ProcessGroup& group)
      : wanted_(wanted),
        on_(on),
        pool_(1),
        state_(declare_model_state(std::make_shared<const Model>(wanted.model, wanted.blocks),
                                   wanted.dtype, /*trained=*/true,
                                   {.run = std::move(run), .rank = rank})),
        step_(build_step(wanted, state_)),
        storage_(state_.table, on.device, on.device == Device::cuda ? rank % gpu_count() : 0) {
    MemoryPlan memory = plan(*step_.program);
    fallback_ = plan_fallback_step(wanted.model, state_, step_options(wanted), step_, memory,
                                   [&](const Program& program) { return plan(program); });
    const auto interpret = [&](const Program& program, MemoryPlan planned,
                               const Interpreter* memory_of) {
      return make_interpreter(
          program, std::move(planned), storage_, pool_,
          communicators_of(group, state_.part.layout(), rank),
          {.memory_of = memory_of, .capture = on.capture, .shares_gpu = !on.streams});
    };
    interpreters_.push_back(interpret(*step_.program, std::move(memory), nullptr));
    if (fallback_) {
      interpreters_.push_back(
          interpret(*fallback_->step.program, fallback_->memory, interpreters_[0].get()));
    }
    now_ = &step_;
    interpreter_ = interpreters_[0].get();
    for (const Parameter& parameter : state_.parameters) {
      const auto start = [&](StateId id, const IndexRange& part) {
        if (!id.valid() || !storage_.table()[id].is_stored) return;
        for_each_element(parameter, [&](int64_t own, int64_t element) {
          if (own < part.begin || own >= part.end) return;
          write_element(storage_.view(id), own - part.begin,
                        start_value(parameter, element) + crowding(wanted, parameter, element));
        });
      };
      start(parameter.value, parameter.held);
      start(parameter.master, parameter.shard);
    }
    storage_.to_device();
  }

  const Program& program() const { return *step_.program; }
  const Program* fallback_program() const {
    return fallback_ ? fallback_->step.program.get() : nullptr;
  }
  const ModelState& state() const { return state_; }

  void run_step(int64_t number) {
    now_ = &step_;
    interpreter_ = interpreters_[0].get();
    run_once(number);
    if (fallback_ && *interpreter_->view(step_.rooms_lacked).as<double>() > 0) {
      EXPECT_EQ(*interpreter_->view(step_.skipped).as<int32_t>(), 1);
      ++fallbacks_;
      now_ = &fallback_->step;
      interpreter_ = interpreters_[1].get();
      run_once(number);
    }
    storage_.to_host();
    storage_.gradients_to_host();
    measure(number);
  }

  // Of steps.
  int64_t fallbacks() const { return fallbacks_; }
  const std::vector<std::array<std::vector<double>, kHistoryKinds>>& code_counts() const {
    return code_counts_;
  }

  void run_once(int64_t number) {
    *interpreter_->view(now_->learning_rate).as<double>() = 1e-3;
    *interpreter_->view(now_->decoupled_learning_rate).as<double>() = 3e-3;
    *interpreter_->view(now_->weight_decay).as<double>() = 0.1;
    const ModelPart& part = state_.part;
    const int64_t step_samples = int64_t{part.layout().dp()} * wanted_.micro_batches;
    for (int32_t i = 0; i < wanted_.micro_batches; ++i) {
      const int64_t micro_batch =
          number * step_samples + int64_t{i} * part.layout().dp() + part.dense().dp;
      write_micro_batch(now_->micro_batches[static_cast<size_t>(i)], micro_batch);
    }
    *interpreter_->view(now_->update_number).as<int64_t>() = number;
    if (now_->step_number.valid()) {
      *interpreter_->view(now_->step_number).as<int64_t>() = number;
    }
    run_program(number);
  }

  // Adds what this rank holds to the outcome of the run.
  void gather(Outcome& outcome) const {
    for (const auto& [name, values] : own_) {
      const auto [place, is_new] = outcome.emplace(name, values);
      if (is_new) continue;
      ASSERT_EQ(place->second, values) << name << " of rank " << state_.part.rank;
    }
    for (const Held& held : held_) {
      std::vector<double>& whole = outcome[held.name];
      const auto elements = static_cast<size_t>(held.parameter->whole_shape.elements());
      if (whole.empty()) whole.assign(elements, std::nan(""));
      for_each_element(*held.parameter, [&](int64_t own, int64_t element) {
        if (own < held.part.begin || own >= held.part.end) return;
        double& value = whole[static_cast<size_t>(element)];
        const double found = held.values[static_cast<size_t>(own - held.part.begin)];
        if (std::isnan(value)) value = found;
        if (value == found) return;  // the macro takes its time
        ASSERT_EQ(value, found) << held.name << " element " << element << " of rank "
                                << state_.part.rank << " differs from another rank's";
      });
    }
  }

 private:
  // A tensor of the rank's slice of a parameter, or a part of it.
  struct Held {
    std::string name;
    const Parameter* parameter;
    IndexRange part;  // elements of the slice
    std::vector<double> values;
  };

  MemoryPlan plan(const Program& program) const {
    verify_program(program);
    MemoryPlan plan =
        on_.oracle ? plan_oracle(program, 1, on_.device) : plan_memory(program, 1, on_.device);
    verify_memory_plan(program, plan);
    return plan;
  }

  void run_program(int64_t number) {
    if (!on_.interleaving.has_value()) {
      interpreter_->run();
      return;
    }
    auto& interpreter = dynamic_cast<CpuInterpreter&>(*interpreter_);
    const Program& program = *now_->program;
    const std::vector<QueueEvent> events = find_queue_events(program, interpreter.plan());
    verify_queue_events(program, interpreter.plan(), events);
    const auto seed = *on_.interleaving + 4 * static_cast<uint32_t>(16 * number + state_.part.rank);
    for (const int32_t index : draw_interleaving(program, events, seed)) {
      interpreter.run_op(index);
    }
  }

  // Of a sample: where the document of each token begins. A token in four ends one.
  std::vector<int32_t> starts_of(int64_t sample) const {
    std::vector<int32_t> starts;
    int32_t start = 0;
    for (int32_t position = 0; position < wanted_.sequence; ++position) {
      starts.push_back(start);
      const auto token = static_cast<uint64_t>(sample * wanted_.sequence + position);
      if (random_below(4, kSeed, RandomStream::test, 2, token) == 0) start = position + 1;
    }
    return starts;
  }

  // Of sample `sample`, which is sequence `row` of the micro-batch.
  void write_starts(const BatchValues& batch, int64_t sample, int64_t row) {
    const std::vector<int32_t> starts = starts_of(sample);
    const auto write = [&](ValueId id, const SequenceChunks& chunks, bool of_chunks) {
      if (!id.valid()) return;
      const int64_t rows = batch.rows_of(chunks);
      auto* const target = interpreter_->view(id).as<int32_t>() + row * rows;
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t from = of_chunks ? chunks.chunk_begin(i, rows) : 0;
        target[i] =
            starts[static_cast<size_t>(chunks.position(i, rows))] - static_cast<int32_t>(from);
      }
    };
    write(batch.starts, batch.starts_chunks, false);
    write(batch.delta_starts, batch.delta_chunks, true);
  }

  void write_micro_batch(const BatchValues& batch, int64_t number) {
    const auto vocabulary = static_cast<uint64_t>(wanted_.model.vocab_size);
    const ModelPart& part = state_.part;
    const int32_t cp = part.layout().cp();
    const int64_t here = wanted_.sequence / cp;
    for (int64_t row = 0; row < wanted_.micro_batch_size; ++row) {
      const int64_t sample = number * wanted_.micro_batch_size + row;
      write_starts(batch, sample, row);
      for (int64_t i = 0; i < here; ++i) {
        const int64_t half = here / 2;
        int64_t position = i;
        if (cp > 1) {
          position = i < half ? part.dense().cp * half + i
                              : (2 * cp - 1 - part.dense().cp) * half + (i - half);
        }
        const auto draw = [&](uint32_t what) {
          return static_cast<int32_t>(
              random_below(vocabulary, kSeed, RandomStream::test, what,
                           static_cast<uint64_t>(sample * wanted_.sequence + position)));
        };
        const int64_t at = row * here + i;
        if (batch.tokens.valid()) interpreter_->view(batch.tokens).as<int32_t>()[at] = draw(0);
        write_valid(batch.valid, at - batch.first_valid, is_token(sample, position));
        write_shifted(batch, sample, position, at);
        if (!batch.labels.valid()) continue;
        interpreter_->view(batch.labels).as<int32_t>()[at] = draw(1);
        write_element(interpreter_->view(batch.mask), at, mask_at(sample, position));
      }
    }
  }

  // Samples, and so ranks of TP, CP and DP, differ in how many tokens are padding: some, most, all.
  static bool is_token(int64_t sample, int64_t position) {
    return position < 12 - 3 * (sample % 5) && position != sample % 3;
  }

  // Row `own` of those that the rank's routers see, if it is one.
  void write_valid(const ValidTokens& valid, int64_t own, bool is_token) {
    if (!valid.mask.valid() || own < 0 || own >= interpreter_->view(valid.mask).shape[0]) return;
    interpreter_->view(valid.mask).as<int32_t>()[own] = is_token ? 1 : 0;
  }

  // So that micro-batches differ in how many tokens count.
  static double mask_at(int64_t sample, int64_t position) {
    return position % (3 + sample % 3) == 1 ? 0 : 1;
  }

  // Of multi-token prediction: what stands at position + 1, ... of the sample, or 0.
  void write_shifted(const BatchValues& batch, int64_t sample, int64_t position, int64_t at) {
    const std::vector<int32_t> starts = starts_of(sample);
    for (size_t i = 0; i < batch.shifted.size(); ++i) {
      const int64_t there = position + static_cast<int64_t>(i) + 1;
      const bool exists = there < wanted_.sequence &&
                          (!batch.shifts_in_documents || starts[static_cast<size_t>(there)] ==
                                                             starts[static_cast<size_t>(position)]);
      const auto draw = [&](uint32_t what) {
        const auto token = static_cast<uint64_t>(sample * wanted_.sequence + there);
        const auto vocabulary = static_cast<uint64_t>(wanted_.model.vocab_size);
        const auto id = random_below(vocabulary, kSeed, RandomStream::test, what, token);
        return exists ? static_cast<int32_t>(id) : 0;
      };
      const BatchValues::Shifted& further = batch.shifted[i];
      write_valid(further.valid, at - batch.first_valid, exists && is_token(sample, there));
      if (further.tokens.valid()) interpreter_->view(further.tokens).as<int32_t>()[at] = draw(0);
      if (!further.labels.valid()) continue;
      interpreter_->view(further.labels).as<int32_t>()[at] = draw(1);
      write_element(interpreter_->view(further.mask), at, exists ? mask_at(sample, there) : 0);
    }
  }

  void measure(int64_t number) {
    const std::string step = "step " + std::to_string(number) + " ";
    const auto metric = [&](const std::string& name, ValueId id) {
      const TensorView view = interpreter_->view(id);
      const auto* data = view.as<double>();
      own_[step + name].assign(data, data + view.shape.elements());
    };
    EXPECT_EQ(*interpreter_->view(now_->skipped).as<int32_t>(), 0);
    metric("loss", now_->loss);
    for (size_t i = 0; i < now_->mtp_losses.size(); ++i) {
      metric("mtp loss " + std::to_string(i + 1), now_->mtp_losses[i]);
    }
    metric("grad_norm", now_->grad_norm);
    metric("zero gradients", now_->zero_gradients);
    metric("squared norm of the weights", now_->squared_parameter_norm);
    for (const LayerMetrics& layer : now_->layers) {
      const std::string at = "layer " + std::to_string(layer.layer) + " ";
      if (layer.counts.valid()) metric(at + "expert counts", layer.counts);
      if (layer.entropy.valid()) metric(at + "entropy", layer.entropy);
      if (layer.tokens.valid()) metric(at + "valid tokens", layer.tokens);
      for (const LayerMetrics::Loss& loss : layer.losses) {
        metric(at + std::string(name_of(loss.kind)), loss.value);
      }
    }
    measure_codes(step);
    for (const Parameter& parameter : state_.parameters) {
      const IndexRange& held = parameter.held;
      const IndexRange& shard = parameter.shard;
      hold(step + "gradient of ", parameter, parameter.gradient, shard, shard.begin - held.begin);
      if (number < kSteps) continue;
      const bool is_stored = (*state_.table)[parameter.value].is_stored;
      if (is_stored) hold("after it ", parameter, parameter.value, held, 0);
      if (!is_stored) hold("master after it ", parameter, parameter.master, shard, 0);
      for (const OptimizerTensor& tensor : parameter.optimizer) {
        hold("after it, " + tensor.name + " of ", parameter, tensor.values, shard, 0,
             tensor.scales);
      }
    }
    if (number < kSteps) return;
    for (const Parameter& parameter : state_.parameters) measure_history(parameter);
    for (const StateId id : state_.expert_biases) {
      if (!id.valid()) continue;
      const TensorView view = storage_.view(id);
      const auto* data = view.as<float>();
      own_["after it " + (*state_.table)[id].name].assign(data, data + view.shape.elements());
    }
  }

  // Shares: ranks that have the same codes count them each.
  void measure_codes(const std::string& step) {
    if (!now_->code_metrics[0].valid()) return;
    code_counts_.emplace_back();
    for (size_t operand = 0; operand < kHistoryKinds; ++operand) {
      const TensorView view = interpreter_->view(now_->code_metrics[operand]);
      const auto* all = view.as<double>();
      code_counts_.back()[operand].assign(all, all + view.shape.elements());
      for (const ParameterSpec& parameter : state_.model->parameters()) {
        const double* counts = all + int64_t{parameter.number()} * kCountsOfCodes;
        if (counts[0] == 0) continue;
        own_[step + "codes of " + parameter.full_name() + " " + std::to_string(operand)] = {
            counts[1] / counts[0], counts[2] / counts[0]};
      }
    }
  }

  // By expert, as ranks have others.
  void measure_history(const Parameter& parameter) {
    if (!parameter.amax_history.valid()) return;
    const TensorView view = storage_.view(parameter.amax_history);
    const bool experts = parameter.gradient_class == GradientClass::expert;
    const int64_t first = experts ? parameter.slice.ranges[0][0].begin : 0;
    for (int64_t i = 0; i < view.shape[0]; ++i) {
      const auto* data = view.as<float>() + i * view.shape.row_elements();
      own_["after it " + (*state_.table)[parameter.amax_history].name + " " +
           std::to_string(first + i)]
          .assign(data, data + view.shape.row_elements());
    }
  }

  // Elements `part` of the parameter, which begin at element `first` of the state tensor.
  void hold(const std::string& what, const Parameter& parameter, StateId id, const IndexRange& part,
            int64_t first, StateId scale = {}) {
    const TensorView view = storage_.view(id);
    ASSERT_LE(first + part.end - part.begin, view.shape.elements());
    std::vector<double> values;
    for (int64_t i = first; i < first + part.end - part.begin; ++i) {
      values.push_back(read_element(view, i));
      if (!scale.valid()) continue;
      const int64_t columns = view.shape.back();
      const int64_t block = i / columns * moment_blocks(columns) + i % columns / kMomentBlock;
      values.back() *= static_cast<double>(moment_scale(storage_.view(scale).as<uint8_t>()[block]));
    }
    held_.push_back(
        {what + (*state_.table)[parameter.value].name, &parameter, part, std::move(values)});
  }

  const LayoutCase& wanted_;
  const RunOn on_;
  ThreadPool pool_;
  ModelState state_;
  TrainingStep step_;
  StateStorage storage_;
  std::optional<FallbackStep> fallback_;
  std::vector<std::unique_ptr<Interpreter>> interpreters_;  // of the step, and of its fallback
  const TrainingStep* now_ = nullptr;                       // which of them
  Interpreter* interpreter_ = nullptr;
  int64_t fallbacks_ = 0;
  std::vector<std::array<std::vector<double>, kHistoryKinds>> code_counts_;  // by step
  Outcome own_;  // measurements, the same on all ranks
  std::vector<Held> held_;
};

}  // namespace

std::shared_ptr<const RunLayout> run_layout_of(const LayoutCase& wanted) {
  const bool even = wanted.stages.empty();
  const int32_t pp = wanted.layout.pipeline_parallel;
  const StagePlacement placement =
      wanted.schedule == PipelineSchedule::zb_v ? StagePlacement::v : StagePlacement::loop;
  PipelinePartition partition =
      even ? even_partition(wanted.model.num_layers, pp, wanted.chunks, placement).value()
           : parse_partition(wanted.stages, wanted.model.num_layers, wanted.model.mtp_num_layers,
                             pp, placement)
                 .value();
  if (even) partition.stages.back().mtp_layers = wanted.model.mtp_num_layers;
  LayoutOptions options = wanted.layout;
  options.embedding_places = partition.embedding_ranks(wanted.model.tie_embeddings);
  options.key_value_heads = wanted.model.num_query_groups;
  PipelineShape schedule{.schedule = wanted.schedule,
                         .ranks = pp,
                         .chunks = partition.chunks,
                         .micro_batches = wanted.micro_batches,
                         .merged = wanted.merged};
  return std::make_shared<const RunLayout>(RunLayout{
      .layout = Layout(options),
      .partition = partition,
      .schedule = schedule,
      .sharding = wanted.sharding,
      .main_gradients = wanted.main_gradients,
      .optimizer = wanted.optimizer != nullptr ? wanted.optimizer
                                               : adamw_of(wanted.exp_avg, wanted.exp_avg_sq),
      .optimizer_offload = wanted.optimizer_offload,
      .amax_history = wanted.amax_history,
      .weight_codes = wanted.weight_codes,
      .expert_room = wanted.expert_room,
      .expert_clones = wanted.expert_clones});
}

std::unique_ptr<const Program> program_of(const LayoutCase& layout, int32_t rank,
                                          const PassWatch& watch) {
  const ModelState state =
      declare_model_state(std::make_shared<const Model>(layout.model, layout.blocks), layout.dtype,
                          /*trained=*/true, {.run = run_layout_of(layout), .rank = rank});
  return build_step(layout, state, watch).program;
}

Outcome run_layout(const LayoutCase& layout, const RunOn& on) {
  const auto run = std::make_shared<RunLayout>(*run_layout_of(layout));
  run->is_staged.fill(on.nccl);
  const int32_t size = run->layout.world_size();
  ThreadGroup group(size, on.device == Device::cuda ? kPatientOnGpus : kPatient);
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int32_t rank = 0; rank < size; ++rank) {
    ranks.push_back(std::make_unique<Rank>(layout, on, run, rank, group));
  }
  std::vector<const Program*> programs;
  for (const auto& rank : ranks) programs.push_back(&rank->program());
  verify_collectives(programs, run->layout);
  if (ranks[0]->fallback_program() != nullptr) {
    std::vector<const Program*> fallbacks;
    for (const auto& rank : ranks) fallbacks.push_back(rank->fallback_program());
    verify_collectives(fallbacks, run->layout);
  }
  run_ranks(group, [&](int rank) {
    for (int64_t number = 1; number <= kSteps; ++number) {
      ranks[static_cast<size_t>(rank)]->run_step(number);
    }
  });
  Outcome outcome;
  for (const auto& rank : ranks) rank->gather(outcome);
  if (layout.fallbacks != nullptr) *layout.fallbacks = ranks[0]->fallbacks();
  if (layout.code_counts != nullptr) *layout.code_counts = ranks[0]->code_counts();
  return outcome;
}

Outcome run_one_rank(const LayoutCase& layout) {
  LayoutCase single = layout;
  const Layout ranks(run_layout_of(layout)->layout.options());
  single.layout = {};
  single.sharding = StateSharding::none;
  single.gradient_bucket_elements = 0;
  single.expert_room = 0;
  single.expert_clones = 0;
  single.early_collectives = false;
  single.merged = false;
  single.overlap = {};
  single.recompute = {};
  single.loss_chunk_tokens = 0;
  single.offload = {};
  single.stash = {};
  single.optimizer_offload = 0;
  single.stages.clear();
  single.chunks = 1;
  single.schedule = PipelineSchedule::one_f_one_b;
  single.micro_batches = layout.micro_batches * ranks.dp();
  return run_layout(single);
}

void expect_same_outcome(const Outcome& one, const Outcome& ranks) {
  for (const auto& [name, expected] : one) {
    const auto place = ranks.find(name);
    ASSERT_NE(place, ranks.end()) << name << " is on no rank";
    const std::vector<double>& found = place->second;
    ASSERT_EQ(found.size(), expected.size()) << name;
    double largest = 0;
    for (const double value : expected) largest = std::max(largest, std::abs(value));
    const double tolerance = kLayoutTolerance * largest;
    for (size_t i = 0; i < expected.size(); ++i) {
      if (std::abs(found[i] - expected[i]) <= tolerance) continue;
      ASSERT_NEAR(found[i], expected[i], tolerance) << name << " element " << i;
    }
  }
  ASSERT_EQ(one.size(), ranks.size());
}

void expect_same_bits(const Outcome& expected, const Outcome& found) {
  ASSERT_EQ(expected.size(), found.size());
  for (const auto& [name, values] : expected) {
    const auto place = found.find(name);
    ASSERT_NE(place, found.end()) << name;
    ASSERT_EQ(place->second.size(), values.size()) << name;
    if (place->second == values) continue;
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_EQ(place->second[i], values[i]) << name << " element " << i;
    }
  }
}

}  // namespace troupe::testing
