// What all ranks of a run must have alike before it starts besides their options
// (require_same_options): data and weights. Ranks that are processes read them for themselves, on
// hosts of their own, and one stale copy would train along and change the model without a word.
//
// Facts are compared with rank 0's by name; a name that only one of the two has is not compared.
// All ranks call require_same_facts() at once, each with its own. One thread per rank.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/process_group.h"

namespace troupe {

struct RankFact {
  std::string name;   // as a message says it: "the data set corpus"
  std::string value;  // what a message shows of it
};
using RankFacts = std::vector<RankFact>;

// What differs, for a person: "the data set corpus is B instead of A; ...". At most a few; empty:
// nothing.
std::string fact_differences(const RankFacts& expected, const RankFacts& found);

// Throws a bad request on rank 0 that names the ranks which differ from it, and in what; the others
// are ended by that. `group` may be null.
void require_same_facts(ProcessGroup* group, int32_t rank, const RankFacts& facts);

}  // namespace troupe
