#include "ops/attention/halo_rows/halo_rows.h"

#include <algorithm>
#include <array>
#include <fmt/format.h>
#include <vector>

#include "ops/choose_kernel.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel halo_rows_cpu_kernel(const OpView& op);
CudaKernel halo_rows_cuda_kernel(const OpView& op);

namespace {

// Rows of each chunk, or of what stands for it, in x and in y; of ranks, in x and in y.
struct HaloSizes {
  int64_t from;
  int64_t to;
  int64_t from_ranks = 1;
  int64_t to_ranks = 1;
};

HaloSizes sizes_of(const HaloRowsAttributes& a) {
  switch (a.step) {
    case HaloStep::ends:
      return {.from = a.length, .to = a.ends()};
    case HaloStep::ends_gradient:
      return {.from = a.ends(), .to = a.length};
    case HaloStep::before:
      return {.from = a.ends(), .to = a.rows, .from_ranks = a.chunks.ranks};
    case HaloStep::before_gradient:
      return {.from = a.rows, .to = a.ends(), .to_ranks = a.chunks.ranks};
  }
  return {};
}

void infer_halo_rows(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 1, "halo_rows: takes x");
  const Value x = context.input(0);
  const auto& a = context.attributes<HaloRowsAttributes>();
  TROUPE_CHECK(a.length > 0 && a.rows > 0 && a.chunks.ranks > 0 && a.chunks.rank >= 0 &&
                   a.chunks.rank < a.chunks.ranks,
               "halo_rows: sizes");
  const HaloSizes sizes = sizes_of(a);
  const int64_t from = sizes.from * sizes.from_ranks;
  TROUPE_CHECK(
      is_float(x.dtype) && !x.rows.valid() && x.shape.rank() == 2 && x.shape[0] % (2 * from) == 0,
      "halo_rows: " + x.name + " " + x.shape.to_string());
  context.output("", x.dtype, {x.shape[0] / from * sizes.to * sizes.to_ranks, x.shape[1]});
}

void differentiate_halo_rows(DerivativeContext& context) {
  if (!context.wants(0)) return;
  auto attributes = context.attributes<HaloRowsAttributes>();
  const bool is_ends = attributes.step == HaloStep::ends;
  TROUPE_CHECK(is_ends || attributes.step == HaloStep::before, "halo_rows: of a derivative");
  attributes.step = is_ends ? HaloStep::ends_gradient : HaloStep::before_gradient;
  context.add_gradient(0, halo_rows(context.builder(), context.output_gradient(0), attributes,
                                    "d_" + context.input_name(0)));
}

Cost cost_halo_rows(const OpView& op) {
  const auto to = static_cast<double>(op.output(0).bytes());
  return {.flops = 0, .bytes = to + std::min(to, static_cast<double>(op.input(0).bytes()))};
}

std::string print_halo_rows(const Attributes& attributes) {
  constexpr std::array kSteps = {"ends", "ends_gradient", "before", "before_gradient"};
  const auto& a = attributes.as<HaloRowsAttributes>();
  return fmt::format("step={} chunks={}/{} length={} rows={}", kSteps[static_cast<size_t>(a.step)],
                     a.chunks.rank, a.chunks.ranks, a.length, a.rows);
}

std::vector<OpSample> samples_halo_rows() {
  const auto halo = [](HaloStep step, const SequenceChunks& chunks, int64_t sequences,
                       int32_t length, int32_t rows, int64_t columns) {
    const HaloRowsAttributes a{.step = step, .chunks = chunks, .length = length, .rows = rows};
    const HaloSizes sizes = sizes_of(a);
    return [=](SampleBuilder& sample) {
      const ValueId x =
          sample.tensor("x", {2 * sequences * sizes.from * sizes.from_ranks, columns});
      sample.result(halo_rows(sample.builder(), x, a, "y"));
    };
  };
  return {{"ends", halo(HaloStep::ends, {2, 0}, 2, 5, 3, 3)},
          {"ends that are all", halo(HaloStep::ends, {2, 0}, 1, 2, 3, 4)},
          {"before, of the first rank", halo(HaloStep::before, {3, 0}, 2, 4, 3, 2)},
          {"before, of the last rank", halo(HaloStep::before, {3, 2}, 1, 4, 3, 3)},
          {"before, of several chunks", halo(HaloStep::before, {3, 2}, 2, 1, 3, 2)},
          {"before, of one row", halo(HaloStep::before, {4, 1}, 1, 3, 1, 8)}};
}

}  // namespace

ValueId halo_rows(Builder& builder, ValueId x, const HaloRowsAttributes& attributes,
                  const std::string& name) {
  return builder.emit(kHaloRows, Attributes(attributes), {x}, name)[0];
}

const OpSpec kHaloRows{.name = "halo_rows",
                       .infer = infer_halo_rows,
                       .differentiate = differentiate_halo_rows,
                       .cost = cost_halo_rows,
                       .cpu = {.kernel = halo_rows_cpu_kernel},
                       .cuda = only_kernel<TROUPE_CUDA(halo_rows_cuda_kernel)>,
                       .print_attributes = print_halo_rows,
                       .samples = samples_halo_rows};

}  // namespace troupe
