#include "passes/message_codes.h"

#include <algorithm>
#include <string>

#include "ops/exchange/all_gather/all_gather.h"
#include "ops/exchange/coded_rows/coded_rows.h"
#include "ops/exchange/exchange_rows/exchange_rows.h"
#include "ops/exchange/push_rows/push_rows.h"
#include "program/rewrite.h"

namespace troupe {
namespace {

class MessageCodesPass {
 public:
  explicit MessageCodesPass(Program& program)
      : program_(program),
        rewrite_(program),
        rounded_by_(program.value_count(), -1),
        codes_(program.value_count()),
        is_read_(program.value_count(), false) {}

  std::vector<int32_t> run(std::vector<WorkSegment>& segments) {
    const int32_t count = program_.op_count();
    for (int32_t index = 0; index < count; ++index) visit(index);
    for (int32_t index = 0; index < count; ++index) {
      const Op& op = program_.op(index);
      if (op.spec == &kRoundRows && !is_read_[program_.outputs(op)[0]]) rewrite_.remove(index);
    }
    std::vector<int32_t> order = rewrite_.order();
    move_segments(segments, rewrite_.new_begins());
    return order;
  }

 private:
  void visit(int32_t index) {
    rewrite_.read_stand_ins(index);
    const Op op = program_.op(index);
    const std::vector<ValueId> inputs(program_.inputs(op).begin(), program_.inputs(op).end());
    if (op.spec == &kRoundGradient) {
      rewrite_.replace(program_.outputs(op)[0], inputs[0]);
      rewrite_.remove(index);
      return;
    }
    if (op.spec == &kRoundRows) rounded_by_[program_.outputs(op)[0]] = index;
    const auto rounded = std::find_if(inputs.begin(), inputs.end(), [&](ValueId id) {
      return id.valid() && rounded_by_.has(id) && rounded_by_[id] >= 0;
    });
    if (rounded == inputs.end()) return;
    if (op.spec == &kSendRows || op.spec == &kPushRows || op.spec == &kAllGather) {
      exchange_codes(index, inputs, static_cast<size_t>(rounded - inputs.begin()));
    } else {
      is_read_[*rounded] = true;
    }
  }

  // Encoded where they were rounded, once for all who send them.
  ValueId codes_of(ValueId rounded) {
    if (!codes_[rounded].valid()) {
      const Op& op = program_.op(rounded_by_[rounded]);
      const ValueId x = program_.inputs(op)[0];
      const std::string name = program_.value(rounded).name + "_codes";
      codes_[rounded] =
          rewrite_.insert_before(rounded_by_[rounded], op.place,
                                 [&](Builder& builder) { return encode_rows(builder, x, name); });
    }
    return codes_[rounded];
  }

  void exchange_codes(int32_t index, std::vector<ValueId> inputs, size_t coded) {
    const ValueId rounded = inputs[coded];
    inputs[coded] = codes_of(rounded);
    const Op op = program_.op(index);
    const std::vector<ValueId> results(program_.outputs(op).begin(), program_.outputs(op).end());
    std::string name = program_.value(results[0]).name;
    if (op.spec == &kPushRows) name.resize(name.rfind('.'));  // it names all that is pushed
    std::vector<ValueId> sent = rewrite_.insert_before(index, op.place, [&](Builder& builder) {
      return builder.emit(*op.spec, op.attributes, inputs, name);
    });
    // Pushed rows come after how many there are, and have two inputs before them.
    const bool pushed = op.spec == &kPushRows;
    const size_t result = pushed ? coded - 1 : 0;
    DecodeRowsAttributes attributes{.dtype = program_.value(rounded).dtype,
                                    .elements = program_.value(rounded).shape[1]};
    if (pushed) attributes.expected_rows = op.attributes.as<PushRowsAttributes>().expected_received;
    Place place = op.place;
    place.queue = program_.op(rounded_by_[rounded]).place.queue;
    sent[result] = rewrite_.insert_before(index, place, [&](Builder& builder) {
      return decode_rows(builder, sent[result], pushed ? sent[0] : ValueId{}, attributes,
                         program_.value(results[result]).name + "_decoded");
    });
    for (size_t i = 0; i < results.size(); ++i) rewrite_.replace(results[i], sent[i]);
    rewrite_.remove(index);
  }

  Program& program_;
  Rewrite rewrite_;
  // Of the values that the program had.
  IdVector<ValueId, int32_t> rounded_by_;  // the operation, of results of round_rows
  IdVector<ValueId, ValueId> codes_;       // of these
  IdVector<ValueId, bool> is_read_;        // of these: by others than exchanges
};

}  // namespace

std::vector<int32_t> send_codes(Program& program, std::vector<WorkSegment>& segments) {
  return MessageCodesPass(program).run(segments);
}

}  // namespace troupe
