#include "parallel/group_schedule.h"

#include <algorithm>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/text.h"
#include "comm/bytes.h"
#include "ops/registry.h"
#include "parallel/collective_schedule.h"
#include "program/op_spec.h"

namespace troupe {
namespace {

using Event = CollectiveTrace::Event;

std::string to_bytes(const CollectiveTrace& trace) {
  std::string bytes;
  for (const Event& event : trace.events) {
    append_bytes(bytes, std::string_view(event.spec->name));
    append_bytes(bytes, event.index);
    append_bytes(bytes, event.place);
    append_bytes(bytes, event.group);
    append_bytes(bytes, event.message);
    append_bytes(bytes, event.first);
    append_bytes(bytes, event.tensors.size());
    for (const CollectiveTrace::Tensor& tensor : event.tensors) {
      append_bytes(bytes, std::string_view(tensor.name));
      append_bytes(bytes, tensor.dtype);
      append_bytes(bytes, tensor.shape);
      append_bytes(bytes, tensor.given);
    }
  }
  return bytes;
}

const OpSpec* find_spec(std::string_view name) {
  for (const OpSpec* spec : all_operations()) {
    if (spec->name == name) return spec;
  }
  throw_failed("The ranks run different builds of Troupe: one has the operation " +
               quote_name(name) + ", another has not.");
}

CollectiveTrace trace_of(std::string_view bytes) {
  CollectiveTrace trace;
  ByteReader reader(bytes);
  while (!reader.at_end()) {
    Event event;
    event.spec = find_spec(reader.take_text());
    event.index = reader.take<decltype(event.index)>();
    event.place = reader.take<decltype(event.place)>();
    event.group = reader.take<decltype(event.group)>();
    event.message = reader.take<decltype(event.message)>();
    event.first = reader.take<decltype(event.first)>();
    event.tensors.resize(reader.take_count(sizeof(DType) + sizeof(Shape)));
    for (CollectiveTrace::Tensor& tensor : event.tensors) {
      tensor.name = reader.take_text();
      tensor.dtype = reader.take_dtype();
      tensor.shape = reader.take_shape();
      tensor.given = reader.take<uint8_t>() != 0;
    }
    trace.events.push_back(std::move(event));
  }
  return trace;
}

}  // namespace

void verify_collectives(ProcessGroup& group, int32_t rank, const Program& program,
                        const Layout& layout) {
  const std::vector<uint64_t> hashes = group.exchange(rank, hash_collectives(program));
  const auto own = hashes.begin() + rank;
  const bool first_of_its_kind = std::find(hashes.begin(), own, *own) == own;
  const std::vector<std::string> gathered =
      group.gather(rank, first_of_its_kind ? to_bytes(trace_collectives(program)) : std::string());
  if (rank == 0) {
    std::vector<CollectiveTrace> traces;
    std::vector<int32_t> trace_of_rank;
    std::map<uint64_t, int32_t> known;
    for (size_t i = 0; i < hashes.size(); ++i) {
      const auto [found, is_new] =
          known.try_emplace(hashes[i], static_cast<int32_t>(traces.size()));
      if (is_new) traces.push_back(trace_of(gathered[i]));
      trace_of_rank.push_back(found->second);
    }
    verify_collectives(traces, trace_of_rank, layout);
  }
  group.exchange(rank, 0);  // no rank begins before the verdict
}

}  // namespace troupe
