#include "comm/collective_messages.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "program/op_spec.h"

namespace troupe {
namespace {

std::string describe(const TensorView& tensor) {
  return fmt::format("{} {}", name_of(tensor.dtype), tensor.shape.to_string());
}

// "operation 12 (all_reduce), layer 1, micro-batch 0"
std::string describe(const CallSite& site) {
  if (site.operation.empty()) return "no operation";
  std::string text = fmt::format("operation {} ({})", site.index, site.operation);
  if (site.layer >= 0) text += fmt::format(", layer {}", site.layer);
  if (site.micro_batch >= 0) text += fmt::format(", micro-batch {}", site.micro_batch);
  return text;
}

std::string describe(const RankCall& call) {
  std::string text = describe(call.site);
  if (!call.tensors.empty()) text += " of ";
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    text += (i == 0 ? "" : ", ") + describe(call.tensors[i]);
  }
  return text;
}

std::string capitalized(std::string text) {
  if (!text.empty() && text[0] == 'r') text[0] = 'R';
  return text;
}

std::string_view state_text(AbsentRank::State state) {
  switch (state) {
    case AbsentRank::State::has_ended:
      return "has ended";
    case AbsentRank::State::waits:
      return "waits itself";
    case AbsentRank::State::is_silent:
      return "does not answer";
    case AbsentRank::State::is_missing:
      break;
  }
  return "is missing";
}

}  // namespace

CallSite site_of(const CollectiveCall& call) {
  if (call.op == nullptr) return {};
  return {.operation = call.op->spec->name,
          .index = call.index,
          .layer = call.op->place.layer,
          .micro_batch = call.op->place.micro_batch};
}

bool same_type(const TensorView& a, const TensorView& b) {
  return a.dtype == b.dtype && a.shape == b.shape;
}

bool same_call(const RankCall& a, const RankCall& b) {
  return a.site.operation == b.site.operation &&
         std::equal(a.tensors.begin(), a.tensors.end(), b.tensors.begin(), b.tensors.end(),
                    same_type);
}

std::string rank_name(int32_t rank, std::string_view process) {
  return process.empty() ? fmt::format("rank {}", rank)
                         : fmt::format("rank {} [{}]", rank, process);
}

std::string mismatch_message(const RankCall& a, const RankCall& b) {
  return fmt::format(
      "The ranks do not run the same collective: {} is in {}, {} in {}. All ranks end.",
      rank_name(a.rank, a.process), describe(a), rank_name(b.rank, b.process), describe(b));
}

std::string wrong_type_message(const RankCall& sender, const RankCall& receiver) {
  return fmt::format("{} sends {} in {}, but {} receives {} in {}. All ranks end.",
                     capitalized(rank_name(sender.rank, sender.process)),
                     describe(sender.tensors.front()), describe(sender.site),
                     rank_name(receiver.rank, receiver.process), describe(receiver.tensors.front()),
                     describe(receiver.site));
}

std::string missing_message(int32_t rank, std::string_view process, const CallSite& site,
                            std::chrono::milliseconds limit, std::span<const AbsentRank> absent) {
  std::string missing;
  for (const AbsentRank& each : absent) {
    missing += fmt::format("{}{} ({}", missing.empty() ? "" : ", ",
                           rank_name(each.rank, each.process), state_text(each.state));
    if (each.last_seen.has_value()) {
      const bool waits = each.state == AbsentRank::State::waits;
      missing += fmt::format("{} in {}", waits ? "" : ", last seen", describe(*each.last_seen));
    }
    if (!each.waits_for.empty()) {
      missing += fmt::format(", for rank {}", fmt::join(each.waits_for, ", "));
    }
    missing += ")";
  }
  // A wait for a rank that has ended is not as long as the limit.
  const bool is_late = std::none_of(absent.begin(), absent.end(), [](const AbsentRank& each) {
    return each.state == AbsentRank::State::has_ended;
  });
  const std::string what =
      is_late ? fmt::format("timed out ({} s)", std::chrono::duration<double>(limit).count())
              : "cannot go on";
  return fmt::format("{} {} in {}, waiting for: {}. All ranks end.",
                     capitalized(rank_name(rank, process)), what, describe(site), missing);
}

std::string lost_message(int32_t rank, std::string_view process, const CallSite& last_seen) {
  return fmt::format(
      "{} has ended without a word, last seen in {}: its process was killed, or its machine is "
      "gone. All ranks end.",
      capitalized(rank_name(rank, process)), describe(last_seen));
}

}  // namespace troupe
