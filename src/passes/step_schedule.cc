#include "passes/step_schedule.h"

#include <algorithm>
#include <deque>
#include <utility>

#include "base/error.h"

namespace troupe {
namespace {

class Scheduler {
 public:
  Scheduler(const Program& program, const OverlapOptions& overlap)
      : program_(program), overlap_(overlap) {}

  std::vector<int32_t> run(std::span<const WorkSegment> segments) {
    int32_t done = 0;
    for (size_t i = 0; i < segments.size(); ++i) {
      const WorkSegment& segment = segments[i];
      TROUPE_CHECK(done <= segment.begin, "segments have the order of the program");
      append(operations(done, segment.begin));
      const bool is_merged_with_next = i + 1 < segments.size() && segments[i + 1].step.merged;
      place(segment, is_merged_with_next);
      done = segment.end;
    }
    append(operations(done, program_.op_count()));
    TROUPE_CHECK(unmerged_.empty(), "a forward is merged with the backward after it");
    TROUPE_CHECK(held_.empty(), "every weight gradient has its turn");
    return std::move(order_);
  }

 private:
  struct Held {
    PipelineStep step;
    std::vector<int32_t> weight_gradients;
  };

  static std::vector<int32_t> operations(int32_t begin, int32_t end) {
    std::vector<int32_t> list;
    for (int32_t index = begin; index < end; ++index) list.push_back(index);
    return list;
  }

  void append(const std::vector<int32_t>& list) {
    order_.insert(order_.end(), list.begin(), list.end());
  }

  void place(const WorkSegment& segment, bool is_merged_with_next) {
    if (segment.step.action == PipelineAction::weight_gradient) {
      append(take_held(segment.step));
      return;
    }
    std::vector<int32_t> list = operations(segment.begin, segment.end);
    if (segment.step.action == PipelineAction::data_gradient) hold(segment.step, list);
    if (overlap_.any()) list = overlap_within_pass(program_, list, overlap_);
    if (is_merged_with_next) {
      unmerged_ = std::move(list);
    } else if (segment.step.merged) {
      append(merge_at_exchanges(program_, std::exchange(unmerged_, {}), list));
    } else {
      append(list);
    }
  }

  // Takes the weight gradients out.
  void hold(const PipelineStep& step, std::vector<int32_t>& list) {
    // Of a block that works in rounds each has its weight gradients at once, so that what they read
    // is not kept for all of them.
    const auto of_data = [&](int32_t index) {
      const Place& place = program_.op(index).place;
      return place.phase != Phase::weight_gradient || place.round > 0;
    };
    const auto first = std::stable_partition(list.begin(), list.end(), of_data);
    held_.push_back({step, {first, list.end()}});
    list.erase(first, list.end());
  }

  std::vector<int32_t> take_held(const PipelineStep& step) {
    TROUPE_CHECK(!held_.empty() && held_.front().step.chunk == step.chunk &&
                     held_.front().step.micro_batch == step.micro_batch,
                 "weight gradients have the order of data gradients");
    std::vector<int32_t> taken = std::move(held_.front().weight_gradients);
    held_.pop_front();
    return taken;
  }

  const Program& program_;
  const OverlapOptions& overlap_;
  std::vector<int32_t> order_;
  std::vector<int32_t> unmerged_;  // a forward that waits for its backward
  std::deque<Held> held_;
};

}  // namespace

std::vector<int32_t> order_segments(const Program& program, std::span<const WorkSegment> segments,
                                    const OverlapOptions& overlap) {
  return Scheduler(program, overlap).run(segments);
}

}  // namespace troupe
