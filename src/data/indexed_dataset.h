// Token sequences on disk in Megatron's `.bin`/`.idx` format: a reader and a streaming writer.
//
// A data set is a pair of files with one prefix: PREFIX.bin holds the tokens of all sequences, raw
// and little-endian; PREFIX.idx says how they are stored, how long each sequence is, where it
// starts, and where documents begin (docs/data_format.md has every byte). A document is one or more
// sequences; tools that write language-model data, ours included, store one sequence per document.
//
// Promises: the reader maps both files read-only and checks the whole index before it returns, so
// no later read can leave the files as they were when opened (a file that another program shortens
// while it is mapped cannot be guarded against). The writer keeps its output under temporary names
// until it is complete and on disk: however it is interrupted, PREFIX never names half a data set.
//
// Threads: a reader may be used from any number of threads at once; a writer belongs to one.
// Errors: all messages name the file. A missing file or an existing output is a bad request;
// everything wrong inside a file, and every failure of the disk, is `failed`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace troupe {

// How a token is stored. The values are the format's codes; its codes for floating-point elements
// (6 and 7) are not tokens and are refused.
enum class TokenType : uint8_t { u8 = 1, i8 = 2, i16 = 3, i32 = 4, i64 = 5, u16 = 8 };

int64_t size_of(TokenType type);  // bytes per token
std::string_view name_of(TokenType type);

// The type that Megatron's preprocessing chooses: u16 below a vocabulary of 65,500, else i32.
TokenType token_type_for_vocabulary(int64_t vocab_size);

// An inclusive range of token ids; `lowest` > `highest` when there were none.
struct TokenRange {
  int64_t lowest = INT64_MAX;
  int64_t highest = INT64_MIN;
};

class IndexedDataset {
 public:
  // Opens PREFIX.bin and PREFIX.idx. Takes time in proportion to the number of sequences.
  explicit IndexedDataset(const std::string& prefix);

  // A data set in memory, of one document for each sequence. `name` stands for the prefix.
  struct Parts {
    TokenType type = TokenType::u16;
    std::vector<int32_t> lengths;       // of each sequence, in tokens
    std::vector<int64_t> starts;        // of each, in bytes; sequences may share tokens
    std::vector<unsigned char> tokens;  // raw and little-endian
  };
  IndexedDataset(const std::string& name, const Parts& parts);

  ~IndexedDataset();
  IndexedDataset(const IndexedDataset&) = delete;
  IndexedDataset& operator=(const IndexedDataset&) = delete;

  const std::string& prefix() const { return prefix_; }
  TokenType token_type() const { return type_; }
  int64_t num_sequences() const { return num_sequences_; }
  int64_t num_documents() const { return num_documents_; }
  int64_t num_tokens() const { return num_tokens_; }

  // Everything in PREFIX.idx and in PREFIX.bin, for hashing.
  std::span<const std::byte> index_bytes() const { return idx_.bytes(); }
  std::span<const std::byte> token_bytes() const { return bin_.bytes(); }

  // Tokens of a sequence in [0, num_sequences()).
  int64_t sequence_length(int64_t sequence) const;

  // The first sequence of a document in [0, num_documents()]; the last entry is num_sequences().
  int64_t first_sequence(int64_t document) const;

  // Copies tokens [offset, offset + count) of a sequence to `out`, converted to int32. The range
  // must lie inside the sequence. Throws when a stored 64-bit id does not fit.
  void read(int64_t sequence, int64_t offset, int64_t count, int32_t* out) const;

  // The smallest and largest id of every `stride`-th sequence, from the first on: of all with 1,
  // which reads the whole .bin.
  TokenRange token_range(int64_t stride = 1) const;

 private:
  // A file mapped read-only, or bytes of its own.
  struct Mapping {
    const unsigned char* data = nullptr;
    int64_t size = 0;
    std::vector<unsigned char> own;

    Mapping() = default;
    ~Mapping();
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
    void open(const std::string& path);
    void keep(std::vector<unsigned char> bytes);
    std::span<const std::byte> bytes() const {
      return {reinterpret_cast<const std::byte*>(data), static_cast<size_t>(size)};
    }
  };

  void check_index();
  int64_t sequence_start(int64_t sequence) const;  // byte offset in .bin

  std::string prefix_;
  Mapping idx_;
  Mapping bin_;
  TokenType type_ = TokenType::u16;
  int64_t num_sequences_ = 0;
  int64_t num_documents_ = 0;
  int64_t num_tokens_ = 0;
  const unsigned char* lengths_ = nullptr;     // i32[num_sequences], not aligned
  const unsigned char* starts_ = nullptr;      // i64[num_sequences], not aligned
  const unsigned char* boundaries_ = nullptr;  // i64[num_documents + 1], not aligned
};

// Throws a bad request when an id is not in [0, vocab_size): the data was then written with another
// tokenizer. `tokenizer` is the name to print. Of a data set of more than kCheckedWhole bytes it
// reads about a thousand sequences, so that no size delays a start; SampleSource checks every id
// that it gives.
inline constexpr int64_t kCheckedWhole = int64_t{256} << 20;
void require_vocabulary(const IndexedDataset& dataset, int64_t vocab_size,
                        std::string_view tokenizer);

// Writes one data set. Destroyed before finish(), it removes what it wrote.
class IndexedDatasetWriter {
 public:
  // Missing folders in front of PREFIX are created. Without `overwrite`, existing files at PREFIX
  // are a bad request; with it, they stay readable until finish() replaces them. Two writers of one
  // PREFIX at once are refused.
  IndexedDatasetWriter(std::string prefix, TokenType type, bool overwrite);
  ~IndexedDatasetWriter();
  IndexedDatasetWriter(const IndexedDatasetWriter&) = delete;
  IndexedDatasetWriter& operator=(const IndexedDatasetWriter&) = delete;

  // Adds tokens to the current sequence. Each must be representable in the stored type.
  void append(std::span<const int32_t> tokens);

  // Ends the current sequence, which may be empty.
  void end_sequence();

  // Ends a document; the sequences ended since the last call are its own.
  void end_document();

  // Writes the index, brings both files to the disk and gives them their names. Every sequence and
  // document must have been ended. Nothing may be called afterwards but the destructor.
  void finish();

  int64_t num_tokens() const { return num_tokens_; }

 private:
  void flush();
  void write_all(int file, const std::string& path, const char* data, size_t size);
  void write_index();
  void discard();

  std::string prefix_;
  TokenType type_;
  int bin_file_ = -1;
  std::vector<char> buffer_;  // bytes of .bin not yet written
  std::vector<int32_t> lengths_;
  std::vector<int64_t> boundaries_ = {0};
  int64_t sequence_tokens_ = 0;  // of the sequence not yet ended
  int64_t num_tokens_ = 0;
};

}  // namespace troupe
