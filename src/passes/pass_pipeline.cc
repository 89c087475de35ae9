#include "passes/pass_pipeline.h"

#include <algorithm>
#include <array>
#include <chrono>

#include "passes/overlap.h"
#include "program/verify.h"

namespace troupe {
namespace {

constexpr std::array kPasses = {
    PassInfo{PassId::emission, "emission", "forward, backward, sums over ranks, update"},
    PassInfo{PassId::loss_chunks, "loss-chunks", "logits of one chunk of the loss at a time"},
    PassInfo{PassId::messages, "messages", "rows travel as the codes that they are rounded to"},
    PassInfo{PassId::precision, "precision", "operands of products in 8 bits"},
    PassInfo{PassId::recompute, "recompute", "what is not kept is computed again"},
    PassInfo{PassId::offload, "offload", "what is kept waits in the host's memory"},
    PassInfo{PassId::schedule, "schedule", "weight gradients in their turn, overlap"},
    PassInfo{PassId::copies, "copies", "offloads right after the last use, reloads ahead"},
    PassInfo{PassId::stash, "stash", "rows of experts that are kept are packed"},
    PassInfo{PassId::gradient_sums, "gradient-sums", "sums as soon as gradients are complete"},
    PassInfo{PassId::gathers, "gathers", "parameters one layer ahead of their use"},
    PassInfo{PassId::multiprocessors, "multiprocessors", "products leave some to exchanges"},
};

// Of the first `count` operations.
int32_t count_moved(const std::vector<int32_t>& order, int32_t count) {
  int32_t moved = 0;
  int32_t before = -1;
  for (const int32_t index : order) {
    if (index >= count) continue;
    if (index != before + 1) ++moved;
    before = index;
  }
  return moved;
}

}  // namespace

std::span<const PassInfo> all_passes() {
  return kPasses;
}

std::string_view name_of(PassId id) {
  return kPasses[static_cast<size_t>(id)].name;
}

PassPipeline::PassPipeline(Program& program, const PassControls& controls, double seconds)
    : program_(program), controls_(controls) {
  watch({.id = PassId::emission,
         .name = std::string(name_of(PassId::emission)),
         .seconds = seconds,
         .ops_after = program.op_count()});
}

void PassPipeline::run(PassId id, const PassFunction& order_of) {
  const auto& skipped = controls_.skipped;
  if (std::find(skipped.begin(), skipped.end(), id) != skipped.end()) return;
  apply({.id = id, .name = std::string(name_of(id))}, order_of);
}

void PassPipeline::run_added() {
  for (const AddedPass& pass : controls_.added) {
    apply({.id = PassId::added, .name = pass.name}, pass.order_of);
  }
}

void PassPipeline::apply(PassRecord record, const PassFunction& order_of) {
  const auto start = std::chrono::steady_clock::now();
  const int32_t before = program_.op_count();
  const std::vector<int32_t> order = order_of(program_);
  const int32_t moved = count_moved(order, before);
  const bool adds = program_.op_count() > before;
  const bool changes = adds || moved > 0 || static_cast<int32_t>(order.size()) < before;
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
  if (changes) {
    if (!adds) verify_order(program_, order);
    program_.select_ops(order);
  }
  record.seconds = taken.count();
  record.ops_before = before;
  record.ops_after = program_.op_count();
  record.ops_moved = moved;
  watch(record);
}

void PassPipeline::watch(const PassRecord& record) const {
#ifndef NDEBUG
  verify_program(program_);
#endif
  if (controls_.watch) controls_.watch(record, program_);
}

}  // namespace troupe
