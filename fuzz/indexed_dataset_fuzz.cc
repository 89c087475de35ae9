// PREFIX.idx beside a PREFIX.bin of 256 bytes. Of what is accepted, every token is read.
#include <algorithm>

#include "data/indexed_dataset.h"
#include "harness.h"

namespace troupe::fuzz {
namespace {

constexpr size_t kDataBytes = 256;

template <class T>
void append(std::string& text, T value) {
  text.append(reinterpret_cast<const char*>(&value), sizeof value);
}

std::string index_of(TokenType type, const std::vector<int32_t>& lengths,
                     const std::vector<int64_t>& boundaries) {
  std::string text("MMIDIDX\0\0", 9);
  append(text, uint64_t{1});
  append(text, type);
  append(text, static_cast<uint64_t>(lengths.size()));
  append(text, static_cast<uint64_t>(boundaries.size()));
  for (const int32_t length : lengths) append(text, length);
  int64_t start = 0;
  for (const int32_t length : lengths) {
    append(text, start);
    start += length * size_of(type);
  }
  for (const int64_t boundary : boundaries) append(text, boundary);
  return text;
}

}  // namespace

void parse(std::string_view input) {
  static const std::string data = [] {
    std::string bytes;
    for (size_t i = 0; i < kDataBytes; ++i) bytes.push_back(static_cast<char>(i));
    return put_file("data.bin", bytes);
  }();
  const std::string index = put_file("data.idx", input);
  const IndexedDataset dataset(index.substr(0, index.size() - 4));
  std::vector<int32_t> tokens;
  for (int64_t sequence = 0; sequence < dataset.num_sequences(); ++sequence) {
    tokens.resize(static_cast<size_t>(dataset.sequence_length(sequence)));
    if (tokens.size() > kDataBytes) report_finding("a sequence longer than the data");
    dataset.read(sequence, 0, static_cast<int64_t>(tokens.size()), tokens.data());
  }
  for (int64_t document = 0; document <= dataset.num_documents(); ++document) {
    if (dataset.first_sequence(document) > dataset.num_sequences()) {
      report_finding("a document beyond the sequences");
    }
  }
  dataset.token_range();
  require_vocabulary(dataset, 257, "byte");
}

std::vector<std::string> seeds() {
  return {index_of(TokenType::u16, {3, 0, 5}, {0, 1, 3}), index_of(TokenType::i32, {4, 4}, {0, 2}),
          index_of(TokenType::i64, {1}, {0, 1}),          index_of(TokenType::u8, {}, {0}),
          index_of(TokenType::i8, {200, 56}, {0, 1, 2}),  index_of(TokenType::i16, {128}, {0, 1})};
}

}  // namespace troupe::fuzz
