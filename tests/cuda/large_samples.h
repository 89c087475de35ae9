// Samples for the GPU: of several tiles, blocks and chunks, with sizes that are no multiples of
// them, where the operations' own samples are small. Without finite differences they may be large.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "base/random.h"
#include "ops/attention/attention/attention.h"
#include "ops/attention/attention/document_starts.h"
#include "ops/attention/causal_conv/causal_conv.h"
#include "ops/attention/context_attention/context_attention.h"
#include "ops/attention/fold_delta_states/fold_delta_states.h"
#include "ops/attention/gated_delta_rule/gated_delta_rule.h"
#include "ops/attention/gated_delta_rule/gated_delta_state.h"
#include "ops/attention/rope/rope.h"
#include "ops/attention/sparse_attention/choice_samples.h"
#include "ops/attention/sparse_attention/sparse_attention.h"
#include "ops/elementwise/activation/activation.h"
#include "ops/elementwise/row_gate/row_gate.h"
#include "ops/experts/combine/combine.h"
#include "ops/experts/grouped_linear/grouped_linear.h"
#include "ops/experts/permute/permute.h"
#include "ops/losses/cross_entropy/cross_entropy.h"
#include "ops/norms/qk_norm/qk_norm.h"
#include "ops/norms/rms_norm/rms_norm.h"
#include "ops/optimizer/newton_schulz/newton_schulz.h"
#include "ops/precision/quantize/quantize.h"
#include "ops/precision/quantized_grouped_linear/quantized_grouped_linear.h"
#include "ops/precision/quantized_linear/quantized_linear.h"
#include "ops/precision/quantized_product.h"
#include "ops/products/embedding/embedding.h"
#include "ops/products/linear/linear.h"
#include "ops/routing/count_experts/count_experts.h"
#include "ops/routing/route/route.h"
#include "ops/routing/router_topk/router_topk.h"
#include "ops/routing/sinkhorn/sinkhorn.h"
#include "program/op_sample.h"
#include "program/op_spec.h"

