// The part of the pass `precision` that belongs to delayed scaling: by which history each operand
// is quantised, and how the histories go on (ops/precision/amax_history/amax_history.h).
//
// A history belongs to a parameter and is one for all ranks that share its products: of tp_dp_cp,
// of an expert's matrix etp and edp. So a step has the same scales in every layout. Scales are
// found at the beginning of the step. What is largest in the step's micro-batches is collected in
// two metrics, one written forward and one backward, so that passes may put the one beside the
// other; at the end it is exchanged, and moves the histories unless the step is skipped. What is
// computed again is not measured again.
//
// One object belongs to one run of the pass.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "ops/precision/amax_history/amax_history.h"
#include "ops/precision/recipe.h"
#include "parallel/layout.h"
#include "program/rewrite.h"

namespace troupe {

struct DelayedScaling {
  AmaxChoice amax = AmaxChoice::most_recent;
  int32_t margin = 0;  // scales leave room for 2^margin times as large elements
  bool operator==(const DelayedScaling&) const = default;
};

class AmaxHistories {
 public:
  // Borrows all. `skip`: says whether the step is void; invalid where nothing is recorded.
  AmaxHistories(Program& program, Rewrite& rewrite, const Layout& layout,
                const DelayedScaling& options, ValueId skip)
      : program_(program),
        rewrite_(rewrite),
        layout_(layout),
        options_(options),
        skip_(skip),
        last_op_(program.op_count() - 1) {}

  bool records() const { return skip_.valid(); }

  // The step has products of this operand. All are added before the first record.
  void add(const MapOperand& slot);

  // What an operand is quantised by.
  ValueId amax(const MapOperand& slot);

  // `amax` was measured in this micro-batch for those that `slots` belong to.
  void note(const std::vector<MapOperand>& slots, ValueId amax);
  // Records what was noted so far before operation `index`.
  void record_before(int32_t index);

  // Exchanges what was recorded and moves the histories, before the last operation of the step.
  void update();

 private:
  // The histories of parameters that the same ranks share, and where they are in the metrics.
  struct Shared {
    std::vector<StateId> histories;
    std::map<int32_t, AmaxHistoryAttributes> columns;  // by state
    std::array<int64_t, 2> count = {};                 // of columns, forward and backward
    std::array<ValueId, 2> metrics;                    // f64 [1, count]
  };
  struct Noted {
    MapOperand slot;
    ValueId amax;
  };

  StateId history_of(const MapOperand& slot) const {
    const StateId history = program_.state()[slot.parameter].amax_history;
    TROUPE_CHECK(history.valid(), "a product in 8 bits without a history");
    return history;
  }
  Shared& shared_of(bool experts) { return shared_[experts ? 1 : 0]; }
  ValueId metric_of(Builder& builder, bool experts, bool backward);
  ValueId over_ranks(Builder& builder, ValueId metric, bool experts) const;

  Program& program_;
  Rewrite& rewrite_;
  const Layout& layout_;
  const DelayedScaling& options_;
  const ValueId skip_;
  const int32_t last_op_;
  std::map<int32_t, std::array<ValueId, kHistoryKinds>> used_;  // by state
  std::array<Shared, 2> shared_;                                // of all ranks; of experts'
  std::vector<Noted> noted_;
  std::set<std::pair<int32_t, int32_t>> recorded_;  // states and kinds
};

}  // namespace troupe
