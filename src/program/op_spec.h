// OpSpec: everything the system knows about one kind of operation. One constant of this type per
// kind, in the kind's own folder under ops/. Others know no kind by name but where they emit
// it, and in passes that rewrite it.
//
// How to add an operation: see CONTRIBUTING.md.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/device.h"
#include "program/communicator.h"
#include "program/kernel.h"
#include "program/kernel_choice.h"
#include "program/program.h"

namespace troupe {

class DerivativeContext;
class SampleBuilder;

// Arithmetic and memory traffic of one run of an operation: each input read once, each output
// written once, a multiply-add counted as two flops. Ragged tensors count at their bound. What goes
// over links between ranks is no part of it: LinkTraffic.
struct Cost {
  double flops = 0;                  // all
  double bytes = 0;                  // of the rank's own memory
  double product_flops = 0;          // those in matrix products,
  DType product_dtype = DType::f32;  // of operands of this dtype
};

// What a rank sends to the others of its group in one run; it receives as much, on average. Sums go
// as on GPUs: a rank gets the terms of its share and sends the sums to all. Where the router
// decides who gets what, all get the same.
struct LinkTraffic {
  double bytes = 0;
  double messages = 0;    // to one rank each
  double most_bytes = 0;  // where the router decides: if as much as possible comes; otherwise 0
};

// What an operation between two ranks of a group does with a message.
struct MessageUse {
  enum class Action : uint8_t { send, finish, receive };
  Action action = Action::send;
  int32_t peer = 0;  // the other rank's place in the group
};

// The shape rule's view of an operation that is being emitted. Rules TROUPE_CHECK their inputs and
// declare every output, in order.
class InferContext {
 public:
  InferContext(Program& program, std::span<const ValueId> inputs, const Attributes& attributes,
               const std::string& name)
      : program_(program), inputs_(inputs), attributes_(attributes), name_(name) {}

  int input_count() const { return static_cast<int>(inputs_.size()); }
  bool has_input(int i) const { return inputs_[static_cast<size_t>(i)].valid(); }
  ValueId input_id(int i) const { return inputs_[static_cast<size_t>(i)]; }
  // Good until finish(): new values join the program only then.
  const Value& input(int i) const { return program_.value(input_id(i)); }
  template <class T>
  const T& attributes() const {
    return attributes_.as<T>();
  }

  // A new value named after the operation's result, plus ".suffix" unless the suffix is empty.
  void output(const std::string& suffix, DType dtype, const Shape& shape, RowCount rows = {},
              Role role = Role::activation);
  // An output that is input `i`, changed in place. Legal for mutable roles only.
  void mutates(int i);

  // The outputs declared so far.
  const std::vector<ValueId>& outputs() const { return outputs_; }

  // Adds the new values to the program, when the rule is done.
  void finish();

 private:
  Program& program_;
  std::span<const ValueId> inputs_;
  const Attributes& attributes_;
  const std::string& name_;
  std::vector<ValueId> outputs_;
  std::vector<Value> new_values_;
};

// One small, complete use of an operation, from which the generic tests are made (derivative by
// finite differences, poisoned padding, dtypes against f64, threads, CPU against CUDA, planned
// against oracle). See op_sample.h.
struct OpSample {
  std::string name;
  std::function<void(SampleBuilder&)> build;
};

// The CPU kernel of a kind, and its private memory while it runs, in bytes; nullptr means none.
struct CpuSpec {
  CpuKernel (*kernel)(const OpView&) = nullptr;    // for the operation's dtypes
  uint64_t (*workspace)(const OpView&) = nullptr;  // shared by all threads
  uint64_t (*scratch)(const OpView&) = nullptr;    // of each thread
};

// Rows and columns of a block of elements that share a scale; 0: all that the matrix has.
struct BlockShape {
  int32_t rows = 0;
  int32_t columns = 0;
  bool operator==(const BlockShape&) const = default;
};

// Of a product: the kind that computes it from operands in 8 bits. Its inputs are the codes of
// inputs 0 and 1, the scales of both, and then the product's other inputs; its attributes
// QuantizedProductAttributes (ops/precision/quantized_product.h).
struct QuantizedForm {
  struct Operand {
    enum class Kind : uint8_t { activation, weight, gradient };
    Kind kind = Kind::activation;
    bool sums_columns = true;  // the product sums over the operand's columns; false: over its rows
  };
  const OpSpec* kind = nullptr;
  std::array<Operand, 2> operands;
  int8_t offsets = -1;  // the input that says which rows are which expert's; -1: none
  // nullptr: always; and never.
  bool (*allowed)(const Attributes&) = nullptr;
  bool (*accumulates)(const Attributes&) = nullptr;
};

struct OpSpec {
  const char* name = nullptr;

  // Checks inputs and attributes, declares outputs.
  void (*infer)(InferContext&) = nullptr;

  // Emits the operations that compute the gradients of the inputs from those of the outputs.
  // nullptr: no derivative exists (integer results, optimizer); gradients do not flow through it.
  void (*differentiate)(DerivativeContext&) = nullptr;

  Cost (*cost)(const OpView&) = nullptr;

  CpuSpec cpu;
  // The CUDA kernel for an operation on a GPU of these traits; nullptr: there is none yet.
  KernelChoice (*cuda)(const OpView&, const DeviceTraits&) = nullptr;

  // Of a collective: the group whose members all run it. nullptr: the operation is this rank's own.
  RankGroup (*group)(const Attributes&) = nullptr;
  // Of a collective: it brings shards of a tensor together, of which ranks may have some each.
  bool gathers_shards = false;
  // What it computes is not kept for the backward pass, which runs it again.
  bool is_run_again = false;
  // Of an operation with a group: what a rank of `ranks` members sends in a run. nullptr: nothing.
  LinkTraffic (*links)(const OpView&, int32_t ranks) = nullptr;
  // Of a message between two ranks of that group, which its other members do not run. nullptr: all
  // members run the operation.
  MessageUse (*message)(const Attributes&) = nullptr;

  // Output `output` may be stored over input `input` when that input is not used afterwards: every
  // element is read before, and only for, the element that replaces it.
  struct InPlace {
    int8_t output = -1;
    int8_t input = -1;
  };
  InPlace in_place{};

  // "top_k=2 pre_softmax=0"; nullptr when there are no attributes.
  std::string (*print_attributes)(const Attributes&) = nullptr;

  // nullptr: it is no product, or one that keeps its precision.
  const QuantizedForm* quantized = nullptr;

  // Samples of this kind. A kind that occurs only in another kind's derivative is exercised by that
  // kind's samples and leaves this nullptr.
  std::vector<OpSample> (*samples)() = nullptr;
};

// 0 for kinds that state no cost.
inline double flops_of(const Program& program, const Op& op) {
  return op.spec->cost != nullptr ? op.spec->cost(OpView{program, op}).flops : 0;
}

inline double product_flops_of(const Program& program, const Op& op) {
  return op.spec->cost != nullptr ? op.spec->cost(OpView{program, op}).product_flops : 0;
}

// Nothing when the operation is no message.
inline std::optional<MessageUse> message_use(const Op& op) {
  if (op.spec->message == nullptr) return std::nullopt;
  return op.spec->message(op.attributes);
}

}  // namespace troupe
