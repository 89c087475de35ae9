#include "passes/weight_codes.h"

#include "ops/exchange/all_gather/all_gather.h"
#include "ops/exchange/gather_parameter/gather_parameter.h"
#include "ops/precision/transpose_codes/transpose_codes.h"

namespace troupe {

void check_stored(const Program& program, const std::vector<int32_t>& order) {
  for (const int32_t index : order) {
    for (const ValueId id : program.inputs(program.op(index))) {
      if (!id.valid() || !is_state(program.value(id).role)) continue;
      const StateTensor& tensor = program.state()[program.value(id).state];
      TROUPE_CHECK(tensor.is_stored, "read by more than products in 8 bits: " + tensor.name);
    }
  }
}

WeightShards::WeightShards(Program& program, Rewrite& rewrite, const ModelState& state)
    : program_(program), rewrite_(rewrite), state_(state) {
  for (const Parameter& parameter : state.parameters) {
    if (parameter.is_in_codes) parameters_[parameter.value.index] = &parameter;
  }
}

const Parameter* WeightShards::search(StateId value) const {
  const auto found = parameters_.find(value.index);
  return found == parameters_.end() ? nullptr : found->second;
}

bool WeightShards::is_sharded(const Parameter& parameter) const {
  const bool has_shard =
      parameter.master.valid() || state_.part.run->sharding == StateSharding::parameters;
  return has_shard && shard_of(parameter).count > 1;
}

Shard WeightShards::shard_of(const Parameter& parameter) const {
  Shard shard = state_.part.shard(parameter.gradient_class);
  shard.owner = parameter.owner;
  return shard;
}

MatrixRows WeightShards::rows_of(const Parameter& parameter) const {
  const Shape shape = parameter.slice.shape();
  // An owner's shard is whole matrices.
  if (shape.rank() == 2 || program_.state()[source_of(parameter)].shape.rank() == 3) return {};
  return {.first = parameter.shard.begin / shape.back(), .rows = shape[1], .matrices = shape[0]};
}

ValueId WeightShards::amax_of_all(Builder& builder, const Parameter& parameter,
                                  const std::string& name) const {
  const ValueId own = block_amax(builder, builder.state(source_of(parameter)), {},
                                 {.part = rows_of(parameter), .rounds = parameter.master.valid()},
                                 name + "_shard_amax");
  return all_gather(builder, own,
                    {.group = state_.part.shard_groups(parameter.gradient_class).within,
                     .ranks = shard_of(parameter).count},
                    name + "_shards_amax");
}

QuantizeAttributes WeightShards::of_shard(const Parameter& parameter,
                                          const QuantizeAttributes& whole) const {
  QuantizeAttributes own = whole;
  own.rounds = parameter.master.valid();
  if (whole.order == CodesOrder::both && !whole.shares_scales()) return own;
  own.order = CodesOrder::rows;
  own.block = whole.has_rows() ? whole.block : whole.transposed_block;
  own.transposed_block = {};
  if (own.block == BlockShape{}) own.part = rows_of(parameter);
  return own;
}

Codes WeightShards::gather_codes(Builder& builder, const Parameter& parameter, const Codes& own,
                                 const Shape& codes, BlockShape block,
                                 const std::string& name) const {
  GatherParameterAttributes attributes{
      .group = state_.part.shard_groups(parameter.gradient_class).within,
      .shard = shard_of(parameter),
      .shape = codes};
  Codes all = own;  // one scale for a matrix is that of all ranks
  all.codes = gather_parameter(builder, own.codes, attributes, name);
  if (block != BlockShape{}) {
    attributes.shape = scales_shape(parameter.slice.shape(), block, 0);
    all.scales = gather_parameter(builder, own.scales, attributes, name + ".scales");
  }
  return all;
}

Quantized WeightShards::gather(const Parameter& parameter, const Quantized& shard,
                               const QuantizeAttributes& wanted, ValueId weight, int32_t before,
                               const Place& at) {
  const Shape shape = parameter.slice.shape();
  const std::string name = program_.value(weight).name + "_q";
  Quantized all;
  if (const auto found = rows_.find(weight.index); found != rows_.end()) all.rows = found->second;
  return rewrite_.insert_before(before, at, [&](Builder& builder) {
    const bool is_transposed_here = !shard.transposed.codes.valid();
    if (!all.rows.codes.valid() && (wanted.has_rows() || is_transposed_here)) {
      const BlockShape block = wanted.has_rows() ? wanted.block : wanted.transposed_block;
      all.rows = gather_codes(builder, parameter, shard.rows, shape, block, name);
      rows_[weight.index] = all.rows;
    }
    if (!wanted.has_transposed()) return all;
    all.transposed =
        is_transposed_here
            ? Codes{transpose_codes(builder, all.rows.codes, name + ".transposed"), all.rows.scales}
            : gather_codes(builder, parameter, shard.transposed, transposed_shape(shape, 0),
                           wanted.transposed_block, name + ".transposed");
    return all;
  });
}

}  // namespace troupe
