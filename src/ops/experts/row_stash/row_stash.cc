#include "ops/experts/row_stash/row_stash.h"

#include <fmt/format.h>

#include "ops/choose_kernel.h"
#include "ops/elementwise/fill/fill.h"
#include "ops/optimizer/accumulate/accumulate.h"
#include "program/op_sample.h"

namespace troupe {

void open_stash_cpu(const KernelArguments& args);
void stash_cpu(const KernelArguments& args);
void unstash_cpu(const KernelArguments& args);
CudaKernel open_stash_cuda_kernel(const OpView& op);
CudaKernel stash_cuda_kernel(const OpView& op);
CudaKernel unstash_cuda_kernel(const OpView& op);

namespace {

void infer_open_stash(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 0, "open_stash: takes no inputs");
  const auto& attributes = context.attributes<OpenStashAttributes>();
  TROUPE_CHECK(
      attributes.pages > 0 && attributes.page_bytes > 0 && attributes.page_bytes % 256 == 0,
      "open_stash: pages of a multiple of 256 bytes");
  context.output("", DType::u8, {attributes.pages, attributes.page_bytes}, {}, Role::stash);
  context.output("free", DType::i32, {kFirstFreePage + attributes.pages}, {}, Role::stash);
}

void check_stash(const Value& pages, const Value& free) {
  TROUPE_CHECK(pages.role == Role::stash && pages.dtype == DType::u8 && pages.shape.rank() == 2,
               "not a stash: " + pages.name);
  TROUPE_CHECK(free.role == Role::stash && free.dtype == DType::i32 &&
                   free.shape == Shape({kFirstFreePage + pages.shape[0]}),
               "not the free pages of a stash: " + free.name);
}

void infer_stash(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 5, "stash takes x, pages, free, lacked, most");
  const Value x = context.input(0);
  TROUPE_CHECK(is_stashable(x) && !is_state(x.role) && !is_on_host(x.role),
               "stash: needs a ragged tensor of the device that is no state: " + x.name);
  const Value pages = context.input(1);
  check_stash(pages, context.input(2));
  for (const int i : {3, 4}) {
    const Value& metric = context.input(i);
    TROUPE_CHECK(
        metric.role == Role::metric && metric.dtype == DType::f64 && metric.shape == Shape({1}),
        "stash: needs f64 metrics: " + metric.name);
  }
  context.output("", DType::i32, {pages_of(static_cast<int64_t>(x.bytes()), pages.shape[1])});
  for (int i = 1; i < 5; ++i) context.mutates(i);
}

void infer_unstash(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 4, "unstash takes table, pages, free, counter");
  const auto& attributes = context.attributes<UnstashAttributes>();
  const Value& pages = context.input(1);
  check_stash(pages, context.input(2));
  const Value& table = context.input(0);
  const int64_t bytes =
      attributes.shape.elements() * static_cast<int64_t>(size_of(attributes.dtype));
  TROUPE_CHECK(table.dtype == DType::i32 && table.shape == Shape({pages_of(bytes, pages.shape[1])}),
               "unstash: not the table of such a tensor: " + table.name);
  context.output("", attributes.dtype, attributes.shape,
                 {.counter = context.input_id(3),
                  .element = attributes.element,
                  .expected = attributes.expected});
  context.mutates(2);
}

Cost cost_open_stash(const OpView& op) {
  return {.flops = 0, .bytes = static_cast<double>(op.output(1).bytes())};
}

Cost cost_stash(const OpView& op) {
  return {.flops = 0, .bytes = 2 * static_cast<double>(op.input(0).bytes())};
}

Cost cost_unstash(const OpView& op) {
  return {.flops = 0, .bytes = 2 * static_cast<double>(op.output(0).bytes())};
}

template <CpuKernel kKernel>
CpuKernel only_cpu_kernel(const OpView&) {
  return kKernel;
}

std::string print_open_stash(const Attributes& attributes) {
  const auto& values = attributes.as<OpenStashAttributes>();
  return fmt::format("pages={} page_bytes={}", values.pages, values.page_bytes);
}

std::string print_unstash(const Attributes& attributes) {
  return fmt::format("element={}", attributes.as<UnstashAttributes>().element);
}

