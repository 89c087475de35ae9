// The passes over the program of a training step, in the order in which they run: each has a name,
// can be left out, and can be watched.
//
// Contract of a pass: it returns another order of the program's operations. Passes that rewrite
// first append operations, which make what is there already a second time or copy it, and let
// others read that (program/rewrite.h), and so does the stash; all others neither add nor change an
// operation, except for its Op::multiprocessors, and may leave out what nothing reads. So every
// value keeps its bits, and a step without the pass is as right as one with it, but slower or
// larger. The pipeline holds passes to that: verify_order() (passes/overlap.h) after each that adds
// nothing, in debug builds verify_program() after all. One pass is another matter: `precision` puts
// other products in the place of those that are there, because the user asked for their numbers.
//
// One pipeline belongs to one program and one thread.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "program/program.h"

namespace troupe {

enum class PassId : uint8_t {
  emission,         // not a pass: the program as it was emitted
  loss_chunks,      // passes/loss_chunks.h
  messages,         // passes/message_codes.h
  precision,        // passes/precision.h
  recompute,        // passes/recompute.h
  offload,          // passes/offload.h
  schedule,         // passes/step_schedule.h
  copies,           // passes/offload.h
  stash,            // passes/stash.h
  gradient_sums,    // passes/communication_order.h
  gathers,          // passes/communication_order.h
  multiprocessors,  // passes/overlap.h
  added,            // PassControls::added
};

struct PassInfo {
  PassId id;
  std::string_view name;     // "gradient-sums"
  std::string_view purpose;  // what it does, half a line
};
std::span<const PassInfo> all_passes();
std::string_view name_of(PassId id);

struct PassRecord {
  PassId id = PassId::emission;
  std::string name;
  double seconds = 0;  // without verification
  int32_t ops_before = 0;
  int32_t ops_after = 0;
  int32_t ops_moved = 0;  // that come after another operation than before; those added do not count
};

// A function as the contract has it.
using PassFunction = std::function<std::vector<int32_t>(Program&)>;

// A pass that is not one of all_passes().
struct AddedPass {
  std::string name;
  PassFunction order_of;
};

struct PassControls {
  std::vector<PassId> skipped;
  std::vector<AddedPass> added;  // run after all others
  // Called with the emitted program, and after each pass with the program as it then is.
  std::function<void(const PassRecord&, const Program&)> watch;
};

class PassPipeline {
 public:
  // Begins with the emitted program, which took `seconds`. Borrows both.
  PassPipeline(Program& program, const PassControls& controls, double seconds);

  // Runs the pass unless it is skipped. All operations in their order mean that there was nothing
  // to do.
  void run(PassId id, const PassFunction& order_of);
  // Runs those of the controls.
  void run_added();

 private:
  void apply(PassRecord record, const PassFunction& order_of);
  void watch(const PassRecord& record) const;

  Program& program_;
  const PassControls& controls_;
};

}  // namespace troupe
