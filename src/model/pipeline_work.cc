#include "model/pipeline_work.h"

#include <deque>
#include <map>
#include <utility>

namespace troupe {
namespace {

bool is_send(PipelineAction action) {
  return action == PipelineAction::send_activation || action == PipelineAction::send_gradient;
}

bool is_receive(PipelineAction action) {
  return action == PipelineAction::receive_activation || action == PipelineAction::receive_gradient;
}

// By sender: when the work begins for which each message that `receiver` gets is received, in the
// order of receiving.
std::map<int32_t, std::deque<double>> receiving_times(const PipelineTable& table,
                                                      const PipelineTimeline& timeline,
                                                      int32_t receiver) {
  std::map<int32_t, std::deque<double>> times;
  size_t next = 0;  // of the timed steps, which are the computing ones
  for (const PipelineStep& step : table.ranks[static_cast<size_t>(receiver)]) {
    if (is_compute(step.action)) ++next;
    if (!is_receive(step.action)) continue;
    times[step.peer].push_back(timeline.ranks[static_cast<size_t>(receiver)][next].begin);
  }
  return times;
}

}  // namespace

std::vector<PipelineWork> training_work(const ModelPart& part, int32_t micro_batches) {
  PipelineShape shape = part.run->schedule;
  TROUPE_CHECK(shape.ranks == part.layout().pp() && shape.ranks == part.partition().ranks &&
                   shape.chunks == part.partition().chunks &&
                   shape.placement() == part.partition().placement,
               "layout, partition and schedule are of one pipeline");
  shape.micro_batches = micro_batches;
  const PipelineTable table = build_pipeline_table(shape);
  // Any lengths will do as long as no work takes no time.
  const PipelineTimeline timeline = simulate(table, {StageCost{}});
  const int32_t rank = part.dense().pp;

  std::map<int32_t, std::deque<double>> times;  // by receiver: of this rank's messages
  for (int32_t other = 0; other < shape.ranks; ++other) {
    if (other == rank) continue;
    std::map<int32_t, std::deque<double>> received = receiving_times(table, timeline, other);
    times[other] = std::move(received[rank]);
  }

  std::vector<PipelineWork> work;
  std::map<int32_t, size_t> unfinished;  // sends, by receiver
  size_t next = 0;
  for (const PipelineStep& step : table.ranks[static_cast<size_t>(rank)]) {
    PipelineWork& item = work.emplace_back(PipelineWork{step, {}});
    if (is_send(step.action)) ++unfinished[step.peer];
    if (!is_compute(step.action)) continue;
    const double begin = timeline.ranks[static_cast<size_t>(rank)][next++].begin;
    if (step.merged) continue;  // nothing stands within a pair; later is safe, too
    for (auto& [peer, count] : unfinished) {
      std::deque<double>& received = times[peer];
      for (; count > 0 && received.front() <= begin; --count) {
        item.finished.push_back(peer);
        received.pop_front();
      }
    }
  }
  return work;
}

std::vector<PipelineWork> forward_work(const ModelPart& part) {
  const PipelinePartition& partition = part.partition();
  const auto stages = static_cast<int32_t>(partition.stages.size());
  const int32_t rank = part.dense().pp;
  std::vector<PipelineWork> work;
  for (int32_t stage = 0; stage < stages; ++stage) {
    const StagePlace place = partition.place_of(stage);
    if (place.rank != rank) continue;
    const auto add = [&](PipelineAction action, int32_t peer) {
      work.push_back({{action, /*micro_batch=*/0, place.chunk, peer}, {}});
    };
    if (stage > 0 && partition.place_of(stage - 1).rank != rank) {
      add(PipelineAction::receive_activation, partition.place_of(stage - 1).rank);
    }
    add(PipelineAction::forward, -1);
    if (stage + 1 < stages && partition.place_of(stage + 1).rank != rank) {
      add(PipelineAction::send_activation, partition.place_of(stage + 1).rank);
    }
  }
  return work;
}

}  // namespace troupe
