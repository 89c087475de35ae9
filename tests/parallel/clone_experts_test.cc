// Weights of experts that are copied to other ranks, and their gradients on the way back: every
// copy is its owner's bits, gradients are summed in the order of places, and nothing is read of
// places without a copy.
#include "ops/exchange/clone_experts/clone_experts.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "base/random.h"
#include "comm/thread_group.h"
#include "passes/autodiff.h"
#include "program/verify.h"
#include "runtime/cpu/cpu_interpreter.h"

namespace troupe::testing {
namespace {

constexpr std::chrono::milliseconds kPatientWithCopies{60'000};
constexpr int32_t kOwn = 3;           // experts of a rank
constexpr int64_t kElements = 40000;  // of an expert: several pieces of work

// Of rank `rank`, 0: weights of its experts, 1: gradients of its copies.
double draw_element(int rank, uint32_t what, int64_t i) {
  return random_normal(11, RandomStream::test, static_cast<uint32_t>(rank) * 2 + what,
                       static_cast<uint64_t>(i));
}

struct CloneCase {
  std::string name;
  int32_t ranks;
  std::vector<int32_t> experts;  // by place

  int32_t clones() const { return static_cast<int32_t>(experts.size()) / ranks; }
  int32_t copy_at(int rank, int32_t i) const {
    return experts[static_cast<size_t>(rank * clones() + i)];
  }
};

class CloneExperts : public ::testing::TestWithParam<CloneCase> {};

TEST_P(CloneExperts, BringsWeightsThereAndGradientsBack) {
  const CloneCase& c = GetParam();
  ThreadGroup group(c.ranks, kPatientWithCopies);
  run_ranks(group, [&](int rank) {
    SCOPED_TRACE("rank " + std::to_string(rank));
    const auto table = std::make_shared<const StateTable>();
    Program program(table);
    Builder builder(program);
    const CloneExpertsAttributes attributes{.ranks = c.ranks};
    const int64_t all = c.clones();
    const ValueId weight = builder.input("weight", DType::f64, {kOwn, 4, kElements / 4});
    const ValueId experts =
        builder.input("experts", DType::i32, {static_cast<int64_t>(c.experts.size())});
    const ValueId gradient = builder.input("gradient", DType::f64, {all, 4, kElements / 4});
    const ValueId copied = clone_experts(builder, weight, experts, attributes, "copied");
    MainGradients main_gradients(*table);
    const std::vector<GradientSeed> seeds = {{copied, gradient}};
    const std::vector<ValueId> wanted = {weight};
    const ValueId returned =
        append_backward(builder, 0, program.op_count(), seeds, wanted, main_gradients)[weight];
    program.add_result(copied);
    program.add_result(returned);
    verify_program(program);

    Communicators communicators;
    communicators.of(RankGroup::ep) = &group.member(rank);
    const StateStorage storage(table);
    ThreadPool pool(1 + rank % 2);
    CpuInterpreter interpreter(program, plan_memory(program, 1 + rank % 2), storage, pool,
                               communicators);
    std::copy(c.experts.begin(), c.experts.end(), interpreter.view(experts).as<int32_t>());
    auto* weights = interpreter.view(weight).as<double>();
    for (int64_t i = 0; i < kOwn * kElements; ++i) weights[i] = draw_element(rank, 0, i);
    auto* gradients = interpreter.view(gradient).as<double>();
    for (int64_t i = 0; i < all * kElements; ++i) {
      const bool is_used = c.copy_at(rank, static_cast<int32_t>(i / kElements)) >= 0;
      gradients[i] = is_used ? draw_element(rank, 1, i) : std::numeric_limits<double>::quiet_NaN();
    }
    for (int run = 0; run < 2; ++run) {
      interpreter.run();
      const auto* found = interpreter.view(copied).as<double>();
      const auto* sums = interpreter.view(returned).as<double>();
      for (int64_t i = 0; i < all * kElements; ++i) {
        const int32_t expert = c.copy_at(rank, static_cast<int32_t>(i / kElements));
        const double expected =
            expert < 0 ? 0
                       : draw_element(expert / kOwn, 0, expert % kOwn * kElements + i % kElements);
        ASSERT_EQ(found[i], expected) << "element " << i;
      }
      for (int64_t i = 0; i < kOwn * kElements; ++i) {
        double sum = 0;
        bool has_copies = false;
        for (size_t place = 0; place < c.experts.size(); ++place) {
          if (c.experts[place] != rank * kOwn + i / kElements) continue;
          const auto holder = static_cast<int32_t>(place) / c.clones();
          const int64_t copy = static_cast<int64_t>(place) % c.clones();
          const double term = draw_element(holder, 1, copy * kElements + i % kElements);
          sum = has_copies ? sum + term : term;
          has_copies = true;
        }
        ASSERT_EQ(sums[i], sum) << "element " << i;
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Groups, CloneExperts,
    ::testing::Values(CloneCase{"no_copies", 2, {-1, -1}}, CloneCase{"one_of_each", 2, {4, 1}},
                      CloneCase{"one_expert_everywhere", 4, {-1, 1, 1, 1}},
                      // Two of one owner at a rank, the later expert first.
                      CloneCase{"several_of_one_owner", 3, {8, 6, -1, -1, 7, 1}},
                      CloneCase{"some_places_empty", 4, {4, -1, 10, -1, -1, -1, 4, 1}},
                      CloneCase{"one_rank", 1, {-1, -1}}),
    [](const auto& test) { return test.param.name; });

// Into main gradients in bf16, where one rank's expert has two copies and the other's none: sums of
// f32 terms are added to what is there and rounded once, or stored.
TEST(ReturnClones, RoundsOnceToANarrowMainGradient) {
  constexpr int kRanks = 3;
  ThreadGroup group(kRanks, kPatientWithCopies);
  run_ranks(group, [&](int rank) {
    const auto table = std::make_shared<StateTable>();
    const StateId target =
        table->add({.name = "d_w", .dtype = DType::bf16, .shape = {1, 2}, .role = Role::gradient});
    Program program(table);
    Builder builder(program);
    const ValueId experts = builder.input("experts", DType::i32, {kRanks});
    const ValueId gradient = builder.input("gradient", DType::f32, {1, 2});
    for (const bool accumulate : {false, true, true}) {
      builder.place.queue = queue_of(RankGroup::ep);
      builder.emit(kReturnClones,
                   Attributes(CloneExpertsAttributes{.ranks = kRanks, .accumulate = accumulate}),
                   {gradient, experts, builder.state(target)}, "sum");
    }
    const StateStorage storage(table);
    Communicators communicators;
    communicators.of(RankGroup::ep) = &group.member(rank);
    ThreadPool pool(1);
    CpuInterpreter interpreter(program, plan_memory(program, 1), storage, pool, communicators);
    const std::vector<int32_t> of_places = {-1, 0, 0};  // copies of rank 0's expert
    std::copy(of_places.begin(), of_places.end(), interpreter.view(experts).as<int32_t>());
    auto* terms = interpreter.view(gradient).as<float>();
    for (int i = 0; i < 2; ++i) terms[i] = 1.0F + 0.01F * static_cast<float>(i + rank);
    auto* found = storage.view(target).as<bf16>();
    std::fill_n(found, 2, bf16(7.0F));
    interpreter.run();
    for (int i = 0; i < 2; ++i) {
      const float sum =
          1.0F + 0.01F * static_cast<float>(i + 1) + (1.0F + 0.01F * static_cast<float>(i + 2));
      const bf16 twice = bf16(float(bf16(sum)) + sum);
      EXPECT_EQ(float(found[i]), rank == 0 ? float(bf16(float(twice) + sum)) : 0.0F);
    }
  });
}

}  // namespace
}  // namespace troupe::testing
