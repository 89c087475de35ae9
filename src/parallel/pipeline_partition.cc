#include "parallel/pipeline_partition.h"

#include <algorithm>
#include <fmt/format.h>
#include <iterator>

#include "base/error.h"
#include "parallel/layout.h"

namespace troupe {
namespace {

constexpr std::string_view kFlag = "--pipeline-model-parallel-layout";
constexpr size_t kMostSymbols = 100'000;

// Writes the text's repetitions out.
class Expander {
 public:
  explicit Expander(std::string_view text) : text_(text) {}

  std::string expand() {
    std::string symbols = sequence(0);
    if (at_ < text_.size()) refuse("')' closes no '('");
    return symbols;
  }

 private:
  [[noreturn]] void refuse(std::string_view problem) const {
    throw_bad_request(
        fmt::format("{} {}: at character {}: {}. It is made of E (embedding), t (decoder layer), m "
                    "(MTP layer), L (loss), | (next stage), x*n and (...)*n.",
                    kFlag, text_, at_ + 1, problem));
  }

  void skip_blanks() {
    while (at_ < text_.size() && (text_[at_] == ',' || text_[at_] == ' ')) ++at_;
  }

  int32_t number() {
    int32_t value = 0;
    const size_t begin = at_;
    while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') {
      value = value * 10 + (text_[at_] - '0');
      if (value > static_cast<int32_t>(kMostSymbols)) refuse("the number is too large");
      ++at_;
    }
    if (at_ == begin) refuse("a number must follow '*'");
    return value;
  }

  std::string sequence(int depth) {
    if (depth > 16) refuse("too many '(' within each other");
    std::string symbols;
    for (skip_blanks(); at_ < text_.size() && text_[at_] != ')'; skip_blanks()) {
      std::string item(1, text_[at_]);
      if (item == "(") {
        const size_t open = at_++;
        item = sequence(depth + 1);
        if (at_ == text_.size()) {
          at_ = open;
          refuse("this '(' is not closed");
        }
      } else if (std::string_view("EtmL|").find(item) == std::string_view::npos) {
        refuse(fmt::format("'{}' means nothing here", item == "*" ? "*" : item));
      }
      ++at_;
      skip_blanks();
      int32_t times = 1;
      if (at_ < text_.size() && text_[at_] == '*') {
        ++at_;
        skip_blanks();
        times = number();
      }
      if (symbols.size() + item.size() * static_cast<size_t>(times) > kMostSymbols) {
        refuse("more than 100000 symbols");
      }
      for (int32_t i = 0; i < times; ++i) symbols += item;
    }
    return symbols;
  }

