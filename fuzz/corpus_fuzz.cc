// Corpora for `troupe tokenize`: the first byte of the input chooses between JSON lines, whole text
// and text split at blank lines; the rest is the file. What is written must be readable.
#include "data/indexed_dataset.h"
#include "data/make_tokenizer.h"
#include "data/tokenize_corpus.h"
#include "harness.h"

namespace troupe::fuzz {

void parse(std::string_view input) {
  if (input.empty()) return;
  static const auto tokenizer = make_tokenizer(TokenizerModel{});
  static ThreadPool pool(1);
  TokenizeOptions options;
  options.output_prefix = scratch_folder() + "/out";
  options.overwrite = true;
  options.format = input[0] == 'j' ? CorpusFormat::jsonl : CorpusFormat::text;
  options.split_blank_lines = input[0] == 's' ? 1 : 0;
  options.inputs = {put_file("corpus", input.substr(1))};
  const TokenizeResult result = tokenize_corpus(*tokenizer, options, pool);
  const IndexedDataset dataset(options.output_prefix);
  if (dataset.num_documents() != result.progress.documents ||
      dataset.num_tokens() != result.progress.tokens) {
    report_finding("the data set is not what the result says");
  }
  require_vocabulary(dataset, tokenizer->vocab_size(), tokenizer->name());
}

std::vector<std::string> seeds() {
  return {"j{\"text\": \"one\"}\n\n{\"id\": 7, \"text\": \"tw\\u006f\\n\"}\n",
          "j{\"text\": [[[[1e999]]]]}\n", "j{\"text\": \"\\ud83d\\ude00\", \"text\": \"\"}",
          "swhole\n \t\n\ntext\r\n", "t\xff\xfe any bytes"};
}

}  // namespace troupe::fuzz
