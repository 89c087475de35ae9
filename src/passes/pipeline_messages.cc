#include "passes/pipeline_messages.h"

#include "ops/exchange/pipeline_message/pipeline_message.h"

namespace troupe {

ValueId StageMessages::receive(int32_t from, int32_t streams, const std::string& name) {
  const Shape shape = {streams * shape_[0], shape_[1]};
  return troupe::receive(builder_, {.way = {.peer = from}, .dtype = dtype_, .shape = shape}, name);
}

void StageMessages::send(ValueId value, int32_t to) {
  const Value& sent = builder_.value(value);
  TROUPE_CHECK(sent.dtype == dtype_ && sent.shape[0] % shape_[0] == 0 && sent.shape[1] == shape_[1],
               "a message of the pipeline: " + sent.name);
  troupe::send(builder_, value, {.peer = to});
  unfinished_[to].push_back({value, builder_.place});
}

void StageMessages::finish(int32_t peer) {
  std::deque<Sent>& sent = unfinished_[peer];
  TROUPE_CHECK(!sent.empty(), "a send to be finished");
  const PlaceScope scope(builder_, sent.front().place);
  finish_send(builder_, sent.front().value, {.peer = peer});
  sent.pop_front();
}

void StageMessages::finish_all() {
  for (const auto& [peer, sent] : unfinished_) {
    while (!sent.empty()) finish(peer);
  }
}

}  // namespace troupe