  std::string_view text_;
  size_t at_ = 0;
};

void append_times(std::string& text, char symbol, int32_t times) {
  if (times > 0) text += symbol;
  if (times > 1) text += fmt::format("*{}", times);
}

// The stages that `symbols` spells out, without any check.
std::vector<PipelineStage> split_stages(std::string_view symbols) {
  std::vector<PipelineStage> stages(1);
  int32_t layer = 0;
  for (const char symbol : symbols) {
    PipelineStage& stage = stages.back();
    switch (symbol) {
      case '|':
        stages.emplace_back().first_layer = layer;
        break;
      case 'E':
        stage.embedding = true;
        break;
      case 'L':
        stage.loss = true;
        break;
      case 'm':
        ++stage.mtp_layers;
        break;
      default:
        ++stage.layers;
        ++layer;
    }
  }
  return stages;
}

void check_symbols(std::string_view text, std::string_view symbols, int32_t layers,
                   int32_t mtp_layers) {
  const auto refuse = [&](const std::string& problem) {
    throw_bad_request(fmt::format("{} {}: {}", kFlag, text, problem));
  };
  const auto count = [&](char symbol) {
    return std::count(symbols.begin(), symbols.end(), symbol);
  };
  const size_t first_end = std::min(symbols.find('|'), symbols.size());
  const size_t last_begin = symbols.rfind('|') == std::string_view::npos ? 0 : symbols.rfind('|');
  if (count('E') != 1 || symbols.find('E') > first_end || symbols.find('E') != 0) {
    refuse(fmt::format("E (embedding) must stand once, at the very beginning; it stands {} times.",
                       count('E')));
  }
  if (count('L') != 1 || symbols.find('L') < last_begin || symbols.back() != 'L') {
    refuse(
        fmt::format("L (loss) must stand once, at the very end; it stands {} times.", count('L')));
  }
  if (count('t') != layers) {
    refuse(fmt::format("it has {} decoder layers (t), the model has {}.", count('t'), layers));
  }
  if (count('m') != mtp_layers) {
    refuse(fmt::format("it has {} MTP layers (m), the model has {}.", count('m'), mtp_layers));
  }
  const size_t mtp = symbols.find('m');
  if (mtp != std::string_view::npos && symbols.find('t', mtp) != std::string_view::npos) {
    refuse("MTP layers (m) must come after all decoder layers (t).");
  }
}

void check_mtp(std::string_view text, const PipelinePartition& partition) {
  const auto has_mtp = [](const PipelineStage& stage) { return stage.mtp_layers > 0; };
  const auto& stages = partition.stages;
  const auto found = std::find_if(stages.begin(), stages.end(), has_mtp);
  if (found == stages.end()) return;
  const auto refuse = [&](std::string_view rule) {
    throw_bad_request(fmt::format("{} {}: {}", kFlag, text, rule));
  };
  if (std::count_if(stages.begin(), stages.end(), has_mtp) > 1) {
    refuse("all MTP layers (m) must stand in one stage.");
  }
  const StagePlace place = partition.place_of(static_cast<int32_t>(found - stages.begin()));
  if (place.chunk != partition.chunks - 1) {
    refuse(
        fmt::format("MTP layers (m) must stand in the last chunk of a rank, that is in one of "
                    "the last {} stages.",
                    partition.ranks));
  }
  if (place.rank == 0 && partition.ranks > 1) {
    refuse("MTP layers (m) cannot stand on the first rank of the pipeline.");
  }
}

}  // namespace

StagePlace place_of_stage(StagePlacement placement, int32_t ranks, int32_t stage) {
  if (placement == StagePlacement::loop) return {stage % ranks, stage / ranks};
  return stage < ranks ? StagePlace{stage, 0} : StagePlace{2 * ranks - 1 - stage, 1};
}

int32_t stage_at(StagePlacement placement, int32_t ranks, StagePlace place) {
  if (placement == StagePlacement::loop) return place.chunk * ranks + place.rank;
  return place.chunk == 0 ? place.rank : 2 * ranks - 1 - place.rank;
}

int32_t PipelinePartition::rank_of_layer(int32_t layer) const {
  for (size_t stage = 0; stage < stages.size(); ++stage) {
    const PipelineStage& s = stages[stage];
    if (layer >= s.first_layer && layer < s.first_layer + s.layers) {
      return place_of(static_cast<int32_t>(stage)).rank;
    }
  }
  TROUPE_CHECK(false, "a layer of this partition");
}

int32_t PipelinePartition::rank_of_embedding() const {
  return place_of(0).rank;
}

int32_t PipelinePartition::rank_of_loss() const {
  return place_of(static_cast<int32_t>(stages.size()) - 1).rank;
}

