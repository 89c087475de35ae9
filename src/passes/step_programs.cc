#include "passes/step_programs.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "model/batch_inputs.h"
#include "model/decoder.h"
#include "model/pipeline_work.h"
#include "ops/elementwise/add/add.h"
#include "ops/losses/token_count/token_count.h"
#include "passes/autodiff.h"
#include "passes/communication_order.h"
#include "passes/loss_chunks.h"
#include "passes/loss_weights.h"
#include "passes/message_codes.h"
#include "passes/pass_pipeline.h"
#include "passes/pipeline_messages.h"
#include "passes/rank_sums.h"
#include "passes/stash.h"
#include "passes/step_inputs.h"
#include "passes/step_metrics.h"
#include "passes/step_schedule.h"
#include "passes/step_update.h"

namespace troupe {
namespace {

// Emits the forward and backward work of one rank, and the messages between, in the order in which
// stages have their turns; notes which operations are whose work.
class TrainingEmission {
 public:
  TrainingEmission(Builder& builder, const ModelConfig& config, const ModelState& state,
                   const TrainingStepOptions& options, const std::vector<LossMetric>& losses,
                   TrainingStep& step)
      : builder_(builder),
        config_(config),
        state_(state),
        part_(state.part),
        options_(options),
        loss_metrics_(losses),
        step_(step),
        wide_(accumulation_dtype(state.dtype)),
        share_(1.0 / (options.micro_batches * state.part.layout().dp())),
        tables_(build_tables(builder, state, rows_of_sequence(part_, options.sequence), wide_)),
        messages_(builder, state.dtype,
                  stream_shape(config, part_, options.micro_batch_size, options.sequence)),
        sums_(builder),
        main_gradients_(*state.table),
        running_counts_(static_cast<size_t>(config.all_layers())),
        stage_work_(static_cast<size_t>(options.micro_batches) *
                    static_cast<size_t>(part_.partition().chunks)) {
    step.micro_batches.resize(static_cast<size_t>(options.micro_batches));
    step.selected.resize(static_cast<size_t>(options.micro_batches));
    weights_.emplace(builder, config, part_, options, wide_, step.loss_scale,
                     [this](size_t i) -> const BatchValues& { return batch_of(i); });
  }

  void emit_all() {
    for (const PipelineWork& work : training_work(part_, options_.micro_batches)) {
      builder_.place = Place{.chunk = static_cast<int16_t>(work.step.chunk),
                             .micro_batch = work.step.micro_batch};
      for (const int32_t peer : work.finished) messages_.finish(peer);
      emit(work.step);
    }
    messages_.finish_all();
    for (const Parameter& parameter : state_.parameters) {
      TROUPE_CHECK(main_gradients_.written[parameter.gradient],
                   "no gradient reaches " + (*state_.table)[parameter.value].name);
    }
  }

  MetricSums& sums() { return sums_; }

  // Of all operations.
  std::vector<WorkSegment> take_segments() { return std::move(segments_); }

 private:
  BatchValues& batch_of(size_t micro_batch) {
    BatchValues& batch = step_.micro_batches[micro_batch];
    if (batch.batch == 0) {
      batch = declare_batch_of(builder_, part_, options_.micro_batch_size, options_.sequence,
                               /*with_labels=*/true, wide_);
      declare_shifted(builder_, config_, part_, wide_, batch);
      batch.shifts_in_documents = options_.reset_attention_mask;
      if (options_.reset_attention_mask) {
        declare_starts(builder_, config_, part_, options_.context_exchange, batch);
      }
      if (options_.ignore_padding) {
        declare_valid_tokens(
            builder_, config_, part_,
            stream_shape(config_, part_, options_.micro_batch_size, options_.sequence)[0], batch);
      }
    }
    return batch;
  }

  // What one stage does for one micro-batch.
  struct StageWork {
    int32_t first = 0;  // the forward operations that are differentiated
    int32_t last = 0;
    ValueId input;   // the residual stream; invalid where tokens are embedded
    ValueId output;  // the same after the stage; invalid in the stage with the loss
    std::vector<GradientSeed> seeds;  // of losses, or of what their gradients have come to
    // Of a loss in several chunks, each of which is differentiated on its own.
    struct LossChunk {
      int32_t first = 0;  // operations
      int32_t last = 0;
      ValueId rows;
      GradientSeed loss;
    };
    std::vector<LossChunk> loss_chunks;
    ValueId head_weight;
    ValueId d_input;
    ValueId d_output;
  };

