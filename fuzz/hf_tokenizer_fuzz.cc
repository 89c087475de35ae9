// tokenizer.json of Hugging Face. What is accepted must encode any text and decode its own ids.
#include "data/make_tokenizer.h"
#include "harness.h"

namespace troupe::fuzz {

void parse(std::string_view input) {
  const auto tokenizer = make_tokenizer({.type = "HuggingFaceTokenizer",
                                         .path = "tokenizer.json",
                                         .contents = std::string(input),
                                         .eod = ""});
  std::vector<int32_t> ids;
  tokenizer->encode("It's 12 o'clock,  na\xc3\xafve\xff \xf0\x9f\x98\x80<|endoftext|>\n\n", ids);
  for (const int32_t id : ids) {
    if (id < 0 || id >= tokenizer->vocab_size()) report_finding("an id beyond the vocabulary");
  }
  static_cast<void>(tokenizer->decode(ids));
}

// A small file of every kind that is read: real ones are too long to be changed usefully.
std::vector<std::string> seeds() {
  const std::string model =
      R"("model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}})";
  return {R"({"added_tokens": [{"id": 3, "content": "<|endoftext|>", "special": true}],
"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false}, )" +
              model,
          R"({"normalizer": {"type": "NFC"}, "pre_tokenizer": {"type": "Sequence", "pretokenizers":
[{"type": "Split", "pattern": {"Regex": "\\p{N}{1,3}"}, "behavior": "Isolated"},
{"type": "Digits", "individual_digits": true}, {"type": "ByteLevel", "use_regex": false}]}, )" +
              model};
}

}  // namespace troupe::fuzz
