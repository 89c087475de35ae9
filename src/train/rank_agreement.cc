#include "train/rank_agreement.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/text.h"
#include "io/hash.h"

namespace troupe {
namespace {

using nlohmann::json;

constexpr size_t kMostFacts = 5;
constexpr size_t kRanksShown = 8;
constexpr auto kReplace = json::error_handler_t::replace;

std::string to_text(const RankFacts& facts) {
  json all = json::array();
  for (const RankFact& fact : facts) all.push_back({fact.name, fact.value});
  return all.dump(-1, ' ', false, kReplace);
}

RankFacts from_text(const std::string& text) {
  RankFacts facts;
  const json all = json::parse(text, nullptr, /*allow_exceptions=*/false);
  for (const json& pair : all) {
    if (!pair.is_array() || pair.size() != 2 || !pair[0].is_string() || !pair[1].is_string()) break;
    facts.push_back({pair[0].get<std::string>(), pair[1].get<std::string>()});
  }
  return facts;
}

}  // namespace

std::string fact_differences(const RankFacts& expected, const RankFacts& found) {
  std::vector<std::string> texts;
  size_t count = 0;
  for (const RankFact& fact : found) {
    const auto same = std::find_if(expected.begin(), expected.end(),
                                   [&](const RankFact& other) { return other.name == fact.name; });
    if (same == expected.end() || same->value == fact.value) continue;
    if (++count > kMostFacts) continue;
    texts.push_back(fmt::format("{} is {} instead of {}", printable(fact.name),
                                printable(fact.value), printable(same->value)));
  }
  if (count > kMostFacts) texts.push_back(fmt::format("and {} more", count - kMostFacts));
  return fmt::format("{}", fmt::join(texts, "; "));
}

void require_same_facts(ProcessGroup* group, int32_t rank, const RankFacts& facts) {
  if (group == nullptr) return;
  const std::string text = to_text(facts);
  const std::vector<uint64_t> hashes = group->exchange(rank, hash_bytes(text.data(), text.size()));
  if (std::all_of(hashes.begin(), hashes.end(), [&](uint64_t hash) { return hash == hashes[0]; })) {
    return;
  }
  const std::vector<std::string> texts = group->gather(rank, text);
  if (rank != 0) return;
  const RankFacts own = from_text(text);  // as others' come, in which a byte may be replaced
  std::vector<size_t> ranks;
  std::string first;
  for (size_t other = 1; other < texts.size(); ++other) {
    if (hashes[other] == hashes[0]) continue;
    const std::string differences = fact_differences(own, from_text(texts[other]));
    if (differences.empty()) continue;
    ranks.push_back(other);
    if (first.empty()) first = differences;
  }
  if (ranks.empty()) return;
  const size_t shown = std::min(ranks.size(), kRanksShown);
  std::string names = fmt::format("{}", fmt::join(ranks.begin(), ranks.begin() + shown, ", "));
  if (ranks.size() > shown) names += fmt::format(" and {} more", ranks.size() - shown);
  throw_bad_request(fmt::format(
      "Rank{} {} {} not started as rank 0 was. On rank {}: {}. Give all ranks the same flags, and "
      "folders that all hosts share, or the same copies of them.",
      ranks.size() > 1 ? "s" : "", names, ranks.size() > 1 ? "were" : "was", ranks.front(), first));
}

}  // namespace troupe
