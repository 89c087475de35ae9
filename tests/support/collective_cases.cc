#include "support/collective_cases.h"

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/random.h"
#include "base/thread_pool.h"

namespace troupe::testing {
namespace {

// A tensor with memory of its own.
struct Tensor {
  Tensor(DType dtype, const Shape& shape)
      : bytes(static_cast<size_t>(shape.elements()) * size_of(dtype)),
        view{.data = bytes.data(), .dtype = dtype, .shape = shape} {}
  Tensor(Tensor&& other) noexcept = default;

  // Who reads the memory later than it may must not find the numbers there.
  ~Tensor() {
    for (volatile std::byte& each : bytes) each = std::byte{0xee};
  }
  std::vector<std::byte> bytes;
  TensorView view;
};

using Results = std::vector<Tensor>;

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

using Case = Results (*)(Communicator& group, int rank, ThreadPool& pool);
constexpr std::array<Case, 9> kCases = {all_reduce, sum,        reduce_scatter, shards,  all_gather,
                                        all_to_all, prefix_sum, windows,        messages};

// Groups of ranks that divide the world, or leave some out.
std::vector<std::vector<int32_t>> groups_of(int ranks, int32_t rank) {
  std::vector<std::vector<int32_t>> groups = {ranks_below(ranks), {rank}};
  std::vector<int32_t> same_parity;
  for (int32_t r = rank % 2; r < ranks; r += 2) same_parity.push_back(r);
  groups.push_back(same_parity);
  if (rank < ranks / 2 * 2) groups.push_back({rank / 2 * 2, rank / 2 * 2 + 1});
  return groups;
}

std::string bytes_of(const Results& results) {
  std::string bytes;
  for (const Tensor& each : results) {
    bytes.append(reinterpret_cast<const char*>(each.bytes.data()), each.bytes.size());
  }
  return bytes;
}

}  // namespace

std::vector<std::string> run_collective_cases(ProcessGroup& group, int32_t rank, bool with_large) {
  ThreadPool pool(2);
  std::vector<std::string> results;
  for (const std::vector<int32_t>& members : groups_of(group.size(), rank)) {
    Communicator& communicator = group.member(rank, members);
    for (const Case run : kCases) results.push_back(bytes_of(run(communicator, rank, pool)));
    if (with_large && static_cast<int>(members.size()) == group.size()) {
      results.push_back(bytes_of(all_reduce_in_rounds(communicator, rank, pool)));
    }
  }
  return results;
}

}  // namespace troupe::testing
