// Encoding by every kind of tokenizer, on one thread. The text is that of the reference tests: many
// scripts, code, emoji and invalid UTF-8, repeated to 2 MiB and encoded as documents of 4 KiB; the
// tokenizers are theirs, too (2 to 3 thousand pieces). "MB/s" counts bytes of text.
#include <benchmark/benchmark.h>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "data/make_tokenizer.h"

namespace troupe {
namespace {

constexpr size_t kTextBytes = size_t{2} << 20;
constexpr size_t kDocumentBytes = size_t{4} << 10;

std::string fixture(const std::string& name) {
  return std::string(TROUPE_FIXTURE_DIR "/tokenizers/") + name;
}

std::string mixed_text() {
  std::ifstream in(fixture("seed.bin"), std::ios::binary);
  const std::string seed((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  std::string text;
  while (!seed.empty() && text.size() < kTextBytes) text += seed;
  return text;
}

void encode(benchmark::State& state, const char* type, const char* name) {
  static const std::string text = mixed_text();
  const auto tokenizer =
      make_tokenizer(read_tokenizer_model(type, *name == '\0' ? std::string() : fixture(name)));
  std::vector<int32_t> ids;
  for (auto _ : state) {
    ids.clear();
    for (size_t at = 0; at < text.size(); at += kDocumentBytes) {
      tokenizer->encode(std::string_view(text).substr(at, kDocumentBytes), ids);
    }
    benchmark::DoNotOptimize(ids.data());
  }
  state.counters["MB/s"] = benchmark::Counter(
      static_cast<double>(text.size()) * static_cast<double>(state.iterations()) / 1e6,
      benchmark::Counter::kIsRate);
  state.counters["bytes/token"] =
      static_cast<double>(text.size()) / static_cast<double>(ids.size());
}

BENCHMARK_CAPTURE(encode, byte, "byte", "");
BENCHMARK_CAPTURE(encode, gpt2, "HuggingFaceTokenizer", "gpt2");
BENCHMARK_CAPTURE(encode, llama3, "HuggingFaceTokenizer", "llama3");
BENCHMARK_CAPTURE(encode, qwen, "HuggingFaceTokenizer", "qwen");
BENCHMARK_CAPTURE(encode, deepseek, "HuggingFaceTokenizer", "deepseek");
BENCHMARK_CAPTURE(encode, unigram, "SentencePieceTokenizer", "unigram");
BENCHMARK_CAPTURE(encode, unigram_byte_fallback, "SentencePieceTokenizer", "unigram_byte_fallback");
BENCHMARK_CAPTURE(encode, bpe, "SentencePieceTokenizer", "bpe");
BENCHMARK_CAPTURE(encode, bpe_byte_fallback, "SentencePieceTokenizer", "bpe_byte_fallback");

}  // namespace
}  // namespace troupe
