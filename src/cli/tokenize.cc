// `troupe tokenize`: text files to a data set of token ids.
#include <chrono>
#include <cstdio>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include "base/units.h"
#include "cli/command.h"
#include "data/tokenize_corpus.h"
#include "train/interrupt.h"

namespace troupe {
namespace {

constexpr double kSecondsBetweenLines = 0.1;

CorpusFormat format_of(const std::string& name) {
  if (name == "text") return CorpusFormat::text;
  if (name == "jsonl") return CorpusFormat::jsonl;
  return CorpusFormat::by_extension;
}

}  // namespace

ExitStatus run_tokenize(const Options& options) {
  install_interrupt_handlers();
  const auto tokenizer =
      make_tokenizer(read_tokenizer_model(options.tokenizer_type, options.tokenizer_model));
  ThreadPool pool(thread_count(options));
  const auto start = std::chrono::steady_clock::now();
  const auto seconds = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  const bool live = !options.quiet && isatty(STDERR_FILENO) != 0;

  TokenizeOptions tokenize;
  tokenize.inputs = options.input;
  tokenize.output_prefix = options.output_prefix;
  tokenize.format = format_of(options.input_format);
  tokenize.split_blank_lines = options.split_documents;
  tokenize.json_key = options.json_keys;
  tokenize.overwrite = options.overwrite;
  tokenize.stop_requested = [] { return interrupt_requested().load(); };
  double shown = 0;  // when the line was last written
  if (live) {
    tokenize.on_progress = [&](const TokenizeProgress& progress) {
      const double elapsed = seconds();
      if (elapsed - shown < kSecondsBetweenLines) return;
      shown = elapsed;
      const double done = static_cast<double>(progress.bytes_done) /
                          static_cast<double>(std::max<uint64_t>(1, progress.bytes_total));
      fmt::print(stderr, "\r\x1b[K{:.0f}% of {} | {} documents | {} tokens | {}/s | {} left",
                 100 * done, format_bytes(progress.bytes_total), progress.documents,
                 format_count(static_cast<double>(progress.tokens)),
                 format_bytes(static_cast<uint64_t>(static_cast<double>(progress.bytes_done) /
                                                    std::max(1e-9, elapsed))),
                 format_duration(done > 0 ? elapsed * (1 - done) / done : 0));
    };
  }
  const TokenizeResult result = tokenize_corpus(*tokenizer, tokenize, pool);
  if (live) fmt::print(stderr, "\n");
  if (!result.completed) {
    fmt::print(stderr, "Interrupted. Nothing was written to {}.\n", options.output_prefix);
    return ExitStatus::interrupted;
  }
  if (options.json) {
    const nlohmann::ordered_json document = {
        {"output_prefix", options.output_prefix},    {"documents", result.progress.documents},
        {"empty_documents", result.empty_documents}, {"tokens", result.progress.tokens},
        {"bytes", result.progress.bytes_total},      {"seconds", seconds()}};
    fmt::print("{}\n", document.dump(2));
  } else if (!options.quiet) {
    const double elapsed = seconds();
    const double rate = static_cast<double>(result.progress.bytes_done) / std::max(1e-9, elapsed);
    fmt::print(stderr, "{0}.bin, {0}.idx: {1} documents, {2} tokens from {3} in {4} ({5}/s)\n",
               options.output_prefix, result.progress.documents, result.progress.tokens,
               format_bytes(result.progress.bytes_total), format_duration(elapsed),
               format_bytes(static_cast<uint64_t>(rate)));
  }
  return ExitStatus::done;
}

}  // namespace troupe
