#include "passes/precision.h"

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "model/code_metric.h"
#include "ops/exchange/gather_parameter/gather_parameter.h"
#include "ops/precision/quantize_as_made.h"
#include "ops/precision/quantized_product.h"
#include "passes/weight_codes.h"
#include "passes/whole_amax.h"
#include "program/rewrite.h"

namespace troupe {
namespace {

using Operand = QuantizedForm::Operand;

bool is_fp4(const QuantizeAttributes& attributes) {
  return attributes.rule == ScaleRule::fp4;
}

class PrecisionPass {
 public:
  PrecisionPass(Program& program, const ModelState& state, const PrecisionOptions& options,
                ValueId skip, const CodeMetrics& code_metrics)
      : program_(program),
        layout_(state.part.layout()),
        options_(options),
        rewrite_(program),
        histories_(program, rewrite_, layout_, options.delayed, skip),
        code_counting_(state, code_metrics),
        weights_(program, rewrite_, state),
        gathered_from_(program.value_count()),
        is_read_(program.value_count(), false),
        definer_(program.value_count(), -1),
        replaced_(program.value_count()) {}

  std::vector<int32_t> run(std::vector<WorkSegment>& segments) {
    const int32_t count = program_.op_count();
    for (int32_t index = 0; index < count; ++index) {
      if (is_lowered(program_.op(index))) {
        note_needs(index);
      } else {
        for_each_read(program_, program_.op(index), [&](ValueId id) { is_read_[id] = true; });
      }
      if (program_.op(index).spec == &kGatherParameter) note_gather(index);
    }
    if (is_delayed() || code_counting_.is_wanted()) find_map_operands(count);
    const std::map<int32_t, int32_t> records = places_of_records(segments);
    for (int32_t index = 0; index < count; ++index) {
      if (const auto found = records.find(index); found != records.end()) {
        histories_.record_before(found->second);
        rewrite_.insert_before(found->second, program_.op(found->second).place,
                               [&](Builder& builder) { return code_counting_.add(builder); });
      }
      rewrite_.read_stand_ins(index);
      for (const ValueId id : program_.outputs(program_.op(index))) definer_[id] = index;
      if (is_lowered(program_.op(index))) replace(index);
    }
    if (is_delayed() && histories_.records()) histories_.update();
    std::vector<int32_t> order = rewrite_.order();
    move_segments(segments, rewrite_.new_begins());
    check_stored(program_, order);
    return order;
  }

 private:
  // One quantisation for all who read the value.
  struct Key {
    int32_t value;  // of the program as it was
    int32_t offsets;
    DType format;
    bool of_backward;  // of gathered weights
    bool by_columns;   // of 4 bits, where each order is quantised by itself
    auto operator<=>(const Key&) const = default;
  };
  struct Quantization {
    QuantizeAttributes attributes;  // what all products need
    Quantized codes;                // invalid as long as none of them has been reached
    std::vector<MapOperand> slots;  // of all products, where something is kept of them
  };

  bool is_lowered(const Op& op) const {
    const QuantizedForm* form = op.spec->quantized;
    if (form == nullptr || op.place.layer < 0) return false;
    if (form->allowed != nullptr && !form->allowed(op.attributes)) return false;
    if (!options_.weight_gradients && is_weight_gradient(*form)) return false;
    return !keeps_products(options_.kept, op.place.layer, product_group(op.place.module));
  }

  bool is_delayed() const { return options_.recipe == Fp8Recipe::delayed; }

  // Of a weight, which may have been gathered.
  StateId state_of(ValueId weight) const {
    if (gathered_from_.has(weight) && gathered_from_[weight].valid()) {
      weight = gathered_from_[weight];
    }
    return program_.value(weight).state;
  }

  // Weights whose codes are gathered are not gathered themselves: nothing but products reads them.
  void note_gather(int32_t index) {
    const ValueId shard = program_.inputs(program_.op(index))[0];
    gathered_from_[program_.outputs(program_.op(index))[0]] = shard;
    if (weights_.search(program_.value(shard).state) != nullptr) rewrite_.remove(index);
  }

  // The parameter that a product reads; invalid where it reads none.
  StateId parameter_of(const Op& op) const {
    const QuantizedForm& form = *op.spec->quantized;
    for (size_t i = 0; i < 2; ++i) {
      if (form.operands[i].kind != Operand::Kind::weight) continue;
      const ValueId weight = program_.inputs(op)[i];
      const StateId parameter = state_of(weight);
      TROUPE_CHECK(parameter.valid(),
                   "a product in 8 bits of no parameter: " + program_.value(weight).name);
      return parameter;
    }
    return {};
  }

