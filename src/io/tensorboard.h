// TensorBoard event files: scalars that TensorBoard shows as curves.
//
// A file is a sequence of records in TFRecord framing: length (u64), masked CRC-32C of the length,
// the record, masked CRC-32C of the record; all little-endian. Each record is a protobuf message
// tensorflow.Event, of which only a few fields are needed, so it is encoded by hand:
//   Event    1 wall_time (double), 2 step (int64), 3 file_version (string), 5 summary (message),
//            7 session_log (message)
//   Summary  1 value (message, repeated);  Value  1 tag (string), 2 simple_value (float)
//   SessionLog  1 status (enum: START = 1)
// (Formats: tensorflow/core/lib/io/record_writer.h and core/util/event.proto.)
//
// Records are given to the operating system whole and at once. Errors of the disk are UserErrors
// (exit status 1). Owns the open file; one thread.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace troupe {

// CRC-32C (Castagnoli), and the form in which records hold it.
uint32_t crc32c(std::string_view data);
uint32_t masked_crc32c(std::string_view data);

class TensorboardWriter {
 public:
  struct Scalar {
    std::string_view tag;
    double value = 0;
  };

  // Starts a new event file in `folder`, which is created. What earlier files of the folder say of
  // steps from `first_step` on is hidden by TensorBoard: a run that goes on does them again.
  TensorboardWriter(const std::string& folder, int64_t first_step);
  ~TensorboardWriter();
  TensorboardWriter(const TensorboardWriter&) = delete;
  TensorboardWriter& operator=(const TensorboardWriter&) = delete;

  void write(int64_t step, std::span<const Scalar> scalars);

  const std::string& path() const { return path_; }

 private:
  void append(const std::string& event);
  std::string path_;
  int descriptor_ = -1;
};

}  // namespace troupe
