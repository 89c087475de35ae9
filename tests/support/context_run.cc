#include "support/context_run.h"

#include <algorithm>
#include <chrono>
#include <memory>

#include "base/random.h"
#include "comm/thread_group.h"
#include "ops/attention/attention/document_starts.h"
#include "ops/elementwise/split_columns/split_columns.h"
#include "parallel/rank_communicators.h"
#include "passes/autodiff.h"
#include "program/verify.h"
#include "runtime/device_memory.h"
#include "runtime/make_interpreter.h"

namespace troupe::testing {
namespace {

constexpr std::chrono::milliseconds kPatient{60'000};
constexpr int64_t kStep = 6;

double load(const TensorView& view, int64_t i) {
  if (view.dtype == DType::f64) return view.as<double>()[i];
  if (view.dtype == DType::f32) return view.as<float>()[i];
  return view.as<bf16>()[i];
}

void store(const TensorView& view, int64_t i, double value) {
  if (view.dtype == DType::f64) view.as<double>()[i] = value;
  if (view.dtype == DType::f32) view.as<float>()[i] = static_cast<float>(value);
  if (view.dtype == DType::bf16) view.as<bf16>()[i] = bf16(static_cast<float>(value));
}

std::shared_ptr<const RunLayout> layout_of(int32_t ranks) {
  LayoutOptions options;
  options.world_size = ranks;
  options.context_parallel = ranks;
  RunLayout run = layout_of_one_rank(1);
  return std::make_shared<const RunLayout>(
      RunLayout{.layout = Layout(options), .partition = run.partition, .schedule = run.schedule});
}

}  // namespace

ContextOutcome run_context(const ContextCase& c, int32_t ranks, ContextExchange exchange,
                           const RunOn& on) {
  const AttentionAttributes& whole = c.whole;
  const int64_t width = whole.query_row() + whole.key_value_row();
  const int64_t out_width = whole.out_row();
  const int64_t tokens = int64_t{whole.batch} * whole.sequence;
  ContextOutcome outcome{.out = std::vector<double>(static_cast<size_t>(tokens * out_width)),
                         .d_qkv = std::vector<double>(static_cast<size_t>(tokens * width))};
  const std::shared_ptr<const RunLayout> layout = layout_of(ranks);
  ThreadGroup group(ranks, kPatient);
  run_ranks(group, [&](int rank) {
    const ModelPart part{.run = layout, .rank = rank};
    AttentionAttributes own = whole;
    own.sequence = whole.sequence / ranks;
    const int64_t rows = tokens / ranks;
    const auto table = std::make_shared<const StateTable>();
    Program program(table);
    Builder builder(program);
    const ValueId qkv = builder.input("qkv", c.dtype, {rows, width});
    const ValueId d_out = builder.input("d_out", c.dtype, {rows, out_width});
    const ValueId step = whole.probability > 0 ? builder.input("step", DType::i64, {1}) : ValueId{};
    const SequenceChunks queries = queries_of_attention(part, exchange);
    const std::vector<int32_t> of_queries =
        document_starts(whole.batch, whole.sequence / queries.ranks, queries, c.begins);
    ValueId starts;
    if (!c.begins.empty()) {
      starts = builder.input("starts", DType::i32, {static_cast<int64_t>(of_queries.size())});
    }
    AttentionHeads heads{.queries = qkv, .keys = qkv};
    if (c.own_queries) {
      const auto apart = split_columns(builder, qkv, {.columns = whole.query_row()}, "apart");
      heads = {.queries = apart.first, .keys = apart.rest};
    }
    const ValueId out = attend_over_context(builder, part, exchange, heads,
                                            {.step = step, .starts = starts}, own, "out");
    program.add_result(out);
    MainGradients main_gradients(*table);
    const std::vector<GradientSeed> seeds = {{out, d_out}};
    const std::vector<ValueId> wanted = {qkv};
    const ValueId d_qkv =
        append_backward(builder, 0, program.op_count(), seeds, wanted, main_gradients)[qkv];
    program.add_result(d_qkv);
    verify_program(program);
    const bool gpu = on.device == Device::cuda;
    const StateStorage storage(table, on.device, gpu ? rank % gpu_count() : 0);
    ThreadPool pool(1 + rank % 2);
    const auto interpreter = make_interpreter(
        program, plan_memory(program, pool.threads(), on.device), storage, pool,
        communicators_of(group, layout->layout, rank), {.capture = on.capture, .shares_gpu = true});
    // visit(element here, element of the whole) of a tensor with rows of `columns`.
    const auto each = [&](int64_t columns, const auto& visit) {
      const RowOrigin origin = row_origin(part, own.sequence, rows);
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t i = 0; i < columns; ++i) {
          visit(row * columns + i, origin.whole_row(row) * columns + i);
        }
      }
    };
    const auto draw = [&](ValueId id, uint32_t what, int64_t columns) {
      each(columns, [&](int64_t here, int64_t element) {
        store(interpreter->view(id), here,
              random_normal(5, RandomStream::test, what, static_cast<uint64_t>(element)));
      });
    };
    draw(qkv, 0, width);
    draw(d_out, 1, out_width);
    if (starts.valid()) {
      std::copy(of_queries.begin(), of_queries.end(), interpreter->view(starts).as<int32_t>());
    }
    if (step.valid()) *interpreter->view(step).as<int64_t>() = kStep;
    // Nothing is left over from the first time; the second one is recorded, the third replays it.
    for (int i = 0; i < (on.capture ? 3 : 2); ++i) interpreter->run();
    each(out_width, [&](int64_t here, int64_t element) {
      outcome.out[static_cast<size_t>(element)] = load(interpreter->view(out), here);
    });
    each(width, [&](int64_t here, int64_t element) {
      outcome.d_qkv[static_cast<size_t>(element)] = load(interpreter->view(d_qkv), here);
    });
  });
  return outcome;
}

}  // namespace troupe::testing