  StageWork& work_of(int32_t micro_batch, int32_t chunk) {
    return stage_work_[static_cast<size_t>(micro_batch) *
                           static_cast<size_t>(part_.partition().chunks) +
                       static_cast<size_t>(chunk)];
  }

  // The work of the stage before (-1) or after (1) it, if it is this rank's own.
  StageWork* neighbour(const PipelineStep& item, int32_t distance) {
    const PipelinePartition& partition = part_.partition();
    const int32_t pp = part_.dense().pp;
    const int32_t stage =
        stage_at(partition.placement, partition.ranks, {pp, item.chunk}) + distance;
    if (stage < 0 || stage >= static_cast<int32_t>(partition.stages.size())) return nullptr;
    const StagePlace place = partition.place_of(stage);
    return place.rank == pp ? &work_of(item.micro_batch, place.chunk) : nullptr;
  }

  // Between the stage of a piece of work and the one before (0) or after (1) it.
  int32_t streams_of(const PipelineStep& item, int32_t distance) const {
    const PipelinePartition& partition = part_.partition();
    return partition.streams_into(
        stage_at(partition.placement, partition.ranks, {part_.dense().pp, item.chunk}) + distance);
  }

  void emit(const PipelineStep& item) {
    StageWork& own = work_of(item.micro_batch, item.chunk);
    WorkSegment segment{.step = item, .begin = builder_.program().op_count()};
    switch (item.action) {
      case PipelineAction::forward:
        if (const StageWork* before = neighbour(item, -1)) own.input = before->output;
        emit_forward(item, own);
        segment.differentiated_end = own.last;
        for (const StageWork::LossChunk& chunk : own.loss_chunks) {
          segment.chunk_ends.push_back(chunk.last);
        }
        break;
      case PipelineAction::backward:
      case PipelineAction::data_gradient:
        if (const StageWork* next = neighbour(item, 1)) own.d_output = next->d_input;
        segment.chunk_ends = emit_chunk_gradients(own);
        emit_backward(own);
        break;
      case PipelineAction::weight_gradient:
        break;  // emitted with the data gradients, and put here by the schedule
      case PipelineAction::receive_activation:
        own.input = messages_.receive(item.peer, streams_of(item, 0), "stage_in");
        break;
      case PipelineAction::send_activation:
        messages_.send(own.output, item.peer);
        break;
      case PipelineAction::receive_gradient:
        builder_.place.phase = Phase::data_gradient;
        own.d_output = messages_.receive(item.peer, streams_of(item, 1), "d_stage_out");
        break;
      case PipelineAction::send_gradient:
        builder_.place.phase = Phase::data_gradient;
        messages_.send(own.d_input, item.peer);
        break;
    }
    segment.end = builder_.program().op_count();
    if (is_compute(item.action)) segments_.push_back(std::move(segment));
  }

  void emit_forward(const PipelineStep& item, StageWork& own) {
    const auto number = static_cast<size_t>(item.micro_batch);
    const BatchValues& batch = batch_of(number);
    std::vector<ValueId>& selected = step_.selected[number];
    if (selected.empty()) {
      selected = declare_selections(
          builder_, config_, part_,
          stream_shape(config_, part_, options_.micro_batch_size, options_.sequence)[0],
          options_.routing_trace);
    }
    const std::vector<ValueId> d_auxiliary_losses = weights_->d_auxiliary_losses(batch);
    own.first = builder_.program().op_count();
    const bool replayed = options_.routing_trace == RoutingTrace::replayed;
    ForwardResult forward =
        build_forward(builder_, state_, tables_, batch,
                      {.chunk = item.chunk,
                       .input = own.input,
                       .training = true,
                       .micro_batch = part_.global_micro_batch(item.micro_batch),
                       .dispatcher = options_.dispatcher,
                       .messages = options_.precision.messages,
                       .stores_activation_inputs = options_.precision.stores_activation_inputs,
                       .expert_rounds = options_.expert_rounds,
                       .context_exchange = options_.context_exchange,
                       .seed = options_.seed,
                       .step = step_.step_number,
                       .loss_tokens = weights_->tokens(),
                       .loss_chunk_tokens = options_.loss_chunk_tokens,
                       .selected = replayed ? selected : std::vector<ValueId>{},
                       .running_counts = &running_counts_});
    own.output = forward.output;
    emit_losses(forward, own);
    for (const auto& auxiliary : forward.auxiliary_losses) {
      const int32_t depth = std::max(0, auxiliary.layer - config_.num_layers + 1);
      own.seeds.push_back({auxiliary.value, d_auxiliary_losses[static_cast<size_t>(depth)]});
    }
    if (options_.routing_trace == RoutingTrace::recorded) {
      record_selections(builder_.program(), config_, forward, selected);
    }
    accumulate_metrics(builder_, config_, part_, forward, loss_metrics_, step_.layers, sums_,
                       share_,
                       /*loss_share=*/1);
    measure_rooms(builder_, part_, forward, step_.rooms_lacked, step_.fullest_room, sums_);
  }

