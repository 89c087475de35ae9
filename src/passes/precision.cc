#include "passes/precision.h"

#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "ops/exchange/all_gather/all_gather.h"
#include "ops/precision/quantize/quantize.h"
#include "ops/precision/quantized_product.h"
#include "program/rewrite.h"

namespace troupe {
namespace {

using Operand = QuantizedForm::Operand;
class PrecisionPass {
 public:
  PrecisionPass(Program& program, const Layout& layout, const PrecisionOptions& options)
      : program_(program),
        layout_(layout),
        options_(options),
        rewrite_(program),
        stand_in_(program.value_count()),
        definer_(program.value_count(), -1),
        first_product_(program.value_count(), -1) {}

  std::vector<int32_t> run(std::vector<WorkSegment>& segments) {
    const int32_t count = program_.op_count();
    for (int32_t index = 0; index < count; ++index) {
      read_stand_ins(index);
      for (const ValueId id : program_.outputs(program_.op(index))) definer_[id] = index;
      if (is_lowered(program_.op(index))) replace(index);
    }
    std::vector<int32_t> order = rewrite_.order();
    move_segments(segments, rewrite_.new_begins());
    return order;
  }

 private:
  // One quantisation for all who read the value so.
  struct Key {
    int32_t value;
    int32_t offsets;
    DType format;
    int32_t block_rows;
    int32_t block_columns;
    bool of_backward;  // of gathered weights
    auto operator<=>(const Key&) const = default;
  };

  bool is_lowered(const Op& op) const {
    const QuantizedForm* form = op.spec->quantized;
    if (form == nullptr || op.place.layer < 0) return false;
    if (form->allowed != nullptr && !form->allowed(op.attributes)) return false;
    const int32_t layer = op.place.layer;
    return layer >= options_.first_layers &&
           (layer >= options_.layers || layer < options_.layers - options_.last_layers);
  }

  void read_stand_ins(int32_t index) {
    std::vector<ValueId> reads;
    for_each_read(program_, program_.op(index), [&](ValueId id) { reads.push_back(id); });
    for (const ValueId id : reads) {
      if (stand_in_.has(id) && stand_in_[id].valid()) {
        program_.replace_read(index, id, stand_in_[id]);
      }
    }
  }

  void replace(int32_t index) {
    const Op op = program_.op(index);
    const QuantizedForm& form = *op.spec->quantized;
    const std::vector<ValueId> reads(program_.inputs(op).begin(), program_.inputs(op).end());
    QuantizedProductAttributes attributes{
        .compute = program_.value(reads[1]).dtype,
        .accumulate = form.accumulates != nullptr && form.accumulates(op.attributes)};
    std::array<Quantized, 2> operands;
    for (size_t i = 0; i < 2; ++i) {
      attributes.blocks[i] =
          quantization_of(form.operands[i], options_.recipe, options_.format).block;
      operands[i] =
          quantized(index, form.operands[i], reads[i],
                    form.offsets < 0 ? ValueId{} : reads[static_cast<size_t>(form.offsets)]);
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
    stand_in_[result] = stand_in;
    set(definer_, stand_in, index);
  }

  Quantized quantized(int32_t index, const Operand& operand, ValueId value, ValueId offsets) {
    const QuantizeAttributes attributes =
        quantization_of(operand, options_.recipe, options_.format);
    const bool is_weight = operand.kind == Operand::Kind::weight;
    const bool of_experts = offsets.valid();
    if (is_weight || attributes.block.rows == 1) offsets = {};
    const Place place = program_.op(index).place;
    const bool is_state_weight = is_weight && is_state(program_.value(value).role);
    const Key key{value.index,
                  offsets.index,
                  attributes.format,
                  attributes.block.rows,
                  attributes.block.columns,
                  is_weight && !is_state_weight && place.phase != Phase::forward};
    const auto [found, is_new] = quantized_.try_emplace(key);
    if (!is_new) return found->second;

    int32_t before = index;
    Place own = place;
    if (is_state_weight) {
      before = 0;
      own.phase = Phase::forward;
      own.micro_batch = -1;
    } else if (operand.kind == Operand::Kind::activation) {
      const int32_t product = first_product(value, index);
      const int32_t made_by = maker_beside(value, product);
      before = made_by >= 0 ? made_by + 1 : product;
      own = program_.op(made_by >= 0 ? made_by : product).place;
    } else if (operand.kind == Operand::Kind::gradient) {
      own.phase = Phase::data_gradient;
    }
    const std::string name = program_.value(value).name + "_q";
    found->second = rewrite_.insert_before(before, own, [&](Builder& builder) {
      const ValueId amax = whole_amax(builder, value, offsets, attributes.block, of_experts, name);
      return quantize(builder, value, offsets, amax, attributes, name);
    });
    return found->second;
  }

  // The first product that reads the value, which the forward pass has before the backward pass.
  int32_t first_product(ValueId value, int32_t index) {
    if (!first_product_.has(value) || first_product_[value] < 0) {
      set(first_product_, value, index);
    }
    return first_product_[value];
  }

  // What made the activation, in the same layer: the quantisation stands right after it, and who
  // moves it or has it computed again does the same with the codes. -1: it stands with the product.
  int32_t maker_beside(ValueId value, int32_t product) const {
    const int32_t made_by = definer_.has(value) ? definer_[value] : -1;
    if (made_by < 0) return -1;
    const Place& own = program_.op(product).place;
    const Place& place = program_.op(made_by).place;
    const bool fits = place.queue == own.queue && place.phase == own.phase &&
                      place.layer == own.layer && place.round == own.round &&
                      place.micro_batch == own.micro_batch;
    return fits ? made_by : -1;
  }

  // Of a tensor with one scale of which this rank has a part: the largest elements of all parts,
  // one rank's after the other's. Invalid where the rank's own are enough.
  ValueId whole_amax(Builder& builder, ValueId value, ValueId offsets, BlockShape block,
                     bool of_experts, const std::string& name) const {
    if (options_.recipe != Fp8Recipe::tensorwise) return {};
    const bool spread = of_experts && layout_.ep() > 1;
    const AllGatherAttributes all{.group = spread ? RankGroup::etp : RankGroup::tp_cp,
                                  .ranks = spread ? layout_.etp() : layout_.tp() * layout_.cp()};
    if (all.ranks == 1) return {};
    const ValueId own = block_amax(builder, value, offsets, {.block = block}, name + "_amax");
    return all_gather(builder, own, all, name + "_amax_all");
  }

  template <class T>
  static void set(IdVector<ValueId, T>& table, ValueId id, T value) {
    if (!table.has(id)) table.resize(id.index + 1, T(-1));
    table[id] = value;
  }

  Program& program_;
  const Layout& layout_;
  const PrecisionOptions& options_;
  Rewrite rewrite_;
  IdVector<ValueId, ValueId> stand_in_;       // of results of products
  IdVector<ValueId, int32_t> definer_;        // the operation, or the one that it replaces
  IdVector<ValueId, int32_t> first_product_;  // that reads it
  std::map<Key, Quantized> quantized_;
};

}  // namespace

std::vector<int32_t> lower_precision(Program& program, std::vector<WorkSegment>& segments,
                                     const Layout& layout, const PrecisionOptions& options) {
  return PrecisionPass(program, layout, options).run(segments);
}

}  // namespace troupe
