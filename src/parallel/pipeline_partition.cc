#include "parallel/pipeline_partition.h"

#include <algorithm>
#include <fmt/format.h>
#include <iterator>

#include "base/error.h"

namespace troupe {
namespace {

constexpr size_t kMostSymbols = 100'000;

// Writes the text's repetitions out. Stops at the first problem.
class Expander {
 public:
  explicit Expander(std::string_view text) : text_(text) {}

  std::string expand() {
    std::string symbols = sequence(0);
    if (at_ < text_.size()) refuse("')' closes no '('");
    return symbols;
  }

  // Empty: none.
  const std::string& problem() const { return problem_; }

 private:
  void refuse(std::string_view problem) {
    if (has_problem()) return;
    problem_ = fmt::format(
        "at character {}: {}. It is made of E (embedding), t (decoder layer), m (MTP "
        "layer), L (loss), | (next stage), x*n and (...)*n.",
        at_ + 1, problem);
  }

  bool has_problem() const { return !problem_.empty(); }

  void skip_blanks() {
    while (at_ < text_.size() && (text_[at_] == ',' || text_[at_] == ' ')) ++at_;
  }

  int32_t number() {
    int32_t value = 0;
    const size_t begin = at_;
    while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') {
      value = value * 10 + (text_[at_] - '0');
      if (value > static_cast<int32_t>(kMostSymbols)) {
        refuse("the number is too large");
        return 0;
      }
      ++at_;
    }
    if (at_ == begin) refuse("a number must follow '*'");
    return value;
  }

  // A symbol or a group in brackets, of which the end is left to the caller.
  std::string item(int depth) {
    const char symbol = text_[at_];
    if (symbol != '(') {
      if (std::string_view("EtmL|").find(symbol) == std::string_view::npos) {
        refuse(fmt::format("'{}' means nothing here", symbol));
      }
      return std::string(1, symbol);
    }
    const size_t open = at_++;
    std::string group = sequence(depth + 1);
    if (at_ == text_.size()) {
      at_ = open;
      refuse("this '(' is not closed");
    }
    return group;
  }

  // What follows an item: "*n" says how often it stands.
  int32_t repetitions() {
    skip_blanks();
    if (at_ == text_.size() || text_[at_] != '*') return 1;
    ++at_;
    skip_blanks();
    return number();
  }

  std::string sequence(int depth) {
    if (depth > 16) refuse("too many '(' within each other");
    std::string symbols;
    for (skip_blanks(); !has_problem() && at_ < text_.size() && text_[at_] != ')'; skip_blanks()) {
      const std::string next = item(depth);
      if (has_problem()) break;
      ++at_;
      const int32_t times = repetitions();
      if (symbols.size() + next.size() * static_cast<size_t>(times) > kMostSymbols) {
        refuse("more than 100000 symbols");
        break;
      }
      for (int32_t i = 0; i < times; ++i) symbols += next;
    }
    return symbols;
  }