  // The end of a forward pass.
  void emit_losses(ForwardResult& forward, StageWork& own) {
    own.last = builder_.program().op_count();
    for (size_t depth = 0; depth < forward.heads.size(); ++depth) {
      Head& head = forward.heads[depth];
      const bool is_whole = head.chunks.size() == 1;
      own.head_weight = head.weight;
      for (const Head::Chunk& chunk : head.chunks) {
        const int32_t first = builder_.program().op_count();
        const ValueId loss = build_loss(builder_, state_, head, chunk).loss;
        head.losses.push_back(loss);
        const int32_t last = builder_.program().op_count();
        if (is_whole) {
          own.seeds.push_back({loss, weights_->d_loss(depth)});
          own.last = last;
        } else {
          own.loss_chunks.push_back({first, last, chunk.rows, {loss, weights_->d_loss(depth)}});
        }
      }
    }
  }

  // The backward pass of a loss in chunks, as far as the chunks' rows, whose gradients are seeds of
  // what follows. Says where each chunk ends.
  std::vector<int32_t> emit_chunk_gradients(StageWork& own) {
    std::vector<int32_t> ends;
    ValueId d_weight;  // of a weight that was gathered from shards
    for (const StageWork::LossChunk& chunk : own.loss_chunks) {
      const std::vector<GradientSeed> seed = {chunk.loss};
      std::vector<ValueId> inputs = {chunk.rows};
      if (!is_state(builder_.value(own.head_weight).role)) inputs.push_back(own.head_weight);
      const IdVector<ValueId, ValueId> gradients =
          append_backward(builder_, chunk.first, chunk.last, seed, inputs, main_gradients_);
      own.seeds.push_back({chunk.rows, gradients[chunk.rows]});
      if (inputs.size() > 1) {
        const ValueId term = gradients[own.head_weight];
        builder_.place.phase = Phase::data_gradient;
        d_weight = d_weight.valid() ? add(builder_, d_weight, term, "d_head") : term;
      }
      ends.push_back(builder_.program().op_count());
    }
    if (d_weight.valid()) own.seeds.push_back({own.head_weight, d_weight});
    return ends;
  }

  void emit_backward(StageWork& own) {
    std::vector<GradientSeed> seeds = std::move(own.seeds);
    if (own.output.valid()) seeds.push_back({own.output, own.d_output});
    std::vector<ValueId> inputs;
    if (own.input.valid()) inputs.push_back(own.input);
    const IdVector<ValueId, ValueId> gradients =
        append_backward(builder_, own.first, own.last, seeds, inputs, main_gradients_);
    if (!own.input.valid()) return;
    own.d_input = gradients[own.input];
    TROUPE_CHECK(own.d_input.valid(), "no gradient reaches the stage before");
  }