  // Each operand belongs to the map whose weight is multiplied with it: forward, or by its data
  // gradient.
  void find_map_operands(int32_t count) {
    for (int32_t index = 0; index < count; ++index) {
      const Op& op = program_.op(index);
      if (!is_lowered(op)) continue;
      const StateId map = parameter_of(op);
      if (!map.valid()) continue;
      for (size_t i = 0; i < 2; ++i) add_slot(quantization_of_operand(index, i), index, i, map);
    }
    // Where there is no data gradient.
    for (int32_t index = 0; index < count; ++index) {
      if (!is_lowered(program_.op(index)) || parameter_of(program_.op(index)).valid()) continue;
      for (size_t i = 0; i < 2; ++i) {
        if (!quantization_of_operand(index, i).slots.empty()) continue;
        const std::vector<MapOperand>& others = quantization_of_operand(index, 1 - i).slots;
        TROUPE_CHECK(!others.empty(), "a product in 8 bits of no parameter");
        add_slot(quantization_of_operand(index, i), index, i, others.front().parameter);
      }
    }
  }

  Quantization& quantization_of_operand(int32_t index, size_t operand) {
    return quantizations_.at(key_of(index, operand, own_form(index, operand)));
  }

  // As that operand's product reads it.
  QuantizeAttributes own_form(int32_t index, size_t operand) const {
    return quantization_of(program_.op(index).spec->quantized->operands[operand], options_.recipe,
                           options_.format);
  }

  void add_slot(Quantization& quantization, int32_t index, size_t operand, StateId parameter) {
    const Op& op = program_.op(index);
    const MapOperand slot{.parameter = parameter,
                          .kind = static_cast<int32_t>(op.spec->quantized->operands[operand].kind),
                          .experts = op.spec->quantized->offsets >= 0};
    std::vector<MapOperand>& slots = quantization.slots;
    if (std::find(slots.begin(), slots.end(), slot) == slots.end()) slots.push_back(slot);
    if (is_delayed()) histories_.add(slot);
  }

  // Before which operation what was quantised up to another one, the key, is recorded: after what a
  // backward differentiates, which recompute takes, and at the end of a backward.
  std::map<int32_t, int32_t> places_of_records(const std::vector<WorkSegment>& segments) const {
    std::map<int32_t, int32_t> places;
    if (!histories_.records()) return places;
    for (const WorkSegment& segment : segments) {
      if (segment.begin == segment.end) continue;
      if (segment.step.action == PipelineAction::forward) {
        places[segment.differentiated_end] = segment.differentiated_end;
      } else {
        places[segment.end] = segment.end - 1;
      }
    }
    return places;
  }

  static bool is_weight_gradient(const QuantizedForm& form) {
    const auto& [left, right] = form.operands;
    return left.kind != Operand::Kind::weight && right.kind != Operand::Kind::weight;
  }

  // What an operand's product reads is one of the value's two orders.
  void note_needs(int32_t index) {
    for (size_t i = 0; i < 2; ++i) {
      const QuantizeAttributes own = own_form(index, i);
      const auto [found, is_new] =
          quantizations_.try_emplace(key_of(index, i, own), Quantization{own, {}, {}});
      if (!is_new) found->second.attributes = in_both_orders(found->second.attributes, own);
    }
  }

  ValueId offsets_of(int32_t index) const {
    const Op& op = program_.op(index);
    const int8_t input = op.spec->quantized->offsets;
    return input < 0 ? ValueId{} : program_.inputs(op)[static_cast<size_t>(input)];
  }

  Key key_of(int32_t index, size_t operand, const QuantizeAttributes& attributes) const {
    const Op& op = program_.op(index);
    const ValueId read = program_.inputs(op)[operand];
    const ValueId value = replaced_.has(read) && replaced_[read].valid() ? replaced_[read] : read;
    const bool is_weight = op.spec->quantized->operands[operand].kind == Operand::Kind::weight;
    return {value.index, is_weight ? -1 : offsets_of(index).index, attributes.format,
            is_weight && !is_state(program_.value(read).role) && op.place.phase != Phase::forward,
            !is_weight && is_fp4(attributes) && attributes.has_transposed()};
  }