  std::string problem_;
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
  int32_t mtp_layer = 0;
  for (const char symbol : symbols) {
    PipelineStage& stage = stages.back();
    switch (symbol) {
      case '|':
        stages.push_back({.first_layer = layer, .first_mtp_layer = mtp_layer});
        break;
      case 'E':
        stage.embedding = true;
        break;
      case 'L':
        stage.loss = true;
        break;
      case 'm':
        ++stage.mtp_layers;
        ++mtp_layer;
        break;
      default:
        ++stage.layers;
        ++layer;
    }
  }
  return stages;
}

// What the symbols break; empty: nothing.
std::string problem_of_symbols(std::string_view symbols, int32_t layers, int32_t mtp_layers) {
  const auto count = [&](char symbol) {
    return std::count(symbols.begin(), symbols.end(), symbol);
  };
  const size_t first_end = std::min(symbols.find('|'), symbols.size());
  const size_t last_begin = symbols.rfind('|') == std::string_view::npos ? 0 : symbols.rfind('|');
  if (count('E') != 1 || symbols.find('E') > first_end || symbols.find('E') != 0) {
    return fmt::format("E (embedding) must stand once, at the very beginning; it stands {} times.",
                       count('E'));
  }
  if (count('L') != 1 || symbols.find('L') < last_begin || symbols.back() != 'L') {
    return fmt::format("L (loss) must stand once, at the very end; it stands {} times.",
                       count('L'));
  }
  if (count('t') != layers) {
    return fmt::format("it has {} decoder layers (t), the model has {}.", count('t'), layers);
  }
  if (count('m') != mtp_layers) {
    return fmt::format("it has {} MTP layers (m), the model has {}.", count('m'), mtp_layers);
  }
  const size_t mtp = symbols.find('m');
  if (mtp != std::string_view::npos && symbols.find('t', mtp) != std::string_view::npos) {
    return "MTP layers (m) must come after all decoder layers (t).";
  }
  return "";
}

bool is_among(int32_t layer, int32_t first, int32_t count) {
  return layer >= first && layer < first + count;
}

// The rank of the first stage of which it holds; there is one.
template <class Predicate>
int32_t rank_of_first(const PipelinePartition& partition, const Predicate& predicate) {
  const auto& stages = partition.stages;
  const auto found = std::find_if(stages.begin(), stages.end(), predicate);
  TROUPE_CHECK(found != stages.end(), "a stage of this partition");
  return partition.place_of(static_cast<int32_t>(found - stages.begin())).rank;
}

// Ascending, each once.
void sort_once(std::vector<int32_t>& ranks) {
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
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
  const int32_t mtp_layer = layer - stages.back().first_layer - stages.back().layers;
  return rank_of_first(*this, [&](const PipelineStage& stage) {
    return is_among(layer, stage.first_layer, stage.layers) ||
           is_among(mtp_layer, stage.first_mtp_layer, stage.mtp_layers);
  });
}

int32_t PipelinePartition::rank_of_embedding() const {
  return place_of(0).rank;
}

int32_t PipelinePartition::rank_of_final_norm() const {
  return rank_of_first(*this, [](const PipelineStage& stage) { return stage.ends_decoder(); });
}

int32_t PipelinePartition::rank_of_loss() const {
  return place_of(static_cast<int32_t>(stages.size()) - 1).rank;
}

std::vector<int32_t> PipelinePartition::mtp_ranks() const {
  std::vector<int32_t> found;
  for (size_t stage = 0; stage < stages.size(); ++stage) {
    if (stages[stage].mtp_layers == 0) continue;
    found.push_back(place_of(static_cast<int32_t>(stage)).rank);
  }
  sort_once(found);
  return found;
}

std::vector<int32_t> PipelinePartition::embedding_ranks(bool tied) const {
  std::vector<int32_t> found = mtp_ranks();
  found.push_back(rank_of_embedding());
  if (tied) found.push_back(rank_of_loss());
  sort_once(found);
  return found;
}

OrRefusal<PipelinePartition> even_partition(int32_t layers, int32_t ranks, int32_t chunks,
                                            StagePlacement placement) {
  const int64_t stages = int64_t{ranks} * chunks;
  if (layers % stages != 0) {
    const std::vector<int64_t> nearest =
        nearest_values(ranks, layers, [&](int64_t pp) { return layers % (pp * chunks) == 0; });
    const std::string sizes =
        nearest.empty() ? "" : fmt::format("Nearest sizes: {}; or ", text_of_values(nearest));
    return Refusal{
        .setting = Setting::pipeline_parallel,
        .message = {Setting::pipeline_parallel,
                    fmt::format(
                        " {}: {} layers cannot be cut into {} x {} = {} equal stages (ranks "
                        "of the pipeline x stages of each). {}",
                        ranks, layers, ranks, chunks, stages, sizes),
                    Setting::pipeline_layout, " cuts them unevenly."},
        .nearest = nearest};
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
OrRefusal<std::vector<int32_t>> sizes_with_ends(int32_t layers, int32_t stages,
                                                const UnevenStages& uneven) {
  const int32_t counted = (uneven.count_embedding ? 1 : 0) + (uneven.count_loss ? 1 : 0);
  const int64_t all = int64_t{layers} + counted;
  if (all % stages != 0) {
    const Setting setting = uneven.count_embedding ? Setting::count_embedding : Setting::count_loss;
    return Refusal{
        .setting = setting,
        .message = {setting,
                    fmt::format(": {} layers and {} that {} as such cannot be cut into {} equal "
                                "stages. ",
                                layers, counted, counted == 1 ? "counts" : "count", stages),
                    Setting::pipeline_layout, " cuts them as you say."}};
  }
  std::vector<int32_t> sizes(static_cast<size_t>(stages), static_cast<int32_t>(all / stages));
  if (uneven.count_embedding) --sizes.front();
  if (uneven.count_loss) --sizes.back();
  return sizes;
}

// The layers of the first rank, or of the last one, cannot be as many as was said.
Refusal refuse_end(const UnevenStages& uneven, bool is_last, const std::string& problem) {
  const Setting setting = is_last ? Setting::last_stage_layers : Setting::first_stage_layers;
  const int32_t layers = is_last ? uneven.last_layers : uneven.first_layers;
  return {.setting = setting, .message = {setting, fmt::format(" {}: {}", layers, problem)}};
}

// The layers of each rank, where those of the ends are given.
OrRefusal<std::vector<int32_t>> layers_by_rank(int32_t layers, int32_t ranks,
                                               const UnevenStages& uneven) {
  const int32_t named = (uneven.first_layers > 0 ? 1 : 0) + (uneven.last_layers > 0 ? 1 : 0);
  const int64_t left = int64_t{layers} - uneven.first_layers - uneven.last_layers;
  const int32_t others = ranks - named;
  const bool by_last = uneven.first_layers == 0;
  if (ranks == 1 && (others < 0 || left != 0)) {
    return refuse_end(uneven, by_last,
                      "the pipeline has one rank, whose layers are those of the model.");
  }
  if (left < 0) {
    return refuse_end(uneven, by_last, fmt::format("the model has {} layers.", layers));
  }
  if (left < others || (others == 0 && left != 0) || (others > 0 && left % others != 0)) {
    return refuse_end(uneven, by_last,
                      fmt::format("of {} layers {} are left for the {} other rank{} of the "
                                  "pipeline, which must have equally many each.",
                                  layers, left, others, others == 1 ? "" : "s"));
  }
  std::vector<int32_t> sizes(static_cast<size_t>(ranks),
                             others == 0 ? 0 : static_cast<int32_t>(left / others));
  if (uneven.first_layers > 0) sizes.front() = uneven.first_layers;
  if (uneven.last_layers > 0) sizes.back() = uneven.last_layers;
  return sizes;
}

// Names what says how many layers the rank has, or what the others follow from.
Refusal refuse_chunks(const UnevenStages& uneven, int32_t ranks, int32_t rank, int32_t layers,
                      int32_t chunks) {
  const bool is_last = uneven.last_layers > 0 && rank + 1 == ranks;
  return refuse_end(uneven, is_last || uneven.first_layers == 0,
                    fmt::format("rank {} of the pipeline then has {} {}, which its {} stages "
                                "cannot share equally.",
                                rank, layers, layers == 1 ? "layer" : "layers", chunks));
}

// The layers of each stage, where the first and the last rank have their own number.
OrRefusal<std::vector<int32_t>> sizes_with_uneven_ranks(int32_t layers, int32_t ranks,
                                                        int32_t chunks, const UnevenStages& uneven,
                                                        StagePlacement placement) {
  OrRefusal<std::vector<int32_t>> by_rank = layers_by_rank(layers, ranks, uneven);
  if (by_rank.refusal() != nullptr) return by_rank;
  std::vector<int32_t> sizes;
  for (int32_t stage = 0; stage < ranks * chunks; ++stage) {
    const int32_t rank = place_of_stage(placement, ranks, stage).rank;
    const int32_t of_rank = by_rank.value()[static_cast<size_t>(rank)];
    if (of_rank % chunks != 0) return refuse_chunks(uneven, ranks, rank, of_rank, chunks);
    sizes.push_back(of_rank / chunks);
  }
  return sizes;
}

}  // namespace

OrRefusal<PipelinePartition> uneven_partition(int32_t layers, int32_t ranks, int32_t chunks,
                                              const UnevenStages& uneven,
                                              StagePlacement placement) {
  const bool counts_ends = uneven.count_embedding || uneven.count_loss;
  if (counts_ends && (uneven.first_layers > 0 || uneven.last_layers > 0)) {
    return Refusal{
        .setting =
            uneven.first_layers > 0 ? Setting::first_stage_layers : Setting::last_stage_layers,
        .message = {Setting::first_stage_layers, " and ", Setting::last_stage_layers, " exclude ",
                    Setting::count_embedding, " and ", Setting::count_loss, "."}};
  }
  const int64_t stages = int64_t{ranks} * chunks;
  if (stages > static_cast<int64_t>(kMostSymbols)) {
    return Refusal{.setting = Setting::pipeline_parallel,
                   .message = {Setting::pipeline_parallel,
                               fmt::format(" {} with {} stages of each rank: more than {} stages.",
                                           ranks, chunks, kMostSymbols)}};
  }
  OrRefusal<std::vector<int32_t>> sizes =
      counts_ends ? sizes_with_ends(layers, static_cast<int32_t>(stages), uneven)
                  : sizes_with_uneven_ranks(layers, ranks, chunks, uneven, placement);
  if (sizes.refusal() != nullptr) return *sizes.refusal();
  return partition_of_sizes(sizes.value(), ranks, placement);
}

OrRefusal<PipelinePartition> parse_partition(std::string_view text, int32_t layers,
                                             int32_t mtp_layers, int32_t ranks,
                                             StagePlacement placement) {
  const auto refuse = [&](const std::string& problem) {
    return Refusal{.setting = Setting::pipeline_layout,
                   .message = {Setting::pipeline_layout, fmt::format(" {}: {}", text, problem)}};
  };
  Expander expander(text);
  const std::string symbols = expander.expand();
  if (!expander.problem().empty()) return refuse(expander.problem());
  if (const std::string problem = problem_of_symbols(symbols, layers, mtp_layers);
      !problem.empty()) {
    return refuse(problem);
  }
  PipelinePartition partition;
  partition.ranks = ranks;
  partition.placement = placement;
  partition.stages = split_stages(symbols);
  const auto count = static_cast<int32_t>(partition.stages.size());
  if (count % ranks != 0) {
    return Refusal{
        .setting = Setting::pipeline_layout,
        .message = {
            Setting::pipeline_layout,
            fmt::format(" {}: it has {} stages, which is not a multiple of ", text, count),
            Setting::pipeline_parallel,
            fmt::format(" {}. Nearest sizes: {}; or add {} empty stages (|).", ranks,
                        text_of_values(nearest_divisors(count, ranks)), ranks - count % ranks)}};
  }
  partition.chunks = count / ranks;
  if (placement == StagePlacement::v && partition.chunks != 2) {
    return Refusal{
        .setting = Setting::pipeline_layout,
        .message = {Setting::pipeline_layout, fmt::format(" {}: it has {} stages; ", text, count),
                    Setting::pipeline_schedule,
                    fmt::format(" zb-v places two on each rank, {} for ", 2 * int64_t{ranks}),
                    Setting::pipeline_parallel, fmt::format(" {}.", ranks)}};
  }
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
