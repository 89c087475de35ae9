// What a rank sends to other ranks in a step, by group: what a simulator of links needs to know
// beside the operations' costs (LinkTraffic in program/op_spec.h).
//
// Pure functions; any thread.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "parallel/layout.h"
#include "program/op_spec.h"
#include "program/program.h"

namespace troupe {

struct GroupTraffic {
  RankGroup group = RankGroup::world;
  int32_t ranks = 1;       // of the group
  int64_t operations = 0;  // collectives and messages that send anything
  LinkTraffic sent;        // by this rank, in all of them
};

// Of one operation, of a rank in a group of `ranks`; nothing where it sends nothing. `op` is of a
// program with expected rows (Program::with_expected_rows).
LinkTraffic link_traffic(const OpView& op, int32_t ranks);

// Of all operations of a rank's program, by group in the order of RankGroup; groups of one rank are
// left out.
std::vector<GroupTraffic> link_traffic(const Program& program, const Layout& layout, int32_t rank);

// "tp of 2 ranks 12.0 MiB in 96 messages; ..."; empty where nothing is sent.
std::string text_of(std::span<const GroupTraffic> traffic);

}  // namespace troupe
