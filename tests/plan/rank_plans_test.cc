// Classes of ranks: a rank that is planned with another rank's program has that very program,
// except for numbers in attributes.
#include "plan/rank_plans.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <iterator>
#include <numeric>
#include <sstream>

#include "options/command_line.h"
#include "options/model_options.h"
#include "options/step_spec.h"
#include "parallel/collective_schedule.h"
#include "passes/memory_plan.h"
#include "program/op_spec.h"

namespace troupe {
namespace {

struct Case {
  const char* name;
  const char* flags;
};

std::ostream& operator<<(std::ostream& stream, const Case& c) {
  return stream << c.name;
}

// The ranks of a command line, one program each.
struct World {
  explicit World(const std::string& flags) {
    std::istringstream stream("plan --seq-length 16 --max-position-embeddings 16 " + flags);
    const std::vector<std::string> words{std::istream_iterator<std::string>(stream), {}};
    options = parse_command_line(words).options;
    spec = step_spec_of(options, load_model_config(options));
    for (int32_t rank = 0; rank < options.ranks; ++rank) {
      programs.push_back(
          build_training_step(spec.model, spec.state_of(rank), spec.options).program);
    }
  }

  Options options;
  StepSpec spec;
  std::vector<std::unique_ptr<Program>> programs;
};

// Empty: they are the same, except for attributes.
std::string difference(const Program& a, const Program& b) {
  if (a.op_count() != b.op_count()) return "the number of operations";
  if (a.value_count() != b.value_count()) return "the number of values";
  for (int32_t i = 0; i < a.value_count(); ++i) {
    const Value& x = a.value(ValueId{i});
    const Value& y = b.value(ValueId{i});
    const bool is_elsewhere = is_state(x.role) && is_state(y.role) &&
                              a.state()[x.state].on_host != b.state()[y.state].on_host;
    if (x.role != y.role || x.dtype != y.dtype || x.shape != y.shape || x.rows != y.rows ||
        is_elsewhere) {
      return "value " + x.name;
    }
  }
  for (int32_t index = 0; index < a.op_count(); ++index) {
    const Op& x = a.op(index);
    const Op& y = b.op(index);
    const auto same = [](std::span<const ValueId> left, std::span<const ValueId> right) {
      return std::equal(left.begin(), left.end(), right.begin(), right.end());
    };
    const bool groups = x.spec == y.spec && x.spec->group != nullptr &&
                        x.spec->group(x.attributes) != y.spec->group(y.attributes);
    if (x.spec != y.spec || groups || x.workspace != y.workspace ||
        x.place.layer != y.place.layer || x.place.micro_batch != y.place.micro_batch ||
        x.place.phase != y.place.phase || !same(a.inputs(x), b.inputs(y)) ||
        !same(a.outputs(x), b.outputs(y))) {
      return describe_operation(a, index) + " and " + describe_operation(b, index);
    }
  }
  return {};
}

class RankClassesOf : public ::testing::TestWithParam<Case> {};

TEST_P(RankClassesOf, HaveOneProgram) {
  const World world(GetParam().flags);
  const RankClasses classes = classify_ranks(world.spec.model, world.spec.dtype, world.spec.layout);
  ASSERT_EQ(classes.class_of_rank.size(), world.programs.size());
  EXPECT_LT(classes.first_rank.size(), world.programs.size()) << "some ranks share a program";
  EXPECT_TRUE(std::is_sorted(classes.first_rank.begin(), classes.first_rank.end()));
  for (size_t rank = 0; rank < world.programs.size(); ++rank) {
    const auto first =
        static_cast<size_t>(classes.first_rank[static_cast<size_t>(classes.class_of_rank[rank])]);
    EXPECT_EQ(difference(*world.programs[first], *world.programs[rank]), "")
        << "rank " << rank << " is taken to be as rank " << first;
    EXPECT_EQ(hash_collectives(*world.programs[first]), hash_collectives(*world.programs[rank]));
  }
}

TEST_P(RankClassesOf, HaveThePlansOfTheirRanks) {
  const World world(GetParam().flags);
  const std::vector<RankPlan> plans =
      plan_ranks(world.spec.model, world.spec.dtype, world.spec.layout, world.spec.options,
                 /*threads=*/1, /*workers=*/2);
  const RankClasses classes = classify_ranks(world.spec.model, world.spec.dtype, world.spec.layout);
  ASSERT_EQ(plans.size(), classes.first_rank.size());
  EXPECT_EQ(std::accumulate(plans.begin(), plans.end(), 0,
                            [](int32_t sum, const RankPlan& plan) { return sum + plan.ranks; }),
            world.options.ranks);
  for (size_t rank = 0; rank < world.programs.size(); ++rank) {
    const RankPlan& plan = plans[static_cast<size_t>(classes.class_of_rank[rank])];
    const MemoryPlan memory = plan_memory(*world.programs[rank], 1);
    EXPECT_EQ(plan.bytes_by_role, memory.bytes_by_role) << "rank " << rank;
    EXPECT_EQ(plan.total_bytes, memory.total_bytes()) << "rank " << rank;
    EXPECT_EQ(plan.operations, world.programs[rank]->op_count()) << "rank " << rank;
  }
  std::vector<const Program*> all;
  for (const auto& program : world.programs) all.push_back(program.get());
  verify_collectives(all, world.spec.layout->layout);
}

constexpr Case kCases[] = {
    {"replicas", "--model mixtral-tiny --ranks 4 --global-batch-size 8"},
    {"folded",
     "--model mixtral-tiny --ranks 16 --tensor-model-parallel-size 2 "
     "--pipeline-model-parallel-size 2 --expert-model-parallel-size 4 "
     "--expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall --global-batch-size 16"},
    {"sliced_experts",
     "--model mixtral-tiny --ranks 8 --tensor-model-parallel-size 2 --expert-model-parallel-size 2 "
     "--expert-tensor-parallel-size 2 --moe-token-dispatcher-type flex --global-batch-size 8"},
    {"nodes",
     "--model mixtral-tiny --ranks 16 --pipeline-model-parallel-size 2 "
     "--expert-model-parallel-size 8 --moe-token-dispatcher-type hierarchical "
     "--moe-dispatch-ranks-per-node 4 --global-batch-size 16"},
    {"context",
     "--model mixtral-tiny --ranks 8 --context-parallel-size 2 --tensor-model-parallel-size 2 "
     "--expert-model-parallel-size 8 --expert-tensor-parallel-size 1"},
    {"uneven_vocabulary",
     "--model mixtral-tiny --vocab-size 263 --ranks 8 --tensor-model-parallel-size 4"},
    {"shared_heads",
     "--model mixtral-tiny --num-query-groups 1 --ranks 8 --tensor-model-parallel-size 4 "
     "--expert-tensor-parallel-size 1 --qk-layernorm"},
    {"tied_pipeline",
     "--model mixtral-tiny --untie-embeddings-and-output-weights=false --ranks 16 "
     "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
     "--tensor-model-parallel-size 2 --global-batch-size 16"},
    {"zero_bubble",
     "--model mixtral-tiny --ranks 8 --pipeline-model-parallel-size 2 --pipeline-schedule zb-v "
     "--global-batch-size 16"},
    // The router's 8 rows, the norms' 128 elements and the vocabulary's rows are cut into shards of
    // different sizes, some empty. Only the ranks of the first instance count squares.
    {"sharded_in_instances",
     "--model mixtral-tiny --ranks 24 --expert-model-parallel-size 2 "
     "--expert-tensor-parallel-size 1 --use-megatron-fsdp --num-distributed-optimizer-instances 2 "
     "--overlap-grad-reduce --overlap-param-gather"},
    {"sharded_optimizer_in_instances",
     "--model mixtral-tiny --ranks 12 --use-distributed-optimizer "
     "--num-distributed-optimizer-instances 2"},
    // Of the ranks that share a slice some have rows of keys that other ranks have, too.
    {"sharded_shared_heads",
     "--model mixtral-tiny --num-query-groups 1 --ranks 16 --tensor-model-parallel-size 2 "
     "--expert-tensor-parallel-size 1 --use-megatron-fsdp --overlap-grad-reduce "
     "--overlap-param-gather"},
    {"offloaded_optimizer",
     "--model mixtral-tiny --ranks 12 --use-distributed-optimizer --optimizer-cpu-offload "
     "--optimizer-offload-fraction 0.5"},
};

INSTANTIATE_TEST_SUITE_P(Layouts, RankClassesOf, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return std::string(info.param.name); });

// With experts spread over ranks, the products of experts are planned for all tokens that may come,
// and counted for those that are expected: as many floating-point operations as on one rank.
TEST(CountFlops, CountsExpectedRows) {
  const std::string model =
      "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --num-experts 8 "
      "--moe-router-topk 2 --ffn-hidden-size 48 --vocab-size 64 --micro-batch-size 1 "
      "--global-batch-size 4";
  const auto products = [](const World& world) {
    double flops = 0;
    for (const auto& program : world.programs) {
      const Program expected = program->with_expected_rows();
      for (int32_t i = 0; i < expected.op_count(); ++i) {
        const Op& op = expected.op(i);
        if (std::string_view(op.spec->name).starts_with("grouped_linear")) {
          flops += op.spec->cost(OpView{expected, op}).flops;
        }
      }
    }
    return flops;
  };
  const double one = products(World(model));
  EXPECT_GT(one, 0);
  for (const char* dispatcher :
       {"allgather", "alltoall", "flex", "hierarchical --moe-dispatch-ranks-per-node 2"}) {
    EXPECT_EQ(products(World(model +
                             " --ranks 4 --expert-model-parallel-size 4 "
                             "--moe-token-dispatcher-type " +
                             dispatcher)),
              one)
        << dispatcher;
  }
}

TEST(LargestGpu, SumsTheRanksThatShareIt) {
  std::vector<RankPlan> plans(2);
  plans[0].total_bytes = 10;
  plans[1].total_bytes = 7;
  const std::vector<int32_t> class_of_rank = {1, 0, 0, 1, 1};
  EXPECT_EQ(largest_gpu_bytes(plans, class_of_rank, 1), 10U);
  EXPECT_EQ(largest_gpu_bytes(plans, class_of_rank, 2), 17U);
  EXPECT_EQ(largest_gpu_bytes(plans, class_of_rank, 3), 27U);
  EXPECT_EQ(largest_gpu_bytes(plans, class_of_rank, 8), 41U);
}

}  // namespace
}  // namespace troupe
