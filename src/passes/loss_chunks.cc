#include "passes/loss_chunks.h"

namespace troupe {

std::vector<int32_t> order_loss_chunks(const Program& program, std::vector<WorkSegment>& segments) {
  OpVector<std::vector<int32_t>> before(program.op_count() + 1);  // what moves there
  OpVector<bool> moves(program.op_count(), false);
  for_each_backward(segments, [&](const WorkSegment& forward, const WorkSegment& backward) {
    int32_t index = backward.begin;
    for (size_t chunk = 0; chunk < backward.chunk_ends.size(); ++chunk) {
      for (; index < backward.chunk_ends[chunk]; ++index) {
        before[forward.chunk_ends[chunk]].push_back(index);
        moves[index] = true;
      }
    }
  });
  std::vector<int32_t> order;
  OpVector<int32_t> new_begins(program.op_count() + 1);
  for (int32_t index = 0; index <= program.op_count(); ++index) {
    // What moved to the end of a segment is the last of it.
    order.insert(order.end(), before[index].begin(), before[index].end());
    new_begins[index] = static_cast<int32_t>(order.size());
    if (index < program.op_count() && !moves[index]) order.push_back(index);
  }
  move_segments(segments, new_begins);
  return order;
}

}  // namespace troupe