// A tensor of `live` of 9 rows, and one of all of 5, in and out of a stash of `pages`; then the
// first one again, whose pages are others. With `counts` what is counted, too, in f32 always: how
// many pages rows fill depends on their type.
std::function<void(SampleBuilder&)> sample_of(int64_t columns, int32_t live, int64_t pages,
                                              bool counts) {
  return [=](SampleBuilder& sample) {
    Builder& builder = sample.builder();
    const ValueId lacked = builder.metric("lacked", DType::f64, {1});
    const ValueId most = builder.metric("most", DType::f64, {1});
    const ValueId none = fill(builder, 0, DType::f64, {1}, "none");
    for (const ValueId metric : {lacked, most}) {
      accumulate(builder, metric, none, 1, /*overwrite=*/true);
    }
    const ValueId counter = sample.integers("counter", {3}, {2, live, 5});
    const auto ragged = [&](const char* name, int64_t bound, int32_t element) {
      return sample.tensor(name, {bound, columns},
                           {.differentiable = false,
                            .rows = counter,
                            .rows_element = element,
                            .dtype = counts ? DType::f32 : sample.dtype()});
    };
    const ValueId x = ragged("x", 9, 1);
    const ValueId z = ragged("z", 5, 2);
    const Stash stash = open_stash(builder, {.pages = pages, .page_bytes = 256});
    const ValueId table_of_x = stash_rows(builder, stash, lacked, most, x);
    const ValueId table_of_z = stash_rows(builder, stash, lacked, most, z);
    sample.result_without_gradient(unstash_rows(builder, stash, table_of_x, x));
    const ValueId again = stash_rows(builder, stash, lacked, most, x);
    sample.result_without_gradient(unstash_rows(builder, stash, table_of_z, z));
    sample.result_without_gradient(unstash_rows(builder, stash, again, x));
    if (!counts) return;
    sample.result_without_gradient(lacked);
    sample.result_without_gradient(most);
  };
}

std::vector<OpSample> samples_stash() {
  return {{"rows", sample_of(24, 7, 20, false)},
          {"no rows", sample_of(24, 0, 20, false)},
          {"odd rows", sample_of(37, 8, 30, false)},
          {"rows of several pages", sample_of(900, 9, 450, false)},
          {"one column", sample_of(1, 1, 8, false)},
          {"counts", sample_of(24, 7, 20, true)},
          {"pages lack", sample_of(37, 9, 7, true)},
          {"one page", sample_of(37, 9, 1, true)}};
}

}  // namespace

Stash open_stash(Builder& builder, const OpenStashAttributes& attributes) {
  const auto outputs = builder.emit(kOpenStash, Attributes(attributes), {}, "stash");
  return {.pages = outputs[0], .free = outputs[1]};
}

ValueId stash_rows(Builder& builder, const Stash& stash, ValueId lacked, ValueId most, ValueId x) {
  return builder.emit(kStash, Attributes(NoAttributes()),
                      {x, stash.pages, stash.free, lacked, most},
                      builder.value(x).name + "_pages")[0];
}

ValueId unstash_rows(Builder& builder, const Stash& stash, ValueId table, ValueId x) {
  const Value value = builder.value(x);
  const UnstashAttributes attributes{.shape = value.shape,
                                     .expected = value.rows.expected,
                                     .element = value.rows.element,
                                     .dtype = value.dtype};
  return builder.emit(kUnstash, Attributes(attributes),
                      {table, stash.pages, stash.free, value.rows.counter}, value.name)[0];
}

const OpSpec kOpenStash{.name = "open_stash",
                        .infer = infer_open_stash,
                        .cost = cost_open_stash,
                        .cpu = {.kernel = only_cpu_kernel<open_stash_cpu>},
                        .cuda = only_kernel<TROUPE_CUDA(open_stash_cuda_kernel)>,
                        .print_attributes = print_open_stash};

const OpSpec kStash{.name = "stash",
                    .infer = infer_stash,
                    .cost = cost_stash,
                    .cpu = {.kernel = only_cpu_kernel<stash_cpu>},
                    .cuda = only_kernel<TROUPE_CUDA(stash_cuda_kernel)>,
                    .samples = samples_stash};

const OpSpec kUnstash{.name = "unstash",
                      .infer = infer_unstash,
                      .cost = cost_unstash,
                      .cpu = {.kernel = only_cpu_kernel<unstash_cpu>},
                      .cuda = only_kernel<TROUPE_CUDA(unstash_cuda_kernel)>,
                      .print_attributes = print_unstash};

}  // namespace troupe
