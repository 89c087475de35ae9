// Headers of safetensors files, without the length field that a mutation would nearly always break.
// The first byte of the input says how many bytes of data follow the header.
#include <cstring>

#include "harness.h"
#include "io/safetensors.h"

namespace troupe::fuzz {

void parse(std::string_view input) {
  if (input.empty()) return;
  const auto data_bytes = static_cast<unsigned char>(input[0]);
  const std::string_view header = input.substr(1);
  std::string contents(8, '\0');
  const uint64_t length = header.size();
  std::memcpy(contents.data(), &length, sizeof length);
  contents.append(header).append(data_bytes, '\1');
  const SafetensorsFile file = SafetensorsFile::open(put_file("model.safetensors", contents));
  uint64_t end = 0;
  for (const TensorEntry& entry : file.entries()) {
    if (entry.begin != end || entry.end - entry.begin != bytes_of(entry)) {
      report_finding("the tensors do not tile the data");
    }
    end = entry.end;
    unsigned sum = 0;
    for (const std::byte byte : file.bytes(entry)) sum += static_cast<unsigned>(byte);
    if (sum != entry.end - entry.begin) report_finding("a tensor lies outside the data");
  }
  if (end != data_bytes) report_finding("bytes that belong to no tensor were accepted");
}

std::vector<std::string> seeds() {
  return {
      std::string(1, '\0') + "{}",
      std::string(1, '\0') + R"({"__metadata__":{"format":"pt","x":"\u00e9"}}  )",
      std::string(1, '\x1a') + R"({"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
                               R"("b":{"dtype":"BF16","shape":[],"data_offsets":[24,26]}})",
      std::string(1, '\x0c') + R"({"a":{"dtype":"I64","shape":[1],"data_offsets":[4,12]},)"
                               R"("b":{"dtype":"U8","shape":[2,2],"data_offsets":[0,4]},)"
                               R"("c":{"dtype":"F16","shape":[0,9],"data_offsets":[12,12]}})",
      std::string(1, '\x08') + R"({"a":{"dtype":"F64","shape":[9223372036854775807,2],)"
                               R"("data_offsets":[0,18446744073709551615]}})",
  };
}

}  // namespace troupe::fuzz
