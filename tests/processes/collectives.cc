// Every collective between processes against the same one between threads, bit for bit. Run by a
// launcher, with at least two processes: each also runs all ranks as threads.
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "base/random.h"
#include "comm/thread_group.h"
#include "processes/started_processes.h"
#include "program/shard.h"

namespace troupe {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kPatient{60'000};

// A tensor with memory of its own.
struct Tensor {
  Tensor(DType dtype, const Shape& shape)
      : bytes(static_cast<size_t>(shape.elements()) * size_of(dtype)),
        view{.data = bytes.data(), .dtype = dtype, .shape = shape} {}
  Tensor(Tensor&& other) noexcept = default;

  std::vector<std::byte> bytes;
  TensorView view;
};

// Numbers that are different on every rank, of which sums are rounded.
Tensor drawn(DType dtype, const Shape& shape, int rank, uint32_t stream) {
  Tensor tensor(dtype, shape);
  for (int64_t i = 0; i < shape.elements(); ++i) {
    const double number =
        random_normal(7, RandomStream::test, 100 * stream + static_cast<uint32_t>(rank),
                      static_cast<uint64_t>(i));
    switch (dtype) {
      case DType::f64:
        tensor.view.as<double>()[i] = number;
        break;
      case DType::f32:
        tensor.view.as<float>()[i] = static_cast<float>(number);
        break;
      case DType::bf16:
        tensor.view.as<bf16>()[i] = static_cast<bf16>(static_cast<float>(number));
        break;
      default:
        tensor.view.as<int32_t>()[i] = static_cast<int32_t>(std::lround(1000 * number));
        break;
    }
  }
  return tensor;
}

using Results = std::vector<Tensor>;

std::vector<TensorView> views_of(const Results& tensors) {
  std::vector<TensorView> views;
  for (const Tensor& tensor : tensors) views.push_back(tensor.view);
  return views;
}

constexpr std::array kSummed = {DType::f64, DType::f32, DType::bf16, DType::i32};

Results all_reduce(Communicator& group, int rank, ThreadPool& pool) {
  Results tensors;
  tensors.push_back(drawn(DType::f64, {40003}, rank, 1));
  tensors.push_back(drawn(DType::f32, {1}, rank, 2));
  tensors.push_back(drawn(DType::i32, {3, 7}, rank, 3));
  tensors.push_back(drawn(DType::f64, {0, 4}, rank, 4));
  group.all_reduce({}, views_of(tensors), pool);
  return tensors;
}

// A share is more than what is staged at once.
Results all_reduce_in_rounds(Communicator& group, int rank, ThreadPool& pool) {
  Results tensors;
  tensors.push_back(drawn(DType::f32, {3}, rank, 1));
  Tensor& large = tensors.emplace_back(DType::f64, Shape{(40 << 20) / 8});
  auto* data = large.view.as<double>();
  for (int64_t i = 0; i < large.view.shape.elements(); ++i) {
    data[i] = 1.0 / static_cast<double>(i % 1009 + rank + 1);
  }
  tensors.push_back(drawn(DType::f64, {5000}, rank, 2));
  group.all_reduce({}, views_of(tensors), pool);
  return tensors;
}

Results sum(Communicator& group, int rank, ThreadPool& pool) {
  Results results;
  uint32_t stream = 10;
  for (const DType dtype : kSummed) {
    const Tensor own = drawn(dtype, {37, 5}, rank, ++stream);
    const Tensor& result = results.emplace_back(dtype, own.view.shape);
    group.sum({}, own.view, result.view, pool);
    const Tensor& in_place = results.emplace_back(drawn(dtype, {2}, rank, ++stream));
    group.sum({}, in_place.view, in_place.view, pool);
  }
  return results;
}

Results reduce_scatter(Communicator& group, int rank, ThreadPool& pool) {
  Results results;
  uint32_t stream = 20;
  for (const DType dtype : kSummed) {
    const Tensor own = drawn(dtype, {int64_t{group.size()} * 11, 13}, rank, ++stream);
    const Tensor& result = results.emplace_back(dtype, Shape{11, 13});
    group.reduce_scatter({}, own.view, result.view, pool);
  }
  return results;
}

Results shards(Communicator& group, int rank, ThreadPool& pool) {
  Results tensors;
  tensors.push_back(drawn(DType::f64, {4003, 3}, rank, 31));
  tensors.push_back(drawn(DType::f32, {1, 5}, rank, 32));
  tensors.push_back(drawn(DType::f32, {7}, rank, 33));
  tensors.push_back(drawn(DType::f32, {300, 4}, rank, 35));
  const std::vector<int16_t> owners = {-1, 0, -1, static_cast<int16_t>(group.size() - 1)};
  group.reduce_shards({}, views_of(tensors), owners, pool);
  tensors.push_back(drawn(DType::bf16, {9, 2}, rank, 34));
  group.gather_shards({}, views_of(tensors), owners, pool);
  return tensors;
}

Results all_gather(Communicator& group, int rank, ThreadPool& pool) {
  Results results;
  for (const DType dtype : kSummed) {
    const Tensor own = drawn(dtype, {5, 3}, rank, 41);
    const Tensor& gathered = results.emplace_back(dtype, Shape{int64_t{group.size()} * 5, 3});
    group.all_gather({}, own.view, gathered.view, pool);
  }
  return results;
}

// Rank r sends q + r mod 3 rows of 3 numbers to rank q; some blocks are empty.
Results all_to_all(Communicator& group, int rank, ThreadPool& pool) {
  const auto rows = [](int from, int to) { return int64_t{(from + to) % 3}; };
  const auto row_bytes = static_cast<int64_t>(3 * sizeof(double));
  const Tensor own = drawn(DType::f64, {3}, rank, 51);
  Results results;
  const Tensor& received = results.emplace_back(DType::f64, Shape{int64_t{group.size()} * 2, 3});
  Tensor source(DType::f64, {2, 3});
  for (size_t row = 0; row < 2; ++row) {
    std::memcpy(source.bytes.data() + row * 24, own.bytes.data(), 24);
  }
  std::vector<Block> sent;
  std::vector<Block> into;
  for (int other = 0; other < group.size(); ++other) {
    sent.push_back({source.view.data, rows(group.rank(), other) * row_bytes});
    into.push_back({static_cast<std::byte*>(received.view.data) + 2 * other * row_bytes,
                    rows(other, group.rank()) * row_bytes});
  }
  group.all_to_all({}, sent, into, pool);
  return results;
}

Results prefix_sum(Communicator& group, int rank, ThreadPool& /*pool*/) {
  Results results;
  const Tensor own = drawn(DType::i32, {17}, rank, 61);
  results.emplace_back(DType::i32, Shape{17});
  results.emplace_back(DType::i32, Shape{17});
  group.prefix_sum({}, own.view, results[0].view, results[1].view);
  return results;
}

// Every rank writes some rows into its section of all others' windows, in any order and from all
// threads, and how many they are into another window.
Results windows(Communicator& group, int rank, ThreadPool& pool) {
  constexpr int64_t kRows = 50;
  const int ranks = group.size();
  Results results;
  results.emplace_back(DType::i32, Shape{ranks});
  results.emplace_back(DType::f64, Shape{ranks * kRows, 3});
  const std::array blocks = {
      Block{results[0].view.data, static_cast<int64_t>(results[0].bytes.size())},
      Block{results[1].view.data, static_cast<int64_t>(results[1].bytes.size())}};
  const Tensor own = drawn(DType::f64, {kRows, 3}, rank, 71);
  std::vector<int32_t> counts;
  for (int other = 0; other < ranks; ++other) {
    counts.push_back((17 * (group.rank() + 1) + 5 * other) % static_cast<int32_t>(kRows + 1));
  }
  group.open({}, blocks);
  for (int other = 0; other < ranks; ++other) {
    group.put(other, 0, 0, {&counts[static_cast<size_t>(other)], sizeof(int32_t)});
    const int64_t rows = counts[static_cast<size_t>(other)];
    pool.parallel_ranges(rows, 1, [&](int64_t begin, int64_t /*end*/, int) {
      const int64_t row = rows - 1 - begin;
      group.put(other, 1, row * 24, {own.view.as<double>() + row * 3, 24});
    });
  }
  group.close();
  return results;
}

// Round the ring, several under way at once, with a collective between sending and receiving.
Results messages(Communicator& group, int rank, ThreadPool& pool) {
  const int next = (group.rank() + 1) % group.size();
  const int before = (group.rank() + group.size() - 1) % group.size();
  const Tensor small = drawn(DType::f32, {3}, rank, 81);
  const Tensor large = drawn(DType::f64, {100'000}, rank, 82);
  Results results;
  results.emplace_back(DType::f32, Shape{3});
  results.emplace_back(DType::f64, Shape{100'000});
  results.push_back(drawn(DType::f64, {5}, rank, 83));
  if (group.size() == 1) return results;
  group.send({}, small.view, next);
  group.send({}, large.view, next);
  group.all_reduce({}, {&results[2].view, 1}, pool);
  group.receive({}, results[0].view, before);
  group.receive({}, results[1].view, before);
  group.finish_send({}, next);
  group.finish_send({}, next);
  return results;
}

struct Case {
  const char* name;
  Results (*run)(Communicator& group, int rank, ThreadPool& pool);
};
constexpr std::array kCases = {Case{"all_reduce", all_reduce},
                               Case{"all_reduce in rounds", all_reduce_in_rounds},
                               Case{"sum", sum},
                               Case{"reduce_scatter", reduce_scatter},
                               Case{"shards", shards},
                               Case{"all_gather", all_gather},
                               Case{"all_to_all", all_to_all},
                               Case{"prefix_sum", prefix_sum},
                               Case{"windows", windows},
                               Case{"messages", messages}};

// Groups of ranks that divide the world, or leave some out.
std::vector<std::vector<int32_t>> groups_of(int ranks, int32_t rank) {
  std::vector<std::vector<int32_t>> groups = {ranks_below(ranks), {rank}};
  std::vector<int32_t> same_parity;
  for (int32_t r = rank % 2; r < ranks; r += 2) same_parity.push_back(r);
  groups.push_back(same_parity);
  if (rank < ranks / 2 * 2) groups.push_back({rank / 2 * 2, rank / 2 * 2 + 1});
  return groups;
}

bool same(const Results& a, const Results& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].bytes != b[i].bytes) return false;
  }
  return true;
}

// What all cases give this rank in all of its groups.
std::vector<Results> run_all(ProcessGroup& group, int32_t rank) {
  ThreadPool pool(2);
  std::vector<Results> results;
  for (const std::vector<int32_t>& members : groups_of(group.size(), rank)) {
    Communicator& communicator = group.member(rank, members);
    for (const Case& each : kCases) {
      if (each.run == all_reduce_in_rounds && static_cast<int>(members.size()) != group.size()) {
        continue;
      }
      results.push_back(each.run(communicator, rank, pool));
    }
  }
  return results;
}

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

  std::vector<Results> expected;
  ThreadGroup threads(group.size(), kPatient);
  run_ranks(threads, [&](int each) {
    std::vector<Results> of_rank = run_all(threads, each);
    if (each == rank) expected = std::move(of_rank);
  });
  run_ranks(group, [&](int) {
    for (int repeat = 0; repeat < 2; ++repeat) {
      const std::vector<Results> found = run_all(group, rank);
      expect(found.size() == expected.size(), "another number of results");
      for (size_t i = 0; i < std::min(found.size(), expected.size()); ++i) {
        expect(same(found[i], expected[i]),
               "result " + std::to_string(i) + " is not that of threads");
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
