// `troupe tokenize`: text files to a data set of token ids.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/units.h"
#include "cli/command.h"
#include "data/json_text.h"
#include "data/make_tokenizer.h"
#include "data/tokenize_corpus.h"
#include "options/device_options.h"
#include "options/tokenizer_options.h"
#include "train/interrupt.h"
#include "train/terminal.h"

namespace troupe {
namespace {

constexpr double kSecondsBetweenLines = 15;       // without a terminal
constexpr double kSecondsBetweenLiveLines = 0.1;  // on one

}  // namespace

ExitStatus run_tokenize(const Options& options) {
  install_interrupt_handlers();
  const auto tokenizer = make_tokenizer(read_tokenizer_of(options));
  ThreadPool pool(device_spec_of(options).thread_count());
  const auto start = std::chrono::steady_clock::now();
  const auto seconds = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  LiveLine line;

  TokenizeOptions tokenize;
  tokenize.inputs = options.input;
  tokenize.output_prefix = options.output_prefix;
  tokenize.format = options.input_format;
  tokenize.split_blank_lines = options.split_documents;
  tokenize.json_key = options.json_keys;
  tokenize.overwrite = options.overwrite;
  tokenize.stop_requested = [] { return interrupt_requested().load(); };
  double shown = 0;  // when the line was last written
  if (!options.quiet) {
    tokenize.on_progress = [&](const TokenizeProgress& progress) {
      const double elapsed = seconds();
      const double interval = line.on_terminal() ? kSecondsBetweenLiveLines : kSecondsBetweenLines;
      if (elapsed - shown < interval) return;
      shown = elapsed;
      // How much comes from standard input is unknown.
      const double done =
          static_cast<double>(progress.bytes_done) /
          static_cast<double>(std::max({uint64_t{1}, progress.bytes_done, progress.bytes_total}));
      const bool knows_total = progress.bytes_total >= progress.bytes_done;
      const double speed = static_cast<double>(progress.bytes_done) / elapsed;
      std::string text =
          knows_total ? fmt::format("{:.0f}% of {}", 100 * done, format_bytes(progress.bytes_total))
                      : format_bytes(progress.bytes_done);
      text += fmt::format(" | {} documents | {} tokens | {}/s", progress.documents,
                          format_count(static_cast<double>(progress.tokens)),
                          format_bytes(static_cast<uint64_t>(speed)));
      if (knows_total && done > 0) text += " | " + format_time_left(elapsed * (1 - done) / done);
      if (line.on_terminal()) {
        line.live(text);
      } else {
        line.stay(text);
      }
    };
  }
  const TokenizeResult result = tokenize_corpus(*tokenizer, tokenize, pool);
  line.clear();
  if (!result.completed) {
    fmt::print(stderr, "Interrupted. Nothing was written to {}.\n", options.output_prefix);
    return ExitStatus::interrupted;
  }
  if (options.json) {
    const nlohmann::ordered_json document = {
        {"output_prefix", options.output_prefix},    {"documents", result.progress.documents},
        {"empty_documents", result.empty_documents}, {"tokens", result.progress.tokens},
        {"bytes", result.progress.bytes_done},       {"seconds", seconds()}};
    fmt::print("{}", printed_json(document));
  } else if (!options.quiet) {
    const double elapsed = seconds();
    const double rate = static_cast<double>(result.progress.bytes_done) / std::max(1e-9, elapsed);
    const std::string text = fmt::format(
        "{0}.bin, {0}.idx: {1}, {2} tokens from {3} in {4} ({5}/s)", options.output_prefix,
        counted(static_cast<int64_t>(result.progress.documents), "document"),
        result.progress.tokens, format_bytes(result.progress.bytes_done), format_duration(elapsed),
        format_bytes(static_cast<uint64_t>(rate)));
    fmt::print(stderr, "{}\n", wrap_text(text, kDefaultColumns, 2));
  }
  return ExitStatus::done;
}

}  // namespace troupe
