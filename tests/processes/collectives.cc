// Every collective between processes against the same one between threads, bit for bit. Run by a
// launcher, with at least two processes: each also runs all ranks as threads.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "comm/thread_group.h"
#include "processes/started_processes.h"
#include "support/collective_cases.h"

namespace troupe {
namespace {

using std::chrono::milliseconds;
using testing::run_collective_cases;

constexpr milliseconds kPatient{60'000};

int run(Processes& processes) {
  ProcessGroup& group = processes.group(kPatient);
  const auto rank = static_cast<int32_t>(processes.rank());
  int failures = 0;
  const auto expect = [&](bool condition, const std::string& what) {
    if (condition) return;
    ++failures;
    std::fprintf(stderr, "rank %d: %s\n", static_cast<int>(rank), what.c_str());
  };

  for (uint64_t round = 0; round < 20; ++round) {
    const std::vector<uint64_t> values =
        group.exchange(rank, 100 * round + static_cast<uint64_t>(rank));
    for (uint64_t other = 0; other < values.size(); ++other) {
      expect(values[other] == 100 * round + other, "exchange gives another number");
    }
  }
  const std::string text(static_cast<size_t>(rank) * 100'000 + 1, static_cast<char>('a' + rank));
  const std::vector<std::string> texts = group.gather(rank, text);
  expect(texts.size() == (rank == 0 ? static_cast<size_t>(group.size()) : 0), "gather");
  for (size_t other = 0; other < texts.size(); ++other) {
    expect(texts[other] == std::string(other * 100'000 + 1, static_cast<char>('a' + other)),
           "gather gives other bytes");
  }

  std::vector<std::string> expected;
  ThreadGroup threads(group.size(), kPatient);
  run_ranks(threads, [&](int each) {
    std::vector<std::string> of_rank = run_collective_cases(threads, each, true);
    if (each == rank) expected = std::move(of_rank);
  });
  run_ranks(group, [&](int) {
    for (int repeat = 0; repeat < 2; ++repeat) {
      const std::vector<std::string> found = run_collective_cases(group, rank, true);
      expect(found.size() == expected.size(), "another number of results");
      for (size_t i = 0; i < std::min(found.size(), expected.size()); ++i) {
        expect(found[i] == expected[i], "result " + std::to_string(i) + " is not that of threads");
      }
    }
  });
  for (const uint64_t others : group.exchange(rank, static_cast<uint64_t>(failures))) {
    failures += static_cast<int>(others);
  }
  processes.finish();
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace troupe

int main() {
  const std::unique_ptr<troupe::Processes> processes = troupe::join_started_processes();
  try {
    return troupe::run(*processes);
  } catch (const troupe::UserError& error) {
    processes->fail(error.status(), error.what());
  }
}
