#include <cstring>

#include "ops/exchange/clone_experts/clone_experts.h"

namespace troupe {
namespace {

constexpr int64_t kGrainOfClones = 1 << 14;  // elements

// Which places have copies of which rank's experts. Messages from one rank to another go in the
// order of places where weights are sent, and of experts, then places, where gradients come back.
struct Clones {
  explicit Clones(const KernelArguments& args)
      : own(args.attributes->as<CloneExpertsAttributes>().own),
        of_rank(args.input(1).shape[0] / args.communicator->size()),
        places(args.input(1).shape[0]),
        here(args.communicator->rank()),
        experts(args.in<int32_t>(1)) {}

  bool is_used(int64_t place) const { return experts[place] >= 0; }
  int owner(int64_t place) const { return static_cast<int>(experts[place] / own); }
  int holder(int64_t place) const { return static_cast<int>(place / of_rank); }

  int64_t own;      // experts of a rank
  int64_t of_rank;  // places of a rank
  int64_t places;   // of all
  int here;
  const int32_t* experts;
};

// One expert of a tensor of several.
TensorView expert_at(const TensorView& tensor, int64_t expert) {
  const int64_t elements = tensor.shape.row_elements();
  return {.data = static_cast<std::byte*>(tensor.data) +
                  expert * elements * static_cast<int64_t>(size_of(tensor.dtype)),
          .dtype = tensor.dtype,
          .shape = {elements}};
}

template <class Function>
void for_elements(const KernelArguments& args, int64_t elements, const Function& function) {
  args.pool->parallel_ranges(elements, kGrainOfClones, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) function(i);
  });
}

// T and Out are the types of the terms and of the weights' gradient.
template <class T, class Out>
void run_return_clones(const KernelArguments& args) {
  const auto& attributes = args.attributes->as<CloneExpertsAttributes>();
  const TensorView& gradients = args.input(0);
  const int64_t elements = gradients.shape.row_elements();
  const Clones clones(args);
  Communicator& communicator = *args.communicator;
  const CollectiveCall call{.op = args.op, .index = args.op_index};

  // Calls send(copy, its expert's owner) in the order in which owners receive.
  const auto for_each_copy = [&](const auto& send) {
    for (int32_t expert = 0; expert < clones.own * communicator.size(); ++expert) {
      for (int64_t i = 0; i < clones.of_rank; ++i) {
        const int64_t place = clones.here * clones.of_rank + i;
        if (clones.experts[place] == expert) send(i, clones.owner(place));
      }
    }
  };
  for_each_copy(
      [&](int64_t i, int owner) { communicator.send(call, expert_at(gradients, i), owner); });

  TensorView sum = expert_at(gradients, 0);
  sum.data = args.workspace;
  TensorView came = sum;
  came.data = sum.as<T>() + elements;
  T* const total = sum.as<T>();
  const T* const more = came.as<T>();
  for (int64_t i = 0; i < clones.own; ++i) {
    const int64_t expert = clones.here * clones.own + i;
    bool has_copies = false;
    for (int64_t place = 0; place < clones.places; ++place) {
      if (clones.experts[place] != expert) continue;
      communicator.receive(call, has_copies ? came : sum, clones.holder(place));
      if (has_copies) for_elements(args, elements, [=](int64_t at) { total[at] += more[at]; });
      has_copies = true;
    }
    if (!has_copies && attributes.accumulate) continue;
    Out* const result = expert_at(args.output(0), i).as<Out>();
    for_elements(args, elements, [=](int64_t at) {
      const T own = has_copies ? total[at] : T(0);
      result[at] = Out(attributes.accumulate ? T(result[at]) + own : own);
    });
  }

  for_each_copy([&](int64_t, int owner) { communicator.finish_send(call, owner); });
}

}  // namespace

void clone_experts_cpu(const KernelArguments& args) {
  const TensorView& weight = args.input(0);
  const TensorView& copies = args.output(0);
  const Clones clones(args);
  Communicator& communicator = *args.communicator;
  const CollectiveCall call{.op = args.op, .index = args.op_index};
  const auto is_sent = [&](int64_t place) {
    return clones.is_used(place) && clones.owner(place) == clones.here;
  };

  for (int64_t place = 0; place < clones.places; ++place) {
    if (!is_sent(place)) continue;
    const int64_t expert = clones.experts[place] - clones.here * clones.own;
    communicator.send(call, expert_at(weight, expert), clones.holder(place));
  }
  for (int64_t i = 0; i < clones.of_rank; ++i) {
    const int64_t place = clones.here * clones.of_rank + i;
    const TensorView to = expert_at(copies, i);
    if (clones.is_used(place)) {
      communicator.receive(call, to, clones.owner(place));
    } else {
      std::memset(to.data, 0, static_cast<size_t>(to.shape.elements()) * size_of(to.dtype));
    }
  }
  for (int64_t place = 0; place < clones.places; ++place) {
    if (is_sent(place)) communicator.finish_send(call, clones.holder(place));
  }
}

CpuKernel return_clones_cpu_kernel(const OpView& op) {
  switch (op.output(0).dtype) {
    case DType::f64:
      return &run_return_clones<double, double>;
    case DType::f32:
      return &run_return_clones<float, float>;
    default:
      return &run_return_clones<float, bf16>;
  }
}

}  // namespace troupe