  void replace(int32_t index) {
    const Op op = program_.op(index);
    const QuantizedForm& form = *op.spec->quantized;
    const std::vector<ValueId> reads(program_.inputs(op).begin(), program_.inputs(op).end());
    QuantizedProductAttributes attributes{
        .compute = program_.value(reads[1]).dtype,
        .accumulate = form.accumulates != nullptr && form.accumulates(op.attributes)};
    std::array<Codes, 2> operands;
    for (size_t i = 0; i < 2; ++i) {
      const QuantizeAttributes own = own_form(index, i);
      const bool transposed = own.has_transposed();
      attributes.operands[i] = transposed
                                   ? QuantizedProductAttributes::transposed(
                                         own.transposed_block, program_.value(reads[i]).shape)
                                   : QuantizedProductAttributes::Operand{own.block};
      const Quantized& codes = quantized(index, i);
      operands[i] = transposed ? codes.transposed : codes.rows;
    }
    std::vector<ValueId> inputs = {operands[0].codes, operands[1].codes, operands[0].scales,
                                   operands[1].scales};
    inputs.insert(inputs.end(), reads.begin() + 2, reads.end());
    const ValueId result = program_.outputs(op)[0];
    const std::string name = program_.value(result).name;
    const ValueId stand_in = rewrite_.insert_before(index, op.place, [&](Builder& builder) {
      return builder.emit(*form.kind, Attributes(attributes), inputs, name)[0];
    });
    rewrite_.remove(index);
    if (stand_in == result) return;  // changed in place
    rewrite_.replace(result, stand_in);
    set(replaced_, stand_in, result);
    set(definer_, stand_in, index);
  }

  const Quantized& quantized(int32_t index, size_t operand) {
    Quantization& quantization = quantization_of_operand(index, operand);
    if (quantization.codes.rows.codes.valid() || quantization.codes.transposed.codes.valid()) {
      return quantization.codes;
    }
    ValueId value = program_.inputs(program_.op(index))[operand];
    const std::string name = program_.value(value).name + "_q";
    const auto kind = program_.op(index).spec->quantized->operands[operand].kind;
    if (const Parameter* weight = weights_.search(state_of(value))) {
      if (weights_.is_sharded(*weight)) {
        quantization.codes = gathered(index, *weight, value, quantization, name);
        return quantization.codes;
      }
      value = program_.state_value(WeightShards::source_of(*weight));
      quantization.attributes.rounds = weight->master.valid();
    }
    // Where scales are known before or lie within few rows, the value need not be stored before.
    const bool is_early = is_delayed() || options_.recipe == Fp8Recipe::blockwise;
    const int32_t maker = maker_of_codes(program_, is_early ? definer_of(value) : -1,
                                         is_read_.has(value) && is_read_[value]);
    int32_t before = index;
    Place at = program_.op(index).place;
    if (kind == Operand::Kind::weight && is_state(program_.value(value).role)) {
      before = 0;
      at = beginning(at);
    } else if (kind == Operand::Kind::activation || maker >= 0) {
      const int32_t product = first_product_.try_emplace(value.index, index).first->second;
      const int32_t beside = maker_beside(value, product);
      before = beside >= 0 ? beside + 1 : product;
      at = program_.op(beside >= 0 ? beside : product).place;
    }
    if (kind == Operand::Kind::gradient) at.phase = Phase::data_gradient;
    const ValueId of_experts = offsets_of(index);
    QuantizeAttributes attributes = quantization.attributes;
    const bool is_recorded = histories_.records() && !is_measured_before(index, kind);
    attributes.measures = is_delayed() && is_recorded;
    const bool needs_offsets =
        kind != Operand::Kind::weight &&
        (attributes.has_transposed() || is_fp4(attributes) || attributes.block.rows != 1);
    const ValueId offsets = needs_offsets ? of_experts : ValueId{};
    const ValueId delayed = is_delayed() ? histories_.amax(quantization.slots.front()) : ValueId{};
    quantization.codes = rewrite_.insert_before(before, at, [&](Builder& builder) {
      const ValueId amax = is_delayed() ? delayed
                                        : whole_amax(builder, layout_, options_.recipe, value,
                                                     offsets, of_experts.valid(), attributes, name);
      const Quantized codes =
          quantize_as_made(rewrite_, builder, value, maker, offsets, amax, attributes, name);
      if (is_recorded) {
        code_counting_.count(builder, quantization.slots, codes.rows.codes, name + "_counts");
      }
      return codes;
    });
    if (attributes.measures) histories_.note(quantization.slots, quantization.codes.amax);
    return quantization.codes;
  }

