// A process group that is said rather than run: which ranks this process and its machine have, and
// what an exchange answers. For what depends on that alone.
#pragma once

#include <chrono>
#include <deque>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "comm/process_group.h"

namespace troupe::testing {

class FixedGroup : public ProcessGroup {
 public:
  struct Ranks {
    std::vector<int32_t> own_ranks = {0};
    int32_t ranks = 1;  // all on one machine
  };
  explicit FixedGroup(const Ranks& ranks)
      : ProcessGroup(std::chrono::seconds(1), ranks.own_ranks,
                     std::vector<int32_t>(static_cast<size_t>(ranks.ranks), 0)) {}

  // Of the exchanges to come, in their order; none is made without one.
  std::deque<std::vector<uint64_t>> answers;

  std::vector<uint64_t> exchange(int /*rank*/, uint64_t /*value*/) override {
    std::vector<uint64_t> answer = std::move(answers.at(0));
    answers.pop_front();
    return answer;
  }
  std::vector<std::string> gather(int /*rank*/, std::string /*bytes*/) override { refuse(); }
  Communicator& member(int /*rank*/, const std::vector<int32_t>& /*members*/) override { refuse(); }

 private:
  [[noreturn]] static void refuse() { throw std::logic_error("a group that computes nothing"); }
  void run(const std::function<void(int)>& /*body*/) override { refuse(); }
};

}  // namespace troupe::testing
