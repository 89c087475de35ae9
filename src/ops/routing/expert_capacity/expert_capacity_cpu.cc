#include <algorithm>
#include <limits>
#include <tuple>

#include "ops/cpu/expert_slots.h"
#include "ops/routing/expert_capacity/expert_capacity.h"
#include "program/kernel.h"
#include "program/op_spec.h"

namespace troupe {
namespace {

// Operands and the part of the workspace that both policies use, see
// expert_capacity_workspace_bytes.
struct CapacityProblem {
  int32_t experts;
  int64_t capacity;
  int64_t slots;
  const int32_t* indices;
  int32_t* kept;
  int32_t* ranks;
  int32_t* loads;

  explicit CapacityProblem(const KernelArguments& args) {
    const auto& attributes = args.attributes->as<ExpertCapacityAttributes>();
    experts = attributes.experts;
    capacity = attributes.capacity;
    slots = args.input(1).shape.elements();
    indices = args.in<int32_t>(1);
    kept = args.out<int32_t>(0);
    ranks = reinterpret_cast<int32_t*>(args.workspace);
    loads = ranks + slot_chunks(slots) * experts;
    rank_slots(*args.pool, indices, slots, experts, ranks, loads);
  }
};

void keep_earliest(const KernelArguments& args) {
  const CapacityProblem problem(args);
  place_slots(*args.pool, problem.indices, problem.slots, problem.experts, problem.ranks,
              [=](int64_t slot, int32_t expert, int32_t rank) {
                problem.kept[slot] = rank < problem.capacity ? expert : -1;
              });
}

// Keeps the first `capacity` slots of each expert in the order `comes_first`, a strict order of all
// slots: so they are the same ones whatever the selection algorithm does.
template <class Order>
void keep_first(const KernelArguments& args, const CapacityProblem& problem,
                const Order& comes_first) {
  int32_t* starts = problem.loads + problem.experts;
  int32_t* sorted = starts + problem.experts;
  int32_t start = 0;
  for (int32_t expert = 0; expert < problem.experts; ++expert) {
    starts[expert] = start;
    start += problem.loads[expert];
  }
  place_slots(*args.pool, problem.indices, problem.slots, problem.experts, problem.ranks,
              [=](int64_t slot, int32_t expert, int32_t rank) {
                problem.kept[slot] = expert;
                if (expert >= 0) sorted[starts[expert] + rank] = static_cast<int32_t>(slot);
              });
  args.pool->parallel_for(problem.experts, [=](int64_t expert, int) {
    if (problem.loads[expert] <= problem.capacity) return;
    int32_t* first = sorted + starts[expert];
    int32_t* last = first + problem.loads[expert];
    int32_t* dropped = first + problem.capacity;
    std::nth_element(first, dropped, last, comes_first);
    for (; dropped != last; ++dropped) problem.kept[*dropped] = -1;
  });
}

// T is the type of the probabilities, float or double.
template <class T>
void keep_most_probable(const KernelArguments& args) {
  const T* probabilities = args.in<T>(0);
  keep_first(args, CapacityProblem(args), [=](int32_t a, int32_t b) {
    const auto key = [=](int32_t slot) {
      const T p = probabilities[slot];
      return p == p ? p : -std::numeric_limits<T>::infinity();
    };
    return key(a) != key(b) ? key(a) > key(b) : a < b;
  });
}

void keep_earliest_places(const KernelArguments& args) {
  const auto& attributes = args.attributes->as<ExpertCapacityAttributes>();
  const int64_t top_k = args.input(1).shape[1];
  keep_first(args, CapacityProblem(args), [&attributes, top_k](int32_t a, int32_t b) {
    const TokenPlace first = place_of_token(attributes, a / top_k);
    const TokenPlace second = place_of_token(attributes, b / top_k);
    return std::tuple(first.place, first.sequence, a) <
           std::tuple(second.place, second.sequence, b);
  });
}

}  // namespace

CpuKernel expert_capacity_cpu_kernel(const OpView& view) {
  const auto& attributes = view.attributes<ExpertCapacityAttributes>();
  if (attributes.policy == DropPolicy::position) {
    return attributes.sequence_tokens > 0 ? &keep_earliest_places : &keep_earliest;
  }
  return view.input(0).dtype == DType::f64 ? &keep_most_probable<double>
                                           : &keep_most_probable<float>;
}

}  // namespace troupe