namespace troupe::testing {
// The operation whose kernels a sample is for, and the sample.
struct LargeSample {
  const OpSpec* spec;
  OpSample sample;
};

inline std::vector<int32_t> draw(int64_t count, uint64_t bound, uint32_t stream) {
  std::vector<int32_t> numbers;
  for (int64_t i = 0; i < count; ++i) {
    numbers.push_back(static_cast<int32_t>(
        random_below(bound, /*seed=*/5, RandomStream::test, stream, static_cast<uint64_t>(i))));
  }
  return numbers;
}

inline OpSample linear_sample(int64_t t, int64_t n, int64_t k, bool bias, LinearOutput output) {
  return {"linear " + std::to_string(t) + "x" + std::to_string(n) + "x" + std::to_string(k) +
              (bias ? " bias" : "") + (output == LinearOutput::compute ? "" : " wide"),
          [=](SampleBuilder& sample) {
            const ValueId x = sample.tensor("x", {t, k});
            const ValueId w = sample.tensor("w", {n, k}, {.deviation = 0.1});
            const ValueId b = bias ? sample.tensor("b", {n}) : ValueId{};
            sample.result(linear(sample.builder(), x, w, {.bias = b, .output = output}, "y"));
          }};
}

// f32 matrices with products in bf16 where the sample's compute type is that.
inline OpSample newton_schulz_sample(const Shape& shape, NewtonSchulzAttributes attributes) {
  return {"newton_schulz " + shape.to_string(), [=](SampleBuilder& sample) {
            NewtonSchulzAttributes of_type = attributes;
            if (sample.dtype() == DType::bf16) of_type.arithmetic = NewtonSchulzArithmetic::bf16;
            const ValueId x =
                sample.tensor("x", shape, {.differentiable = false, .accumulation = true});
            sample.result_without_gradient(newton_schulz(sample.builder(), x, of_type, "y"));
          }};
}

// `bound` rows, of which the last offset are live, in groups for experts with weights [n, k];
// products(builder, x, w, rows) gives the result.
template <class Products>
OpSample grouped_sample_of(const std::string& name, int64_t n, int64_t k,
                           const std::vector<int32_t>& offsets, int64_t bound,
                           const Products& products) {
  return {name, [=](SampleBuilder& sample) {
            const auto experts = static_cast<int32_t>(offsets.size()) - 1;
            const ValueId rows = sample.integers("offsets", {experts + 1}, offsets);
            SampleBuilder::Options options;
            options.rows = rows;
            options.rows_element = experts;
            const ValueId x = sample.tensor("x", {bound, k}, options);
            const ValueId w = sample.tensor("w", {experts, n, k}, {.deviation = 0.1});
            sample.result(products(sample.builder(), x, w, rows));
          }};
}

inline OpSample grouped_sample(int64_t n, int64_t k, const std::vector<int32_t>& offsets,
                               int64_t bound) {
  return grouped_sample_of(
      "grouped " + std::to_string(bound) + "x" + std::to_string(n) + "x" + std::to_string(k), n, k,
      offsets, bound, [](Builder& builder, ValueId x, ValueId w, ValueId rows) {
        return grouped_linear(builder, x, w, rows, "y");
      });
}

// The last `more` experts have their weights in a second tensor.
inline OpSample grouped_copies_sample(int64_t n, int64_t k, const std::vector<int32_t>& offsets,
                                      int64_t bound, int32_t more) {
  return {
      "grouped copies " + std::to_string(bound) + "x" + std::to_string(n) + "x" + std::to_string(k),
      [=](SampleBuilder& sample) {
        const auto experts = static_cast<int32_t>(offsets.size()) - 1;
        const ValueId rows = sample.integers("offsets", {experts + 1}, offsets);
        SampleBuilder::Options options;
        options.rows = rows;
        options.rows_element = experts;
        const ValueId x = sample.tensor("x", {bound, k}, options);
        const ValueId w = sample.tensor("w", {experts - more, n, k}, {.deviation = 0.1});
        const ValueId copies = sample.tensor("copies", {more, n, k}, {.deviation = 0.1});
        sample.result(grouped_linear(sample.builder(), x, w, rows, "y", copies));
      }};
}

// Codes by scales that are given, in rows and transposed, and the largest elements found beside.
inline OpSample measured_sample(int64_t rows, int64_t columns, const std::vector<int32_t>& offsets,
                                DType format) {
  return {"measured " + std::to_string(rows) + "x" + std::to_string(columns) + " " +
              std::string(name_of(format)),
          [=](SampleBuilder& sample) {
            const bool grouped = !offsets.empty();
            const auto experts = static_cast<int32_t>(offsets.size()) - 1;
            SampleBuilder::Options constant;
            constant.differentiable = false;
            constant.dtype = DType::bf16;
            ValueId begins;
            if (grouped) {
              begins = sample.integers("offsets", {experts + 1}, offsets);
              constant.rows = begins;
              constant.rows_element = experts;
            }
            const ValueId x = sample.tensor("x", {rows, columns}, constant);
            SampleBuilder::Options before;
            before.differentiable = false;
            before.dtype = DType::f32;
            const int64_t matrices = grouped ? experts : 1;
            const ValueId amax =
                sample.values("before", {matrices, 1},
                              std::vector<double>(static_cast<size_t>(matrices), 1.5), before);
            const Quantized q =
                quantize(sample.builder(), x, begins, amax,
                         {.format = format, .order = CodesOrder::both, .measures = true}, "q");
            sample.result_without_gradient(q.amax);
            sample.result_without_gradient(q.rows.scales);
          }};
}

// Codes of rows that are gathered from tokens, by scales that are given or of blocks, and products
// of them: with a weight, and of the transposed codes with themselves.
inline OpSample gathered_sample(int64_t tokens, int64_t columns, bool blocks) {
  constexpr int32_t kExperts = 5;
  constexpr int32_t kTopK = 3;
  return {
      "gathered " + std::to_string(tokens) + "x" + std::to_string(columns) +
          (blocks ? " blocks" : ""),
      [=](SampleBuilder& sample) {
        Builder& builder = sample.builder();
        // Each token's experts differ; every ninth slot is dropped, and expert 1 has no rows.
        std::vector<int32_t> chosen;
        for (int32_t slot = 0; slot < tokens * kTopK; ++slot) {
          const int32_t expert = (slot / kTopK * 2 + slot % kTopK) % kExperts;
          chosen.push_back(slot % 9 == 4 || expert == 1 ? -1 : expert);
        }
        const ValueId indices = sample.integers("indices", {tokens, kTopK}, chosen);
        const Routing routing =
            route(builder, indices, {.experts = kExperts, .row_multiple = 8}, "routing");
        SampleBuilder::Options constant;
        constant.differentiable = false;
        constant.dtype = DType::bf16;
        const ValueId x = sample.tensor("x", {tokens, columns}, constant);
        const ValueId w = sample.tensor("w", {kExperts, 128, columns}, constant);
        const BlockShape along_rows = blocks ? BlockShape{1, 128} : BlockShape{};
        const BlockShape along_columns = blocks ? BlockShape{128, 1} : BlockShape{};
        const BlockShape square = blocks ? BlockShape{128, 128} : BlockShape{};
        ValueId amax;
        if (!blocks) {
          SampleBuilder::Options before = constant;
          before.dtype = DType::f32;
          amax = sample.values("before", {kExperts, 1}, std::vector<double>(kExperts, 1.5), before);
        }
        const Quantized q = quantize(builder, x, routing.offsets, amax,
                                     {.rule = blocks ? ScaleRule::power_of_two : ScaleRule::ratio,
                                      .block = along_rows,
                                      .order = CodesOrder::both,
                                      .transposed_block = along_columns,
                                      .measures = !blocks,
                                      .top_k = kTopK},
                                     "q", routing.row_slot);
        if (q.amax.valid()) sample.result_without_gradient(q.amax);
        const Codes of_w =
            quantize(builder, w, {}, {}, {DType::f8e4m3, ScaleRule::power_of_two, square}, "w_q")
                .rows;
        using Form = QuantizedProductAttributes;
        sample.result_without_gradient(builder.emit(
            kQuantizedGroupedLinear,
            Attributes(Form{.compute = sample.dtype(),
                            .operands = {Form::Operand{along_rows}, Form::Operand{square}}}),
            {q.rows.codes, of_w.codes, q.rows.scales, of_w.scales, routing.offsets}, "y")[0]);
        const auto transposed =
            Form::transposed(along_columns, {builder.value(q.rows.codes).shape[0], columns});
        sample.result_without_gradient(builder.emit(
            kQuantizedGroupedLinearWeightGradient,
            Attributes(Form{.compute = sample.dtype(), .operands = {transposed, transposed}}),
            {q.transposed.codes, q.transposed.codes, q.transposed.scales, q.transposed.scales,
             routing.offsets, ValueId{}},
            "dw")[0]);
      }};
}

// A product of operands in 8 bits and both its gradients, dense or, with `offsets`, of experts.
// Codes are those of bf16 numbers, in all dtypes. `blocks`: with a scale for each 128 along the sum
// (of weights 128 x 128), powers of two; otherwise with one scale for each operand.
inline OpSample codes_sample(int64_t rows, int64_t n, int64_t k,
                             const std::vector<int32_t>& offsets, bool blocks,
                             DType of_gradient = DType::f8e4m3) {
  const std::string name = (offsets.empty() ? "codes " : "codes of experts ") +
                           std::to_string(rows) + "x" + std::to_string(n) + "x" +
                           std::to_string(k) + (blocks ? " blocks " : " ") +
                           std::string(name_of(of_gradient));
  return {name, [=](SampleBuilder& sample) {
            Builder& builder = sample.builder();
            const bool grouped = !offsets.empty();
            const auto experts = static_cast<int32_t>(offsets.size()) - 1;
            const ValueId begins =
                grouped ? sample.integers("offsets", {experts + 1}, offsets) : ValueId{};
            SampleBuilder::Options constant;
            constant.differentiable = false;
            constant.dtype = DType::bf16;
            SampleBuilder::Options of_rows = constant;
            if (grouped) {
              of_rows.rows = begins;
              of_rows.rows_element = experts;
            }
            const ValueId x = sample.tensor("x", {rows, k}, of_rows);
            const ValueId dy = sample.tensor("dy", {rows, n}, of_rows);
            const ValueId w =
                sample.tensor("w", grouped ? Shape{experts, n, k} : Shape{n, k}, constant);
            SampleBuilder::Options plain;
            plain.differentiable = false;
            const ValueId bias = grouped ? ValueId{} : sample.tensor("bias", {n}, plain);
            const BlockShape along_rows = blocks ? BlockShape{1, 128} : BlockShape{};
            const BlockShape along_columns = blocks ? BlockShape{128, 1} : BlockShape{};
            const BlockShape square = blocks ? BlockShape{128, 128} : BlockShape{};
            const ScaleRule rule = blocks ? ScaleRule::power_of_two : ScaleRule::ratio;
            const auto narrow = [&](ValueId value, DType format, CodesOrder order, BlockShape block,
                                    BlockShape columns) {
              const bool needs_begins =
                  value != w && (order != CodesOrder::rows || block.rows != 1);
              return quantize(builder, value, needs_begins ? begins : ValueId{}, {},
                              {format, rule, block, order, columns}, "q");
            };
            using Form = QuantizedProductAttributes;
            const auto transposed = [&](ValueId value, BlockShape block) {
              return Form::transposed(block, builder.value(value).shape);
            };
            const auto emit = [&](const OpSpec& dense, const OpSpec& of_experts, Codes one,
                                  const Form::Operand& of_one, Codes other,
                                  const Form::Operand& of_other, ValueId last) {
              const Form attributes{.compute = sample.dtype(), .operands = {of_one, of_other}};
              std::vector<ValueId> inputs = {one.codes, other.codes, one.scales, other.scales};
              if (grouped) {
                inputs.push_back(begins);
              } else if (&dense == &kQuantizedLinear) {
                inputs.push_back(last);
              }
              if (&dense == &kQuantizedLinearWeightGradient) inputs.push_back(ValueId{});
              sample.result_without_gradient(builder.emit(grouped ? of_experts : dense,
                                                          Attributes(attributes), inputs, "y")[0]);
            };
            const Quantized of_w = narrow(w, DType::f8e4m3, CodesOrder::both, square, square);
            const Quantized of_dy =
                narrow(dy, of_gradient, CodesOrder::both, along_rows, along_columns);
            const Codes x_rows = narrow(x, DType::f8e4m3, CodesOrder::rows, along_rows, {}).rows;
            const Codes x_columns =
                narrow(x, DType::f8e4m3, CodesOrder::transposed, {}, along_columns).transposed;
            emit(kQuantizedLinear, kQuantizedGroupedLinear, x_rows, {along_rows}, of_w.rows,
                 {square}, bias);
            emit(kQuantizedLinearDataGradient, kQuantizedGroupedLinearDataGradient, of_dy.rows,
                 {along_rows}, of_w.transposed, transposed(w, square), {});
            emit(kQuantizedLinearWeightGradient, kQuantizedGroupedLinearWeightGradient,
                 of_dy.transposed, transposed(dy, along_columns), x_columns,
                 transposed(x, along_columns), {});
          }};
}

// Two products with one weight: the gradient of the second use is added to that of the first.
inline OpSample grouped_twice_sample(int64_t n, const std::vector<int32_t>& offsets,
                                     int64_t bound) {
  return grouped_sample_of(
      "grouped twice " + std::to_string(bound) + "x" + std::to_string(n), n, n, offsets, bound,
      [](Builder& builder, ValueId x, ValueId w, ValueId rows) {
        return grouped_linear(builder, grouped_linear(builder, x, w, rows, "hidden"), w, rows, "y");
      });
}

// `begins`: the rows of the micro-batch at which a document begins; none: sequences are not cut.
inline OpSample attention_sample(const AttentionAttributes& attributes,
                                 const std::vector<int64_t>& begins = {}, bool has_sinks = false) {
  return {"sequence " + std::to_string(attributes.sequence) + " head " +
              std::to_string(attributes.head_dim) + " value " +
              std::to_string(attributes.value_size()) + " window " +
              std::to_string(attributes.window) + (attributes.probability > 0 ? " dropout" : "") +
              (begins.empty() ? "" : " documents") + (has_sinks ? " sinks" : ""),
          [=](SampleBuilder& sample) {
            const int64_t rows = int64_t{attributes.batch} * attributes.sequence;
            const int64_t width = attributes.query_row() + attributes.key_value_row();
            const ValueId qkv = sample.tensor("qkv", {rows, width});
            const ValueId step =
                attributes.probability > 0 ? sample.integers64("step", {1}, {7}) : ValueId{};
            ValueId starts;
            if (!begins.empty()) {
              starts = sample.integers(
                  "starts", {rows},
                  document_starts(attributes.batch, attributes.sequence, {}, begins));
            }
            ValueId sinks;
            if (has_sinks)
              sinks = sample.tensor("sinks", {attributes.heads}, {.accumulation = true});
            sample.result(
                attention(sample.builder(), {qkv, qkv}, {step, starts, sinks}, attributes, "out"));
          }};
}

// Of one rank's queries, with the keys of all ranks.
inline OpSample context_attention_sample(const AttentionAttributes& attributes,
                                         const SequenceChunks& chunks,
                                         const std::vector<int64_t>& begins = {}) {
  return {
      "rank " + std::to_string(chunks.rank) + " of " + std::to_string(chunks.ranks) + " rows " +
          std::to_string(attributes.sequence) + " head " + std::to_string(attributes.head_dim) +
          " window " + std::to_string(attributes.window) + (begins.empty() ? "" : " documents"),
      [=](SampleBuilder& sample) {
        const int64_t rows = int64_t{attributes.batch} * attributes.sequence;
        const ValueId q = sample.tensor("q", {rows, attributes.query_row()});
        const ValueId kv = sample.tensor("kv", {rows * chunks.ranks, attributes.key_value_row()});
        ValueId starts;
        if (!begins.empty()) {
          starts = sample.integers(
              "starts", {rows},
              document_starts(attributes.batch, attributes.sequence, chunks, begins));
        }
        sample.result(context_attention(sample.builder(), {q, kv}, {.starts = starts},
                                        {attributes, chunks}, "out"));
      }};
}

// What rules of gated delta nets are computed of.
struct DeltaRows {
  ValueId qkv;
  ValueId gates;
  ValueId starts;
};
// `begins`: of documents, in every sequence, of which the first may begin before it.
inline DeltaRows delta_rows(SampleBuilder& sample, int32_t sequences,
                            const GatedDeltaRuleAttributes& attributes, double strongest_decay,
                            const std::vector<int32_t>& begins) {
  const int64_t rows = int64_t{sequences} * attributes.sequence;
  const int32_t heads = attributes.value_heads;
  const std::vector<int32_t> drawn = draw(rows * 2 * heads, 1000, 31);
  std::vector<double> gates;
  for (int64_t i = 0; i < rows * 2 * heads; ++i) {
    const double share = (drawn[static_cast<size_t>(i)] + 0.5) / 1000;
    gates.push_back(i % (2 * heads) < heads ? share : -strongest_decay * share);
  }
  std::vector<int32_t> starts;
  for (int64_t row = 0; row < rows; ++row) {
    const auto t = static_cast<int32_t>(row % attributes.sequence);
    int32_t start = begins.empty() ? 0 : std::min(begins.front(), 0);
    for (const int32_t begin : begins) start = begin <= t ? begin : start;
    starts.push_back(start);
  }
  return {.qkv = sample.tensor("qkv", {rows, attributes.row_size()}),
          .gates = sample.values("gates", {rows, 2 * heads}, gates, {.accumulation = true}),
          .starts = begins.empty() ? ValueId{} : sample.integers("starts", {rows}, starts)};
}

inline std::string delta_name(int32_t sequences, const GatedDeltaRuleAttributes& attributes,
                              double strongest_decay, const std::vector<int32_t>& begins) {
  return std::to_string(sequences) + " x " + std::to_string(attributes.sequence) +
         " rows, heads of " + std::to_string(attributes.key_dim) + ", decay to " +
         std::to_string(-strongest_decay) + (begins.empty() ? "" : ", documents");
}

inline OpSample delta_rule_sample(int32_t sequences, const GatedDeltaRuleAttributes& attributes,
                                  double strongest_decay, const std::vector<int32_t>& begins = {},
                                  bool has_initial = false) {
  return {delta_name(sequences, attributes, strongest_decay, begins) +
              (has_initial ? ", a state before" : ""),
          [=](SampleBuilder& sample) {
            const DeltaRows of = delta_rows(sample, sequences, attributes, strongest_decay, begins);
            DeltaBeginnings beginnings{.starts = of.starts};
            if (has_initial) {
              beginnings.initial = sample.tensor(
                  "initial",
                  {sequences, attributes.value_heads, attributes.key_dim, attributes.value_dim},
                  {.accumulation = true});
            }
            sample.result(
                gated_delta_rule(sample.builder(), of.qkv, of.gates, beginnings, attributes, "o"));
          }};
}

inline OpSample delta_state_sample(int32_t sequences, const GatedDeltaRuleAttributes& attributes,
                                   double strongest_decay,
                                   const std::vector<int32_t>& begins = {}) {
  return {delta_name(sequences, attributes, strongest_decay, begins), [=](SampleBuilder& sample) {
            const DeltaRows of = delta_rows(sample, sequences, attributes, strongest_decay, begins);
            sample.result(gated_delta_state(sample.builder(), of.qkv, of.gates, of.starts,
                                            attributes, "ends"));
          }};
}

// Matrices of P small enough that products of them do not grow.
inline OpSample fold_sample(const SequenceChunks& chunks, int64_t sequences, int64_t heads,
                            int64_t key_dim, int64_t value_dim) {
  return {std::to_string(key_dim) + " x " + std::to_string(value_dim) + ", rank " +
              std::to_string(chunks.rank) + " of " + std::to_string(chunks.ranks),
          [=](SampleBuilder& sample) {
            const ValueId ends = sample.tensor(
                "ends", {2 * chunks.ranks * sequences, heads, key_dim, value_dim + key_dim},
                {.deviation = 0.05, .accumulation = true});
            sample.result(fold_delta_states(sample.builder(), ends, {chunks}, "states"));
          }};
}

inline OpSample conv_sample(int64_t sequences, int32_t sequence, int64_t columns, int64_t taps) {
  return {std::to_string(sequences) + " x " + std::to_string(sequence) + ", " +
              std::to_string(taps) + " taps, rows before",
          [=](SampleBuilder& sample) {
            const ValueId x = sample.tensor("x", {sequences * sequence, columns});
            const ValueId w = sample.tensor("w", {columns, taps}, {.accumulation = true});
            const ValueId before = sample.tensor("before", {sequences * (taps - 1), columns});
            sample.result(causal_conv(sample.builder(), x, w, {.before = before},
                                      {.sequence = sequence}, "y"));
          }};
}

// Sparse attention to every `stride`-th key, at most `most` of them.
inline OpSample sparse_attention_sample(const SparseAttentionAttributes& attributes, int64_t most,
                                        int64_t stride) {
  return {std::to_string(attributes.batch) + " x " + std::to_string(attributes.sequence) +
              " rows, keys of " + std::to_string(attributes.key_dim) + ", at most " +
              std::to_string(most),
          [=](SampleBuilder& sample) {
            const KeyRows rows = attributes.rows();
            const ValueId q = sample.tensor(
                "q", {rows.queries(), int64_t{attributes.heads} * attributes.key_dim});
            const ValueId k = sample.tensor("k", {rows.keys(), int64_t{attributes.key_dim}});
            const ValueId chosen = sample.integers("chosen", {rows.queries(), most},
                                                   strided_choice(rows, most, stride));
            sample.result(sparse_attention(sample.builder(), q, k, chosen, attributes, "out"));
          }};
}

// Route, permute, activation, combine: a small expert layer, without the products. As all experts
// do the same, weights that add up to one would leave nothing of the logits' gradient but rounding.
inline OpSample dispatch_sample(int64_t tokens, int32_t top_k, int32_t experts, int64_t hidden,
                                int32_t row_multiple) {
  return {
      "dispatch " + std::to_string(tokens) + " of " + std::to_string(experts) + " experts, " +
          std::to_string(hidden) + " wide, multiples of " + std::to_string(row_multiple),
      [=](SampleBuilder& sample) {
        Builder& builder = sample.builder();
        const ValueId logits = sample.tensor("logits", {tokens, experts}, {.accumulation = true});
        const RouterTopkResult chosen = router_topk(
            builder, {.logits = logits}, {.top_k = top_k, .pre_softmax = true}, "chosen");
        const Routing routing = route(
            builder, chosen.indices, {.experts = experts, .row_multiple = row_multiple}, "routing");
        const ValueId x = sample.tensor("x", {tokens, 2 * hidden});
        const ValueId rows = permute(builder, x, routing, "rows");
        const ValueId active =
            activation(builder, rows, chosen.probabilities, routing.row_slot, {}, "active");
        sample.result(combine(builder, active, routing, "y"));
        sample.result_without_gradient(routing.offsets);
        sample.result_without_gradient(routing.slot_row);
      }};
}

inline OpSample norm_sample(int64_t tokens, int64_t n, bool delta) {
  return {std::to_string(tokens) + "x" + std::to_string(n) + (delta ? " of a sum" : ""),
          [=](SampleBuilder& sample) {
            const ValueId x = sample.tensor("x", {tokens, n});
            const ValueId gamma = sample.tensor("gamma", {n}, {.mean = 1, .accumulation = true});
            if (!delta) {
              sample.result(rms_norm(sample.builder(), x, gamma, {}, "y").normalized);
              return;
            }
            const ValueId other = sample.tensor("delta", {tokens, n});
            const RmsNormResult y = add_rms_norm(sample.builder(), x, other, gamma, {}, "y");
            sample.result(y.normalized);
            sample.result(y.sum);
          }};
}

// Two sequences, or a part of one.
inline OpSample heads_sample(int64_t tokens, const QkNormAttributes& heads) {
  return {
      std::to_string(tokens) + " of " + std::to_string(heads.heads) + "/" +
          std::to_string(heads.groups) + " heads of " + std::to_string(heads.head_dim) + ", " +
          std::to_string(heads.rotary_dim) + " turn, " + std::string(name_of(heads.scope)),
      [=](SampleBuilder& sample) {
        Builder& builder = sample.builder();
        const bool per_head = heads.scope == QkNormScope::head;
        const int64_t d = heads.head_dim;
        const auto gain = [&](const char* name, int64_t count) {
          return sample.tensor(name, {per_head ? d : count * d}, {.mean = 1, .accumulation = true});
        };
        QkNormAttributes attributes = heads;
        attributes.sequence = static_cast<int32_t>(tokens / 2 + 3);
        const ValueId qkv = sample.tensor("qkv", {tokens, (heads.heads + 2 * heads.groups) * d});
        const ValueId table = rope_table(
            builder, {.positions = attributes.sequence, .rotary_dim = heads.rotary_dim, .base = 50},
            accumulation_dtype(sample.dtype()), "table");
        sample.result(qk_norm_rope(builder,
                                   {.qkv = qkv,
                                    .gamma_q = gain("gamma_q", heads.heads),
                                    .gamma_k = gain("gamma_k", heads.groups),
                                    .table = table},
                                   attributes, "y"));
      }};
}

inline OpSample count_sample(int64_t tokens, int32_t top_k, const CountExpertsAttributes& counts) {
  return {std::to_string(tokens) + " tokens from " + std::to_string(counts.first_token),
          [=](SampleBuilder& sample) {
            // A few indices of no expert.
            const ValueId indices =
                sample.integers("indices", {tokens, top_k},
                                draw(tokens * top_k, static_cast<uint64_t>(counts.experts) + 2, 3));
            sample.result_without_gradient(
                count_experts(sample.builder(), indices, {}, counts, "counts"));
          }};
}

inline OpSample sinkhorn_sample(int64_t tokens, int64_t experts, int32_t top_k) {
  return {std::to_string(tokens) + "x" + std::to_string(experts), [=](SampleBuilder& sample) {
            const ValueId logits =
                sample.tensor("logits", {tokens, experts},
                              {.deviation = 8, .differentiable = false, .accumulation = true});
            sample.result_without_gradient(
                sinkhorn_topk(sample.builder(), logits, {.top_k = top_k}, "indices"));
          }};
}

inline OpSample cross_entropy_sample(int64_t tokens, int64_t vocabulary) {
  return {
      std::to_string(tokens) + "x" + std::to_string(vocabulary), [=](SampleBuilder& sample) {
        const ValueId logits = sample.tensor("logits", {tokens, vocabulary}, {.deviation = 3});
        const ValueId labels =
            sample.integers("labels", {tokens}, draw(tokens, static_cast<uint64_t>(vocabulary), 1));
        std::vector<double> weights;
        for (int64_t t = 0; t < tokens; ++t) weights.push_back(t % 7 == 3 ? 0 : 1);
        const ValueId mask = sample.values("mask", {tokens}, weights,
                                           {.differentiable = false, .accumulation = true});
        sample.result(
            cross_entropy(sample.builder(),
                          {.logits = logits, .labels = labels, .mask = mask, .tokens = {}}, "loss")
                .loss);
      }};
}

inline OpSample embedding_sample(int64_t tokens, int64_t vocabulary, int64_t hidden) {
  return {std::to_string(tokens) + " of " + std::to_string(vocabulary) + ", " +
              std::to_string(hidden) + " wide",
          [=](SampleBuilder& sample) {
            const ValueId ids = sample.integers("tokens", {tokens},
                                                draw(tokens, static_cast<uint64_t>(vocabulary), 2));
            const ValueId weight = sample.tensor("weight", {vocabulary, hidden});
            sample.result(embedding(sample.builder(), ids, weight, {}, "y"));
          }};
}

inline OpSample row_gate_sample(int64_t rows, int64_t columns) {
  return {std::to_string(rows) + "x" + std::to_string(columns), [=](SampleBuilder& sample) {
            const ValueId x = sample.tensor("x", {rows, columns});
            const ValueId gate = sample.tensor("gate", {rows, 1});
            sample.result(row_gate(sample.builder(), x, gate, "y"));
          }};
}

inline std::vector<LargeSample> large_samples() {
  std::vector<LargeSample> all;
  const auto add = [&](const OpSpec& spec, OpSample sample) {
    all.push_back({&spec, std::move(sample)});
  };
  add(kQuantize, measured_sample(300, 528, {}, DType::f8e4m3));
  add(kQuantize, gathered_sample(500, 272, false));
  add(kQuantize, gathered_sample(500, 272, true));
  add(kQuantize, measured_sample(1000, 272, {0, 0, 130, 130, 900}, DType::f8e5m2));
  add(kQuantizedLinear, codes_sample(200, 240, 272, {}, false));
  add(kQuantizedLinear, codes_sample(1100, 1040, 144, {}, false, DType::f8e5m2));
  add(kQuantizedLinear, codes_sample(200, 240, 272, {}, true));
  add(kQuantizedLinear, codes_sample(1100, 1040, 144, {}, true));
  add(kQuantizedLinear, codes_sample(130, 136, 264, {}, false));
  add(kQuantizedLinear, codes_sample(130, 136, 264, {}, true));
  const std::vector<int32_t> uneven = {0, 130, 130, 517, 518, 901};
  add(kQuantizedGroupedLinear, codes_sample(1000, 240, 144, uneven, false));
  add(kQuantizedGroupedLinear, codes_sample(2600, 1040, 400, {0, 900, 2500}, false, DType::f8e5m2));
  add(kQuantizedGroupedLinear, codes_sample(1000, 240, 144, uneven, true));
  add(kQuantizedGroupedLinear, codes_sample(2600, 1040, 400, {0, 900, 2500}, true));
  add(kQuantizedGroupedLinear, codes_sample(500, 136, 264, {0, 100, 420}, false));
  add(kQuantizedGroupedLinear, codes_sample(500, 135, 263, {0, 100, 420}, true));
  add(kLinear, linear_sample(300, 520, 264, false, LinearOutput::compute));
  add(kLinear, linear_sample(129, 257, 131, false, LinearOutput::compute));
  add(kLinear, linear_sample(256, 192, 128, true, LinearOutput::compute));
  add(kLinear, linear_sample(200, 64, 256, false, LinearOutput::accumulation));
  add(kLinear, linear_sample(200, 96, 200, false, LinearOutput::f64));

  std::vector<int32_t> offsets = {0, 130, 130, 131, 400, 655};
  add(kGroupedLinear, grouped_sample(192, 256, offsets, 700));
  add(kGroupedLinear, grouped_sample(130, 75, offsets, 700));
  add(kGroupedLinear, grouped_sample(256, 128, {0, 0, 0, 0}, 5));
  std::vector<int32_t> many(101);
  for (size_t e = 0; e < many.size(); ++e) many[e] = static_cast<int32_t>(e * e / 12);
  add(kGroupedLinear, grouped_sample(136, 64, many, 840));
  // One group more than a warp looks at, which has rows.
  many.resize(34);
  add(kGroupedLinear, grouped_sample(136, 64, many, 120));
  // Several tiles in every direction, none of which they fill; depths of less than one.
  add(kGroupedLinear, grouped_sample(1408, 264, {0, 1, 300, 300, 557, 640}, 700));
  add(kGroupedLinear, grouped_sample(264, 1408, {0, 513, 513, 530}, 530));
  add(kGroupedLinear, grouped_sample(768, 40, {0, 0, 385, 900}, 1100));
  add(kGroupedLinear, grouped_twice_sample(328, {0, 190, 190, 205, 460}, 500));
  // Groups of enough rows that blocks work in pairs, with odd numbers of tiles.
  add(kGroupedLinear, grouped_sample(264, 136, {0, 1153, 2040}, 2200));
  add(kGroupedLinear, grouped_twice_sample(328, {0, 1705, 1705, 4700}, 5000));
  add(kGroupedLinear, grouped_twice_sample(1032, {0, 40, 40, 121}, 150));
  add(kGroupedLinear, grouped_copies_sample(264, 136, {0, 1153, 2040, 2100, 2640}, 2700, 2));
  add(kGroupedLinear, grouped_copies_sample(328, 264, {0, 190, 190, 205, 205, 460}, 500, 1));
  add(kGroupedLinear, grouped_copies_sample(130, 75, {0, 10, 130, 131, 400, 655}, 700, 3));

  // Room for 65,537 tiles of 64 rows, two more than a grid has blocks in its second dimension.
  add(kGroupedLinear, grouped_sample(2, 1, {0, 3, 130}, 65537 * 64));

  for (const int32_t head_dim : {8, 20, 24, 40, 64, 72, 96, 120, 128, 192, 256}) {
    AttentionAttributes attributes{
        .batch = 2, .sequence = 150, .heads = 4, .groups = 2, .head_dim = head_dim, .scale = 0.11};
    add(kAttention, attention_sample(attributes));
    if (head_dim != 64 && head_dim != 256) continue;
    attributes.window = 37;
    add(kAttention, attention_sample(attributes));
    attributes.window = 0;
    attributes.seed = 3;
    attributes.substream = 2;
    attributes.probability = 0.2;
    add(kAttention, attention_sample(attributes));
  }

  // Values that are smaller or larger than keys.
  for (const auto& [head_dim, value_dim] :
       {std::pair{192, 128}, {128, 64}, {40, 24}, {20, 12}, {64, 128}, {256, 160}}) {
    AttentionAttributes attributes{.batch = 2,
                                   .sequence = 150,
                                   .heads = 4,
                                   .groups = 2,
                                   .head_dim = head_dim,
                                   .value_dim = value_dim,
                                   .scale = 0.11};
    add(kAttention, attention_sample(attributes));
    attributes.window = 37;
    add(kAttention, attention_sample(attributes, {60, 150, 200}));
  }
  // As GPT-OSS has them, with its window and without.
  for (const int32_t window : {0, 128}) {
    add(kAttention, attention_sample({.batch = 2,
                                      .sequence = 300,
                                      .heads = 8,
                                      .groups = 2,
                                      .head_dim = 64,
                                      .scale = 0.125,
                                      .window = window},
                                     {}, /*has_sinks=*/true));
  }
  add(kAttention, attention_sample({.batch = 1,
                                    .sequence = 300,
                                    .heads = 4,
                                    .groups = 4,
                                    .head_dim = 192,
                                    .value_dim = 128,
                                    .scale = 0.07}));

  // A window of one token; whole tiles, and all heads in one group.
  add(kAttention, attention_sample({.batch = 1,
                                    .sequence = 2,
                                    .heads = 4,
                                    .groups = 4,
                                    .head_dim = 16,
                                    .scale = 0.3,
                                    .window = 1}));
  add(kAttention, attention_sample({.batch = 3,
                                    .sequence = 256,
                                    .heads = 6,
                                    .groups = 1,
                                    .head_dim = 32,
                                    .scale = 0.2,
                                    .window = 128}));

  // The last query that sees a tile of 32 or 64 keys is the first of another tile.
  add(kAttention, attention_sample({.batch = 1,
                                    .sequence = 300,
                                    .heads = 2,
                                    .groups = 1,
                                    .head_dim = 20,
                                    .scale = 0.2,
                                    .window = 65}));

  // Documents that end with a tile of 32 or 64 tokens, a token after it and one before it, that are
  // one token, and that are several tiles; heads of each size of tile.
  for (const int32_t head_dim : {8, 20, 64, 96, 128, 256}) {
    AttentionAttributes packed{
        .batch = 2, .sequence = 330, .heads = 4, .groups = 2, .head_dim = head_dim, .scale = 0.11};
    const std::vector<int64_t> begins = {32, 64, 65, 127, 192, 329, 390, 460, 600};
    add(kAttention, attention_sample(packed, begins));
    packed.window = 50;
    add(kAttention, attention_sample(packed, begins));
    packed.seed = 3;
    packed.probability = 0.2;
    add(kAttention, attention_sample(packed, begins));
  }

  // More blocks of keys than run at once.
  std::vector<int64_t> of_long;
  for (int64_t begin = 0; begin < 8600; begin += 301) of_long.push_back(begin);
  add(kAttention,
      attention_sample(
          {.batch = 1, .sequence = 8600, .heads = 2, .groups = 1, .head_dim = 64, .scale = 0.1},
          of_long));

  // Enough blocks for one to have two query heads of a group; all of these, or a part.
  for (const int32_t groups : {4, 16}) {
    add(kAttention, attention_sample({.batch = 2,
                                      .sequence = 2048,
                                      .heads = 32,
                                      .groups = groups,
                                      .head_dim = 8,
                                      .scale = 0.3,
                                      .window = 40}));
  }

  // Chunks of whole tiles, of more and of less than one, and of one query; first, last and other
  // ranks; windows that end in a chunk, before it, and before the one before it.
  const auto add_context = [&](AttentionAttributes attributes, int32_t ranks, int32_t rank,
                               const std::vector<int64_t>& begins = {}) {
    attributes.batch = 2;
    attributes.heads = 6;
    attributes.groups = 2;
    attributes.scale = 0.1;
    add(kContextAttention,
        context_attention_sample(attributes, {.ranks = ranks, .rank = rank}, begins));
  };
  add_context({.sequence = 256, .head_dim = 64}, 2, 1);
  add_context({.sequence = 150, .head_dim = 64}, 4, 2);
  add_context({.sequence = 150, .head_dim = 64, .window = 20}, 4, 3);
  add_context({.sequence = 302, .head_dim = 128}, 2, 1);
  add_context({.sequence = 150, .head_dim = 128}, 4, 0);
  add_context({.sequence = 150, .head_dim = 128, .window = 100}, 3, 1);
  add_context({.sequence = 150, .head_dim = 128, .window = 400}, 4, 1);
  add_context({.sequence = 2, .head_dim = 64}, 3, 1);
  add_context({.sequence = 150, .head_dim = 20, .window = 100}, 3, 1);
  // Documents within a chunk of 75, across borders of chunks, and of most of the sequence.
  for (const int32_t rank : {0, 1, 2}) {
    const std::vector<int64_t> begins = {10, 75, 140, 390, 449, 460};
    add_context({.sequence = 150, .head_dim = 64}, 3, rank, begins);
    add_context({.sequence = 150, .head_dim = 20, .window = 100}, 3, rank, begins);
  }
  add_context({.sequence = 140, .head_dim = 192}, 2, 1);
  add_context({.sequence = 150, .head_dim = 192, .value_dim = 128}, 3, 1);
  add_context({.sequence = 150, .head_dim = 24, .value_dim = 16, .window = 100}, 3, 2);
  add_context({.sequence = 150, .head_dim = 20, .value_dim = 12}, 3, 0, {10, 75, 140});
  add_context({.sequence = 302, .head_dim = 128}, 2, 1, {5, 130, 400, 401, 700});

  // Sums of squares of one piece and of as many as there may be; batches of several launches.
  add(kNewtonSchulz, newton_schulz_sample({192, 320}, {}));
  add(kNewtonSchulz, newton_schulz_sample({1100, 70}, {}));
  add(kNewtonSchulz, newton_schulz_sample({5, 133, 61}, {}));
  add(kNewtonSchulz,
      newton_schulz_sample({2, 384, 200}, {.sections = {{{256, 2}, {64, 1}, {64, 0.5}}}}));
  add(kNewtonSchulz,
      newton_schulz_sample({160, 256, 384}, {.coefficients = NewtonSchulzCoefficients::simple}));

  add(kPermute, dispatch_sample(600, 2, 8, 64, 1));
  add(kPermute, dispatch_sample(333, 8, 128, 40, 1));
  add(kPermute, dispatch_sample(500, 4, 70, 33, 16));
  // More chunks of slots than are scanned at a time.
  add(kPermute, dispatch_sample(17000, 4, 8, 8, 1));

  add(kRmsNorm, norm_sample(70, 2048, false));
  add(kRmsNorm, norm_sample(200, 4096, true));
  add(kRmsNorm, norm_sample(33, 1001, true));
  add(kRmsNorm, norm_sample(9, 20000, true));
  // Heads that turn as a whole, all of a row at once; in rounds; and others.
  const auto heads_of = [&](int64_t tokens, int32_t heads, int32_t groups, int32_t head_dim,
                            int32_t rotary_dim, QkNormScope scope, bool zero_centered = false) {
    add(kQkNormRope, heads_sample(tokens, {.heads = heads,
                                           .groups = groups,
                                           .head_dim = head_dim,
                                           .scope = scope,
                                           .zero_centered = zero_centered,
                                           .rotary_dim = rotary_dim}));
  };
  heads_of(70, 16, 16, 128, 128, QkNormScope::projection);
  heads_of(90, 32, 4, 128, 128, QkNormScope::head);
  heads_of(2200, 4, 2, 32, 32, QkNormScope::projection, true);
  heads_of(2200, 3, 1, 32, 32, QkNormScope::head, true);
  // Each block takes more rows than it stages at once.
  heads_of(9000, 2, 1, 16, 16, QkNormScope::projection);
  heads_of(9000, 2, 1, 16, 16, QkNormScope::head);
  heads_of(40, 64, 4, 128, 128, QkNormScope::head);
  heads_of(30, 52, 4, 128, 128, QkNormScope::projection);
  // The heads of queries and keys in one round, those of values not.
  heads_of(40, 32, 16, 128, 128, QkNormScope::projection);
  heads_of(50, 5, 2, 96, 96, QkNormScope::head);
  heads_of(50, 5, 2, 96, 96, QkNormScope::projection);
  heads_of(41, 3, 1, 72, 48, QkNormScope::head);
  heads_of(41, 3, 1, 72, 48, QkNormScope::projection);
  heads_of(20, 5, 3, 130, 130, QkNormScope::head);
  heads_of(20, 5, 3, 130, 66, QkNormScope::projection);
  add(kCountExperts, count_sample(3000, 8, {.experts = 64, .sequences = 2}));
  add(kCountExperts,
      count_sample(1000, 3,
                   {.experts = 9, .sequences = 4, .sequence_tokens = 700, .first_token = 900}));
  // Of 8,000 tokens some have entries so near to each other that more rounds would put them into
  // another order.
  add(kSinkhornTopk, sinkhorn_sample(8000, 32, 16));
  // Chunks of 64 rows, of which the last is short, or the only one.
  const auto delta_heads = [](int32_t sequence, int32_t key_heads, int32_t value_heads) {
    return GatedDeltaRuleAttributes{.sequence = sequence,
                                    .key_heads = key_heads,
                                    .value_heads = value_heads,
                                    .key_dim = 128,
                                    .value_dim = 128};
  };
  add(kGatedDeltaRule, delta_rule_sample(2, delta_heads(200, 2, 4), 0.05));
  add(kGatedDeltaRule, delta_rule_sample(1, delta_heads(128, 1, 1), 20));
  add(kGatedDeltaRule, delta_rule_sample(3, delta_heads(33, 1, 3), 0.5));
  add(kGatedDeltaRule,
      delta_rule_sample(2, delta_heads(160, 1, 2), 0.1, {5, 40, 41, 64, 100, 159}));
  add(kGatedDeltaRule, delta_rule_sample(2, delta_heads(100, 2, 4), 0.05, {}, true));
  add(kGatedDeltaRule, delta_rule_sample(2, delta_heads(160, 1, 2), 0.1, {-3, 70, 130}, true));
  add(kGatedDeltaState, delta_state_sample(2, delta_heads(100, 2, 4), 0.02));
  add(kGatedDeltaState, delta_state_sample(1, delta_heads(33, 1, 1), 0.5));
  add(kGatedDeltaState, delta_state_sample(2, delta_heads(160, 1, 2), 0.05, {-3}));
  add(kGatedDeltaState, delta_state_sample(2, delta_heads(160, 1, 2), 0.1, {-3, 70, 130}));
  // States in several tiles, of which the last is not full.
  add(kFoldDeltaStates, fold_sample({2, 0}, 2, 3, 128, 128));
  add(kFoldDeltaStates, fold_sample({2, 1}, 1, 2, 100, 72));
  // Sequences of more and of fewer rows than a thread's 64.
  add(kCausalConv, conv_sample(3, 100, 70, 4));
  add(kCausalConv, conv_sample(20, 7, 70, 4));
  add(kCausalConv, conv_sample(40, 5, 70, 7));
  // Heads that do not fill a block's 64, and several blocks of them; keys in several tiles.
  const auto latent = [&](int32_t batch, int32_t sequence, int32_t heads, int64_t most,
                          int64_t stride) {
    add(kSparseAttention, sparse_attention_sample({.batch = batch,
                                                   .sequence = sequence,
                                                   .heads = heads,
                                                   .key_dim = 576,
                                                   .value_dim = 512,
                                                   .scale = 0.05},
                                                  most, stride));
  };
  latent(2, 150, 20, 100, 1);
  latent(1, 140, 128, 70, 2);
  add(kSparseAttention,
      sparse_attention_sample(
          {.batch = 2, .sequence = 70, .heads = 3, .key_dim = 12, .value_dim = 8, .scale = 0.3}, 30,
          2));
  add(kCrossEntropy, cross_entropy_sample(40, 5003));
  add(kCrossEntropy, cross_entropy_sample(64, 8192));
  add(kEmbedding, embedding_sample(900, 300, 72));
  add(kEmbedding, embedding_sample(400, 5000, 50));
  add(kEmbedding, embedding_sample(9000, 300, 8));
  add(kRowGate, row_gate_sample(37, 2056));
  return all;
}

}  // namespace troupe::testing
