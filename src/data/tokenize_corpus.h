// Turns text files into one data set (`troupe tokenize`).
//
// Each document becomes one sequence: its tokens and one end-of-document id. Documents keep the
// order of the inputs and of the text inside them. Empty documents are left out and counted.
//
// Documents are read in batches, tokenized by the threads of a pool, one document each, and written
// in order.
//
// Promises: the output appears complete or not at all (data/indexed_dataset.h), also when stopped
// or when an input is malformed; it is the same bytes for any number of threads. Memory: per thread
// some 20 MiB, and a few times the longest document, which has a bound. The callbacks are called
// from the calling thread.
// Errors: a missing input, one that is no regular file, a file of another kind (compressed,
// Parquet), a document beyond the bound, contradictory options, a malformed JSON line (with file
// and line number) and inputs without any text are bad requests; failures of the disk are `failed`.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "data/tokenizer.h"

namespace troupe {

enum class CorpusFormat {
  by_extension,  // .jsonl and .json are JSON lines, everything else is plain text
  text,
  jsonl,  // one JSON object per line; lines of white space alone are skipped
};

struct TokenizeProgress {
  uint64_t bytes_done = 0;   // of the inputs
  uint64_t bytes_total = 0;  // standard input counts as 0
  int64_t documents = 0;
  int64_t tokens = 0;  // ends of documents included
};

struct TokenizeOptions {
  std::vector<std::string> inputs;  // "-" is standard input
  std::string output_prefix;
  CorpusFormat format = CorpusFormat::by_extension;

  // Plain text: 0 makes each file one document, byte for byte. n >= 1 ends a document at each run
  // of at least n blank lines (nothing but spaces, tabs, carriage returns and form feeds); a
  // document then runs from its first line that is not blank to the last, without the final
  // newline, and shorter runs of blank lines inside it become empty lines.
  int split_blank_lines = 0;

  std::string json_key = "text";  // JSON lines: the field that holds the text, a string
  bool overwrite = false;         // replace an existing output

  // Bytes of one document, or of one line of JSON. A longer one is a bad request.
  uint64_t longest_document = uint64_t{1} << 30;

  std::function<void(const TokenizeProgress&)>
      on_progress;                       // after each document is written; may be empty
  std::function<bool()> stop_requested;  // asked between documents and batches; may be empty
};

struct TokenizeResult {
  bool completed = false;  // false: stopped on request, and nothing was written
  TokenizeProgress progress;
  int64_t empty_documents = 0;
};

TokenizeResult tokenize_corpus(const Tokenizer& tokenizer, const TokenizeOptions& options,
                               ThreadPool& pool);

}  // namespace troupe