std::vector<int32_t> PipelinePartition::embedding_ranks(bool tied) const {
  std::vector<int32_t> found = {rank_of_embedding()};
  if (tied) found.push_back(rank_of_loss());
  for (size_t stage = 0; stage < stages.size(); ++stage) {
    if (stages[stage].mtp_layers > 0) {
      found.push_back(place_of(static_cast<int32_t>(stage)).rank);
    }
  }
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

PipelinePartition even_partition(int32_t layers, int32_t ranks, int32_t chunks,
                                 StagePlacement placement) {
  const int64_t stages = int64_t{ranks} * chunks;
  if (layers % stages != 0) {
    const std::string sizes =
        nearest_choices(ranks, layers, [&](int64_t pp) { return layers % (pp * chunks) == 0; });
    throw_bad_request(fmt::format(
        "--pipeline-model-parallel-size {}: {} layers cannot be cut into {} x {} = {} equal stages "
        "(ranks of the pipeline x stages of each). {}{} cuts them unevenly.",
        ranks, layers, ranks, chunks, stages,
        sizes.empty() ? "" : fmt::format("Nearest sizes: {}; or ", sizes), kFlag));
  }
  PipelinePartition partition{
      .ranks = ranks, .chunks = chunks, .placement = placement, .stages = {}};
  const auto each = static_cast<int32_t>(layers / stages);
  for (int32_t stage = 0; stage < stages; ++stage) {
    partition.stages.push_back({.first_layer = stage * each,
                                .layers = each,
                                .embedding = stage == 0,
                                .loss = stage + 1 == stages});
  }
  return partition;
}

namespace {

// A stage for each number of layers, in order. `first_layer` and what the ends hold follow.
PipelinePartition partition_of_sizes(const std::vector<int32_t>& sizes, int32_t ranks,
                                     StagePlacement placement) {
  PipelinePartition partition;
  partition.ranks = ranks;
  partition.chunks = static_cast<int32_t>(sizes.size()) / ranks;
  partition.placement = placement;
  int32_t layer = 0;
  for (const int32_t size : sizes) {
    partition.stages.push_back({.first_layer = layer, .layers = size});
    layer += size;
  }
  partition.stages.front().embedding = true;
  partition.stages.back().loss = true;
  return partition;
}

// Stages of equal size, where the embedding or the loss takes the place of a layer.
std::vector<int32_t> sizes_with_ends(int32_t layers, int32_t stages, const UnevenStages& uneven) {
  const int32_t counted = (uneven.count_embedding ? 1 : 0) + (uneven.count_loss ? 1 : 0);
  const int64_t all = int64_t{layers} + counted;
  if (all % stages != 0) {
    throw_bad_request(
        fmt::format("--account-for-{}-in-pipeline-split: {} layers and {} that {} as such cannot "
                    "be cut into {} "
                    "equal stages. {} cuts them as you say.",
                    uneven.count_embedding ? "embedding" : "loss", layers, counted,
                    counted == 1 ? "counts" : "count", stages, kFlag));
  }
  std::vector<int32_t> sizes(static_cast<size_t>(stages), static_cast<int32_t>(all / stages));
  if (uneven.count_embedding) --sizes.front();
  if (uneven.count_loss) --sizes.back();
  return sizes;
}

// The layers of each rank, where those of the ends are given.
std::vector<int32_t> layers_by_rank(int32_t layers, int32_t ranks, const UnevenStages& uneven) {
  const int32_t named = (uneven.first_layers > 0 ? 1 : 0) + (uneven.last_layers > 0 ? 1 : 0);
  const int64_t left = int64_t{layers} - uneven.first_layers - uneven.last_layers;
  const int32_t others = ranks - named;
  const auto refuse = [&](const std::string& problem) {
    throw_bad_request(fmt::format(
        "--decoder-{}-pipeline-num-layers {}: {}", uneven.first_layers > 0 ? "first" : "last",
        uneven.first_layers > 0 ? uneven.first_layers : uneven.last_layers, problem));
  };
  if (others < 0) refuse("the pipeline has one rank, whose layers are those of the model.");
  if (left < others || (others == 0 && left != 0) || (others > 0 && left % others != 0)) {
    refuse(
        fmt::format("of {} layers {} are left for the {} other ranks of the pipeline, which must "
                    "have equally many each.",
                    layers, left, others));
  }
  std::vector<int32_t> sizes(static_cast<size_t>(ranks),
                             others == 0 ? 0 : static_cast<int32_t>(left / others));
  if (uneven.first_layers > 0) sizes.front() = uneven.first_layers;
  if (uneven.last_layers > 0) sizes.back() = uneven.last_layers;
  return sizes;
}

// Names the flag that says how many layers the rank has, or that the others follow from.
[[noreturn]] void refuse_chunks(const UnevenStages& uneven, int32_t ranks, int32_t rank,
                                int32_t layers, int32_t chunks) {
  const bool is_last = uneven.last_layers > 0 && rank + 1 == ranks;
  const bool by_last = is_last || uneven.first_layers == 0;
  throw_bad_request(fmt::format(
      "--decoder-{}-pipeline-num-layers {}: rank {} of the pipeline then has {} {}, which its {} "
      "stages cannot share equally.",
      by_last ? "last" : "first", by_last ? uneven.last_layers : uneven.first_layers, rank, layers,
      layers == 1 ? "layer" : "layers", chunks));
}

}  // namespace

PipelinePartition uneven_partition(int32_t layers, int32_t ranks, int32_t chunks,
                                   const UnevenStages& uneven, StagePlacement placement) {
  const bool counts_ends = uneven.count_embedding || uneven.count_loss;
  if (counts_ends && (uneven.first_layers > 0 || uneven.last_layers > 0)) {
    throw_bad_request(
        "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers exclude "
        "--account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split.");
  }
  const int64_t stages = int64_t{ranks} * chunks;
  if (stages > static_cast<int64_t>(kMostSymbols)) {
    throw_bad_request(
        fmt::format("--pipeline-model-parallel-size {} with {} stages of each rank: "
                    "more than {} stages.",
                    ranks, chunks, kMostSymbols));
  }
  if (counts_ends) {
    return partition_of_sizes(sizes_with_ends(layers, static_cast<int32_t>(stages), uneven), ranks,
                              placement);
  }
  const std::vector<int32_t> by_rank = layers_by_rank(layers, ranks, uneven);
  std::vector<int32_t> sizes;
  for (int32_t stage = 0; stage < stages; ++stage) {
    const int32_t rank = place_of_stage(placement, ranks, stage).rank;
    const int32_t of_rank = by_rank[static_cast<size_t>(rank)];
    if (of_rank % chunks != 0) {
      refuse_chunks(uneven, ranks, rank, of_rank, chunks);
    }
    sizes.push_back(of_rank / chunks);
  }
  return partition_of_sizes(sizes, ranks, placement);
}

PipelinePartition parse_partition(std::string_view text, int32_t layers, int32_t mtp_layers,
                                  int32_t ranks, StagePlacement placement) {
  const std::string symbols = Expander(text).expand();
  check_symbols(text, symbols, layers, mtp_layers);
  PipelinePartition partition;
  partition.ranks = ranks;
  partition.placement = placement;
  partition.stages = split_stages(symbols);
  const auto count = static_cast<int32_t>(partition.stages.size());
  if (count % ranks != 0) {
    throw_bad_request(fmt::format(
        "{} {}: it has {} stages, which is not a multiple of --pipeline-model-parallel-size {}. "
        "Nearest sizes: {}; or add {} empty stages (|).",
        kFlag, text, count, ranks, nearest_divisors(count, ranks), ranks - count % ranks));
  }
  partition.chunks = count / ranks;
  if (placement == StagePlacement::v && partition.chunks != 2) {
    throw_bad_request(fmt::format(
        "{} {}: it has {} stages; --pipeline-schedule zb-v places two on each rank, {} for "
        "--pipeline-model-parallel-size {}.",
        kFlag, text, count, 2 * int64_t{ranks}, ranks));
  }
  check_mtp(text, partition);
  return partition;
}

std::string to_text(const PipelinePartition& partition) {
  std::string text;
  for (const PipelineStage& stage : partition.stages) {
    if (&stage != partition.stages.data()) text += '|';
    if (stage.embedding) text += 'E';
    append_times(text, 't', stage.layers);
    append_times(text, 'm', stage.mtp_layers);
    if (stage.loss) text += 'L';
  }
  return text;
}

}  // namespace troupe
