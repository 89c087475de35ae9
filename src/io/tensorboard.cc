#include "io/tensorboard.h"

#include <array>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <unistd.h>

#include "base/error.h"
#include "base/machine.h"
#include "io/file.h"

namespace troupe {
namespace {

// The reflected polynomial of CRC-32C.
constexpr uint32_t kPolynomial = 0x82f63b78;

constexpr std::array<uint32_t, 256> make_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t remainder = i;
    for (int bit = 0; bit < 8; ++bit) {
      remainder = (remainder >> 1) ^ ((remainder & 1) != 0 ? kPolynomial : 0);
    }
    table[i] = remainder;
  }
  return table;
}

template <class T>
void put_little_endian(std::string& out, T value) {
  for (size_t i = 0; i < sizeof(T); ++i) out += static_cast<char>((value >> (8 * i)) & 0xff);
}

// ---- Protobuf's wire format ----

enum class Wire : uint32_t { varint = 0, fixed64 = 1, bytes = 2, fixed32 = 5 };

void put_varint(std::string& out, uint64_t value) {
  while (value >= 0x80) {
    out += static_cast<char>((value & 0x7f) | 0x80);
    value >>= 7;
  }
  out += static_cast<char>(value);
}

void put_key(std::string& out, uint32_t field, Wire wire) {
  put_varint(out, (field << 3) | static_cast<uint32_t>(wire));
}

void put_bytes(std::string& out, uint32_t field, std::string_view bytes) {
  put_key(out, field, Wire::bytes);
  put_varint(out, bytes.size());
  out += bytes;
}

std::string begin_event(int64_t step) {
  const double wall_time =
      std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  std::string event;
  put_key(event, 1, Wire::fixed64);
  put_little_endian(event, std::bit_cast<uint64_t>(wall_time));
  put_key(event, 2, Wire::varint);
  put_varint(event, static_cast<uint64_t>(step));
  return event;
}

}  // namespace

uint32_t crc32c(std::string_view data) {
  static constexpr std::array<uint32_t, 256> kTable = make_table();
  uint32_t crc = 0xffffffff;
  for (const char c : data) crc = (crc >> 8) ^ kTable[(crc ^ static_cast<uint8_t>(c)) & 0xff];
  return ~crc;
}

uint32_t masked_crc32c(std::string_view data) {
  return std::rotr(crc32c(data), 15) + 0xa282ead8U;
}

TensorboardWriter::TensorboardWriter(const std::string& folder, int64_t first_step) {
  const Disk disk;
  disk.make_directories(folder);
  // TensorBoard knows an event file by "tfevents" and a time in its name. A second file of one
  // process in one second gets the next number.
  const std::string prefix =
      join_path(folder, "events.out.tfevents." + std::to_string(std::time(nullptr)) + "." +
                            host_name() + "." + std::to_string(getpid()) + ".");
  for (int number = 0; descriptor_ < 0; ++number) {
    path_ = prefix + std::to_string(number);
    descriptor_ = open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0644);
    if (descriptor_ < 0 && errno != EEXIST) {
      throw_failed("Cannot create " + path_ + ": " + std::strerror(errno) + ".");
    }
  }
  std::string version = begin_event(0);
  put_bytes(version, 3, "brain.Event:2");
  append(version);
  if (first_step <= 0) return;
  std::string session;
  put_key(session, 1, Wire::varint);
  put_varint(session, 1);  // START
  std::string start = begin_event(first_step);
  put_bytes(start, 7, session);
  append(start);
}

TensorboardWriter::~TensorboardWriter() {
  close(descriptor_);
}

void TensorboardWriter::write(int64_t step, std::span<const Scalar> scalars) {
  std::string summary;
  for (const Scalar& scalar : scalars) {
    std::string value;
    put_bytes(value, 1, scalar.tag);
    put_key(value, 2, Wire::fixed32);
    put_little_endian(value, std::bit_cast<uint32_t>(static_cast<float>(scalar.value)));
    put_bytes(summary, 1, value);
  }
  std::string event = begin_event(step);
  put_bytes(event, 5, summary);
  append(event);
}

void TensorboardWriter::append(const std::string& event) {
  std::string record;
  put_little_endian(record, static_cast<uint64_t>(event.size()));
  put_little_endian(record, masked_crc32c(record));
  record += event;
  put_little_endian(record, masked_crc32c(event));
  size_t written = 0;
  while (written < record.size()) {
    const ssize_t count = ::write(descriptor_, record.data() + written, record.size() - written);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw_failed("Cannot write " + path_ + ": " + std::strerror(errno) + ".");
    written += static_cast<size_t>(count);
  }
}

}  // namespace troupe
