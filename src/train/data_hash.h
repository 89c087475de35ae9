// Content hashes of data sets: by them a rank with a stale copy is found, and a run that would go
// on with other data than it began with.
//
// A sampled hash is there at once, whatever the size: sizes, and blocks at fixed places of both
// files. The full hash covers every byte. Data of at most kHashedAtOnce bytes are hashed in full
// before the constructor returns; larger ones on a thread of their own while training goes on, so
// that no size delays the first step. docs/checkpoint_format.md defines both values.
//
// One thread uses a DataHasher; its own thread only reads the files. Nothing here fails.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "data/indexed_dataset.h"

namespace troupe {

// Of one data set: PREFIX.idx and PREFIX.bin.
struct DataHash {
  uint64_t bytes = 0;  // of both files
  uint64_t sampled = 0;
  std::optional<uint64_t> full;  // empty: not known yet

  // Whether the contents must be different ones, as far as both sides know.
  bool differs(const DataHash& other) const;
  // "1234 bytes, xxh3 0123456789abcdef", or with "sampled xxh3" before the full hash is known.
  std::string describe() const;
};

// Data sets of up to this many bytes together are read whole before a run starts.
inline constexpr uint64_t kHashedAtOnce = uint64_t{256} << 20;

uint64_t bytes_of(const IndexedDataset& set);
DataHash sampled_hash(const IndexedDataset& set);
uint64_t full_hash(const IndexedDataset& set);

// Of a folder of weights: names, sizes and sampled bytes of its safetensors files and config.json.
uint64_t sampled_weights_hash(const std::string& folder);

using SharedDatasets = std::vector<std::shared_ptr<const IndexedDataset>>;

class DataHasher {
 public:
  // `in_full`: false takes the sampled hashes alone, for a rank whose process hashes these files
  // already.
  DataHasher(SharedDatasets sets, bool in_full, uint64_t at_once = kHashedAtOnce);
  // Ends the background thread within milliseconds.
  ~DataHasher();
  DataHasher(const DataHasher&) = delete;
  DataHasher& operator=(const DataHasher&) = delete;

  // No thread is at work, so what hashes() returns will not change.
  bool is_done() const { return done_.load(std::memory_order_acquire); }
  // One for each set; with full hashes (where they were asked for) once is_done().
  std::vector<DataHash> hashes() const;

 private:
  void work();

  SharedDatasets sets_;
  std::vector<DataHash> sampled_;
  // Written by the thread until done_.
  std::vector<uint64_t> full_;
  std::atomic<bool> done_{false};
  std::atomic<bool> ends_{false};
  std::thread thread_;
};

}  // namespace troupe
