#include "model/parameter_layout.h"

#include <algorithm>
#include <fmt/format.h>
#include <string>

#include "base/error.h"
#include "model/model.h"
#include "ops/optimizer/adamw/moment_blocks.h"

namespace troupe {
namespace {

// Which of the ranks that share a cut a rank is, and how many they are.
struct CutPart {
  int32_t part;
  int32_t parts;
};

CutPart part_of(CutOver over, const Layout& layout, int32_t rank) {
  switch (over) {
    case CutOver::tp:
      return {layout.dense_place(rank).tp, layout.tp()};
    case CutOver::ep:
      return {layout.expert_place(rank).ep, layout.ep()};
    case CutOver::etp:
      return {layout.expert_place(rank).etp, layout.etp()};
  }
  TROUPE_CHECK(false, "what a parameter is cut over");
  return {};
}

struct CutSize {
  Setting setting;
  int32_t parts;
};

CutSize size_of(CutOver over, const Layout& layout) {
  switch (over) {
    case CutOver::tp:
      return {Setting::tensor_parallel, layout.tp()};
    case CutOver::ep:
      return {Setting::expert_parallel, layout.ep()};
    case CutOver::etp:
      return {Setting::expert_tensor_parallel, layout.etp()};
  }
  TROUPE_CHECK(false, "what a parameter is cut over");
  return {};
}

// The rank's indices of a section that begins at index `begin`.
IndexRange cut_section(const CutSection& section, int64_t begin, const CutPart& own) {
  const int64_t unit = section.size / section.units;
  const int64_t first = section.units * own.part / own.parts;
  int64_t last = section.units * (own.part + 1) / own.parts;
  if (section.is_shared) last = std::max(last, first + 1);
  return {begin + first * unit, begin + last * unit};
}

std::optional<Refusal> check_sequence(const Layout& layout, int64_t sequence) {
  // Each rank of CP holds two chunks, one from each end (program/row_origin.h); sequence
  // parallelism cuts what it holds once more.
  const int64_t tp = layout.options().sequence_parallel ? layout.tp() : 1;
  const int64_t chunks = layout.cp() > 1 ? 2 * int64_t{layout.cp()} : 1;
  const int64_t both = tp * layout.cp();
  if (sequence % chunks == 0 && sequence % both == 0) return std::nullopt;
  const int64_t unit = chunks % both == 0 ? chunks : (both % chunks == 0 ? both : 2 * both);
  Refusal refusal{.setting = Setting::sequence_length,
                  .message = {Setting::sequence_length, fmt::format(" {}: with ", sequence),
                              Setting::context_parallel, fmt::format(" {}", layout.cp())},
                  .nearest = nearest_multiples(unit, sequence)};
  if (tp > 1) {
    refusal.message.emplace_back(" and ");
    refusal.message.emplace_back(Setting::sequence_parallel);
    refusal.message.emplace_back(fmt::format(" over {} ranks", tp));
  }
  refusal.message.emplace_back(fmt::format(" it must be a multiple of {}. Nearest: {}.", unit,
                                           text_of_values(refusal.nearest)));
  return refusal;
}

}  // namespace

std::optional<Refusal> check_layout(const ModelConfig& config, const Layout& layout,
                                    int64_t sequence, ContextExchange exchange) {
  const Model model(config);
  if (config.num_experts == 0 && layout.ep() > 1) {
    return Refusal{
        .setting = Setting::expert_parallel,
        .message = {Setting::expert_parallel,
                    fmt::format(" {}: the model has no experts. Leave it out.", layout.ep())},
        .nearest = {1}};
  }
  for (int32_t layer = 0; layer < config.all_layers(); ++layer) {
    const auto& blocks = model.layer(layer);
    if (auto refusal = blocks.mixer->check_layout(layout, exchange)) return refusal;
    if (auto refusal = blocks.feed_forward->check_layout(layout, exchange)) return refusal;
  }
  return check_sequence(layout, sequence);
}

std::optional<Refusal> check_moment_blocks(const ModelConfig& config, const Layout& layout,
                                           Setting moments) {
  const Model model(config);
  for (const ParameterSpec& parameter : model.parameters()) {
    const int last = parameter.whole_shape.rank() - 1;
    for (const Cut& cut : parameter.cuts) {
      const CutSize cutter = size_of(cut.over, layout);
      if (last == 0 || cut.dimension != last || cutter.parts == 1) continue;
      for (const CutSection& section : cut.sections) {
        const int64_t piece = section.size / cutter.parts;
        if (piece % kMomentBlock == 0) continue;
        return Refusal{
            .setting = cutter.setting,
            .message = {moments, " fp8: ", cutter.setting,
                        fmt::format(" {} cuts {}, {}, into pieces of {}, which must be a multiple "
                                    "of {}: that many moments share a scale. Use bf16 moments, or "
                                    "another ",
                                    cutter.parts, cut.what, section.size, piece, kMomentBlock),
                        cutter.setting, "."}};
      }
    }
  }
  return std::nullopt;
}

ParameterSlice slice_of(const ParameterSpec& parameter, const Layout& layout, int32_t rank) {
  ParameterSlice slice;
  for (int dimension = 0; dimension < parameter.whole_shape.rank(); ++dimension) {
    slice.ranges.push_back({{0, parameter.whole_shape[dimension]}});
  }
  for (const Cut& cut : parameter.cuts) {
    const CutPart own = part_of(cut.over, layout, rank);
    std::vector<IndexRange>& ranges = slice.ranges[static_cast<size_t>(cut.dimension)];
    ranges.clear();
    int64_t begin = 0;
    int64_t held = 0;
    for (const CutSection& section : cut.sections) {
      const bool has_copies = section.is_shared && section.units < own.parts;
      if (has_copies && cut.dimension == 0 && !slice.first_shared) slice.first_shared = held;
      ranges.push_back(cut_section(section, begin, own));
      held += ranges.back().end - ranges.back().begin;
      begin += section.size;
    }
    TROUPE_CHECK(begin == parameter.whole_shape[cut.dimension],
                 "the sections of a cut are all of its dimension: " + parameter.full_name());
  }
  return slice;
}

MatrixCut matrix_cut_of(const ParameterSpec& parameter, const Layout& layout, int32_t rank) {
  for (const Cut& cut : parameter.cuts) {
    const CutPart own = part_of(cut.over, layout, rank);
    if (cut.over == CutOver::ep || own.parts == 1) continue;
    MatrixCut matrices{
        .group = cut.over == CutOver::tp ? RankGroup::tp : RankGroup::etp,
        .slices = {.dimension = cut.dimension, .ranks = own.parts, .place = own.part}};
    auto& sections = matrices.slices.sections;
    TROUPE_CHECK(cut.sections.size() <= sections.size(), "too many sections of a cut");
    for (size_t i = 0; i < cut.sections.size(); ++i) {
      const CutSection& section = cut.sections[i];
      const bool has_copies = section.is_shared && section.units < own.parts;
      const int64_t copies = has_copies ? own.parts / section.units : 1;
      sections[i] = {.size = section.size, .copies = static_cast<int32_t>(copies)};
    }
    return matrices;
  }
  return {};
}

bool holds(const PipelinePartition& partition, int32_t place, const ParameterSpec& parameter) {
  if (parameter.layer >= 0) return partition.rank_of_layer(parameter.layer) == place;
  if (parameter.is_with_embedding) {
    const std::vector<int32_t> places = partition.embedding_ranks(parameter.is_with_loss);
    return std::binary_search(places.begin(), places.end(), place);
  }
  return (parameter.is_final_norm ? partition.rank_of_final_norm() : partition.rank_of_loss()) ==
         place;
}

}  // namespace troupe