  Builder& builder_;
  const ModelConfig& config_;
  const ModelState& state_;
  const ModelPart& part_;
  const TrainingStepOptions& options_;
  const std::vector<LossMetric>& loss_metrics_;
  TrainingStep& step_;
  const DType wide_;
  const double share_;
  SharedTables tables_;
  std::optional<LossWeights> weights_;
  StageMessages messages_;
  MetricSums sums_;
  MainGradients main_gradients_;
  std::vector<ValueId> running_counts_;
  std::vector<StageWork> stage_work_;  // by micro-batch and chunk
  std::vector<WorkSegment> segments_;
};

}  // namespace

TrainingStep build_training_step(const ModelConfig& config, const ModelState& state,
                                 const TrainingStepOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  TrainingStep step;
  step.program = std::make_unique<Program>(state.table);
  step.program->set_staged_groups(state.part.staged_groups());
  Builder builder(*step.program);

  step.learning_rate = builder.input("learning_rate", DType::f64, {1});
  if (options.decoupled_learning_rate) {
    step.decoupled_learning_rate = builder.input("decoupled_learning_rate", DType::f64, {1});
  }
  step.weight_decay = builder.input("weight_decay", DType::f64, {1});
  step.update_number = builder.input("update_number", DType::i64, {1});
  if (options.scale_loss) step.loss_scale = builder.input("loss_scale", DType::f64, {1});
  if (draws_random_numbers(config)) {
    step.step_number = builder.input("step_number", DType::i64, {1});
  }
  const std::vector<LossMetric> losses =
      declare_losses(builder, config, options.per_token_loss, step);
  const int32_t slots = options.expert_rounds ? 0 : state.part.expert_slots(config.num_experts);
  step.layers =
      declare_layer_metrics(builder, config, /*training=*/true, options.ignore_padding, slots);
  declare_rooms(builder, config, state.part, options, step);

  TrainingEmission emission(builder, config, state, options, losses, step);
  for (const ValueId each : {step.pages_lacked, step.most_pages}) {
    emission.sums().add_nothing(each);
  }
  if (options.precision.counts_codes) {
    step.code_metrics = declare_code_metrics(builder, *state.model);
    for (const ValueId each : step.code_metrics) emission.sums().add_nothing(each);
  }
  emission.emit_all();
  builder.place = Place{.phase = Phase::optimizer};
  sum_gradients_over_ranks(builder, state, options.gradient_bucket_elements);
  emission.sums().add_nothing(step.fullest_room);
  if (step.pages_lacked.valid()) emission.sums().add(step.rooms_lacked, step.pages_lacked, 1);
  reduce_metrics(builder, state, step, losses, emission.sums());
  for (const LossMetric& loss : losses) {
    if (loss.tokens.valid()) token_mean(builder, loss.sum, loss.tokens);
  }
  build_update(builder, config, state, options, step);
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;

  PassPipeline passes(*step.program, options.passes, taken.count());
  std::vector<WorkSegment> segments = emission.take_segments();
  if (options.loss_chunk_tokens > 0) {
    passes.run(PassId::loss_chunks,
               [&](const Program& program) { return order_loss_chunks(program, segments); });
  }
  if (options.precision.messages.any()) {
    passes.run(PassId::messages, [&](Program& program) { return send_codes(program, segments); });
  }
  if (options.precision.any()) {
    passes.run(PassId::precision, [&](Program& program) {
      return lower_precision(program, segments, state, options.precision, step.skipped,
                             step.code_metrics);
    });
  }
  if (options.recompute.any() || options.expert_rounds || state.part.run->expert_clones > 0 ||
      state.part.run->sharding == StateSharding::parameters) {
    passes.run(PassId::recompute, [&](Program& program) {
      return recompute_activations(program, segments, options.recompute);
    });
  }
  if (options.offload.any()) {
    passes.run(PassId::offload, [&](Program& program) {
      return offload_activations(program, segments, options.offload);
    });
  }
  passes.run(PassId::schedule, [&](const Program& program) {
    return order_segments(program, segments, options.overlap);
  });
  if (options.offload.any()) passes.run(PassId::copies, order_copies);
  if (step.pages_lacked.valid()) {
    passes.run(PassId::stash, [&](Program& program) {
      return stash_expert_rows(program, options.stash, step.pages_lacked, step.most_pages);
    });
  }
  if (options.overlap_gradient_sums) passes.run(PassId::gradient_sums, order_gradient_sums_early);
  if (options.overlap_parameter_gathers) passes.run(PassId::gathers, order_gathers_early);
  if (options.overlap.multiprocessors > 0) {
    passes.run(PassId::multiprocessors, [&](Program& program) {
      return leave_multiprocessors(program, options.overlap.multiprocessors);
    });
  }
  passes.run_added();
  return step;
}

}  // namespace troupe
