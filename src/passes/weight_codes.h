// The part of the pass `precision` that belongs to weights which are kept as master weights alone
// (RunLayout::weight_codes), where the rank has a shard of these: it quantises the shard once, at
// the beginning of the step, and ranks gather codes: once for the step, or in each pass through the
// layer where all state is sharded. Transposed codes are made of gathered rows where both have the
// same scales; else they are gathered themselves. One object belongs to one run of the pass.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "model/model_state.h"
#include "ops/precision/quantize/quantize.h"
#include "program/rewrite.h"

namespace troupe {

// Aborts where an operation of `order` reads a weight that is kept as master weights alone.
void check_stored(const Program& program, const std::vector<int32_t>& order);

class WeightShards {
 public:
  // Borrows all.
  WeightShards(Program& program, Rewrite& rewrite, const ModelState& state);

  // The parameter whose codes are read in place of that state; null where there is none.
  const Parameter* search(StateId value) const;
  // What its codes are made of, and whether ranks have a shard of that each.
  static StateId source_of(const Parameter& parameter) {
    return parameter.master.valid() ? parameter.master : parameter.value;
  }
  bool is_sharded(const Parameter& parameter) const;

  // Which rows of the weight's matrices the shard has, where each has one scale.
  MatrixRows rows_of(const Parameter& parameter) const;
  // The largest elements of all shards' matrices, one rank's after the other's.
  ValueId amax_of_all(Builder& builder, const Parameter& parameter, const std::string& name) const;
  // How the shard is quantised so that a weight's codes can be gathered that `whole` asks for.
  QuantizeAttributes of_shard(const Parameter& parameter, const QuantizeAttributes& whole) const;
  // The whole weight's codes, as `wanted`, by a shard's. `weight`: what stood for the whole weight;
  // of which rows are gathered once, before operation `before`.
  Quantized gather(const Parameter& parameter, const Quantized& shard,
                   const QuantizeAttributes& wanted, ValueId weight, int32_t before,
                   const Place& at);

 private:
  Codes gather_codes(Builder& builder, const Parameter& parameter, const Codes& own,
                     const Shape& codes, BlockShape block, const std::string& name) const;
  Shard shard_of(const Parameter& parameter) const;

  Program& program_;
  Rewrite& rewrite_;
  const ModelState& state_;
  std::map<int32_t, const Parameter*> parameters_;  // by state
  std::map<int32_t, Codes> rows_;                   // by value
};

}  // namespace troupe
