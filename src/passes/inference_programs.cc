#include "passes/inference_programs.h"

#include "model/batch_inputs.h"
#include "model/decoder.h"
#include "model/pipeline_work.h"
#include "passes/pipeline_messages.h"
#include "passes/step_inputs.h"
#include "passes/step_metrics.h"

namespace troupe {
namespace {

InferenceStep build_inference(const ModelConfig& config, const ModelState& state, int32_t batch,
                              int32_t sequence, bool with_loss, bool keep_logits,
                              RoutingTrace trace, int32_t loss_chunk_tokens,
                              bool reset_attention_mask, const MessageRounding& rounding) {
  InferenceStep step;
  step.program = std::make_unique<Program>(state.table);
  step.program->set_staged_groups(state.part.staged_groups());
  Builder builder(*step.program);
  const ModelPart& part = state.part;
  const DType wide = accumulation_dtype(state.dtype);
  step.batch = declare_batch_of(builder, part, batch, sequence, with_loss, wide);
  const ContextExchange exchange = ContextExchange::p2p;
  if (reset_attention_mask) declare_starts(builder, config, part, exchange, step.batch);
  std::vector<LossMetric> losses;
  if (with_loss) {
    step.loss = builder.metric("loss", DType::f64, {1});
    losses.push_back({.sum = step.loss, .tokens = {}});
  }
  if (!keep_logits) {
    step.layers = declare_layer_metrics(builder, config, /*training=*/false,
                                        /*ignore_padding=*/false, /*slots=*/0);
  }
  SharedTables tables = build_tables(builder, state, rows_of_sequence(part, sequence), wide);
  step.selected = declare_selections(builder, config, part,
                                     stream_shape(config, part, batch, sequence)[0], trace);

  StageMessages messages(builder, state.dtype, stream_shape(config, part, batch, sequence));
  MetricSums sums(builder);
  std::vector<ForwardResult> stages;
  ValueId stream;  // what the last stage before left
  for (const PipelineWork& work : forward_work(part)) {
    builder.place = Place{.chunk = static_cast<int16_t>(work.step.chunk)};
    if (work.step.action == PipelineAction::receive_activation) {
      stream = messages.receive(work.step.peer, /*streams=*/1, "stage_in");
    } else if (work.step.action == PipelineAction::send_activation) {
      messages.send(stream, work.step.peer);
    } else {
      stages.push_back(build_forward(builder, state, tables, step.batch,
                                     {.chunk = work.step.chunk,
                                      .input = stream,
                                      .messages = rounding,
                                      .expert_rounds = true,
                                      .context_exchange = exchange,
                                      .loss_chunk_tokens = loss_chunk_tokens,
                                      .selected = step.selected}));
      stream = stages.back().output;
      for (Head& head : stages.back().heads) {
        for (const Head::Chunk& chunk : head.chunks) {
          const LossResult result = build_loss(builder, state, head, chunk);
          if (keep_logits) step.logits = result.logits;
          if (with_loss) head.losses.push_back(result.loss);
        }
      }
    }
  }
  messages.finish_all();
  builder.place = Place{};
  for (const ForwardResult& forward : stages) {
    if (trace == RoutingTrace::recorded) {
      record_selections(*step.program, config, forward, step.selected);
    }
    if (with_loss) {
      accumulate_metrics(builder, config, part, forward, losses, step.layers, sums, /*share=*/1.0,
                         /*loss_share=*/1.0);
    }
  }
  if (step.logits.valid()) step.program->add_result(step.logits);
  for (const ValueId metric : metrics_of(losses, step.layers)) sums.add_nothing(metric);
  return step;
}

}  // namespace

InferenceStep build_evaluation_step(const ModelConfig& config, const ModelState& state,
                                    int32_t batch, int32_t sequence, int32_t loss_chunk_tokens,
                                    bool reset_attention_mask, const PrecisionOptions& precision) {
  InferenceStep step = build_inference(config, state, batch, sequence, /*with_loss=*/true,
                                       /*keep_logits=*/false, RoutingTrace::none, loss_chunk_tokens,
                                       reset_attention_mask, precision.messages);
  if (precision.any()) {
    std::vector<WorkSegment> segments;  // nothing is differentiated
    step.program->select_ops(lower_precision(*step.program, segments, state, precision,
                                             /*skip=*/ValueId{}, /*code_metrics=*/{}));
  }
  return step;
}

InferenceStep build_logits_step(const ModelConfig& config, const ModelState& state, int32_t batch,
                                int32_t sequence, bool with_loss, RoutingTrace trace) {
  return build_inference(config, state, batch, sequence, with_loss, /*keep_logits=*/true, trace,
                         /*loss_chunk_tokens=*/0, /*reset_attention_mask=*/false, /*rounding=*/{});
}

}  // namespace troupe