  // Of what is done once in a step for operations at `place`.
  static Place beginning(Place place) {
    place.phase = Phase::forward;
    place.micro_batch = -1;
    return place;
  }

  // Of a weight of which ranks quantise a shard each; `value` stood for it.
  Quantized gathered(int32_t index, const Parameter& weight, ValueId value,
                     const Quantization& quantization, const std::string& name) {
    const Place place = program_.op(index).place;
    const bool once = is_state(program_.value(value).role);
    Quantized& shard = shards_[weight.value.index];
    if (!shard.rows.codes.valid()) {
      // By forwards and backwards, whose needs are apart where all state is sharded.
      QuantizeAttributes whole = quantization.attributes;
      const auto other = quantizations_.find({value.index, -1, whole.format, true, false});
      if (!once && other != quantizations_.end()) {
        whole = in_both_orders(whole, other->second.attributes);
      }
      QuantizeAttributes attributes = weights_.of_shard(weight, whole);
      attributes.measures = is_delayed() && histories_.records();
      const bool of_experts = offsets_of(index).valid();
      const ValueId delayed =
          is_delayed() ? histories_.amax(quantization.slots.front()) : ValueId{};
      shard = rewrite_.insert_before(0, beginning(place), [&](Builder& builder) {
        ValueId amax = delayed;
        if (options_.recipe == Fp8Recipe::tensorwise) {
          amax = amax_of_parts(builder, layout_, weights_.amax_of_all(builder, weight, name),
                               of_experts, name);
        }
        const Quantized codes = quantize(builder, builder.state(WeightShards::source_of(weight)),
                                         {}, amax, attributes, name + "_shard");
        if (histories_.records()) {
          code_counting_.count(builder, quantization.slots, codes.rows.codes, name + "_counts");
        }
        return codes;
      });
      if (attributes.measures) histories_.note(quantization.slots, shard.amax);
    }
    return weights_.gather(weight, shard, quantization.attributes, value, once ? 0 : index,
                           once ? beginning(place) : place);
  }

  // A gathered weight is measured in forwards alone.
  bool is_measured_before(int32_t index, Operand::Kind kind) const {
    return kind == Operand::Kind::weight && program_.op(index).place.phase != Phase::forward;
  }

  int32_t definer_of(ValueId value) const { return definer_.has(value) ? definer_[value] : -1; }

  // What made the activation, in the same layer: the quantisation stands right after it, and who
  // moves it or has it computed again does the same with the codes. -1: it stands with the product.
  int32_t maker_beside(ValueId value, int32_t product) const {
    const int32_t made_by = definer_of(value);
    if (made_by < 0) return -1;
    const Place& own = program_.op(product).place;
    const Place& place = program_.op(made_by).place;
    const bool fits = place.queue == own.queue && place.phase == own.phase &&
                      place.layer == own.layer && place.round == own.round &&
                      place.micro_batch == own.micro_batch;
    return fits ? made_by : -1;
  }

  template <class T>
  static void set(IdVector<ValueId, T>& table, ValueId id, T value) {
    if (!table.has(id)) table.resize(id.index + 1, T{-1});
    table[id] = value;
  }

  Program& program_;
  const Layout& layout_;
  const PrecisionOptions& options_;
  Rewrite rewrite_;
  AmaxHistories histories_;
  CodeCounting code_counting_;
  WeightShards weights_;
  std::map<int32_t, Quantized> shards_;       // of such weights, by state
  IdVector<ValueId, ValueId> gathered_from_;  // the shards of parameters
  IdVector<ValueId, bool> is_read_;           // by others than products in 8 bits
  IdVector<ValueId, int32_t> definer_;        // the operation, or the one that it replaces
  std::map<int32_t, int32_t> first_product_;  // that reads it, by value
  IdVector<ValueId, ValueId> replaced_;       // of stand-ins: what they stand for
  std::map<Key, Quantization> quantizations_;
};

}  // namespace

std::vector<int32_t> lower_precision(Program& program, std::vector<WorkSegment>& segments,
                                     const ModelState& state, const PrecisionOptions& options,
                                     ValueId skip, const CodeMetrics& code_metrics) {
  return PrecisionPass(program, state, options, skip, code_metrics).run(segments);
}

}  // namespace troupe
