// Whole safetensors files. Of what is accepted, every byte is read through the entries, and writing
// the entries back must give a file with the same header fields.
#include <cstring>

#include "harness.h"
#include "io/safetensors.h"

namespace troupe::fuzz {

void parse(std::string_view input) {
  const SafetensorsFile file = SafetensorsFile::open(put_file("model.safetensors", input));
  std::vector<TensorSpec> specs;
  std::string data;
  for (const TensorEntry& entry : file.entries()) {
    const auto bytes = file.bytes(entry);
    data.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    specs.push_back(entry);
    if (file.find(entry.name) != &entry) report_finding("an entry is not found by its name");
  }
  const Disk disk;
  SafetensorsWriter writer(disk, scratch_folder() + "/copy", specs, file.metadata());
  for (size_t i = 0; i < specs.size(); ++i) writer.append(i, file.bytes(file.entries()[i]));
  writer.finish();
  const SafetensorsFile copy = SafetensorsFile::open(scratch_folder() + "/copy");
  std::string copied;
  for (const TensorEntry& entry : copy.entries()) {
    const auto bytes = copy.bytes(entry);
    copied.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  if (copied != data || copy.metadata() != file.metadata() ||
      copy.entries().size() != file.entries().size()) {
    report_finding("written back, the file is another one");
  }
}

std::vector<std::string> seeds() {
  const auto file_of = [](std::string_view header, size_t data_bytes) {
    std::string file(8, '\0');
    const uint64_t length = header.size();
    std::memcpy(file.data(), &length, sizeof length);
    return file.append(header).append(data_bytes, '\1');
  };
  return {
      file_of("{}", 0),
      file_of(R"({"__metadata__":{"format":"pt","a":"b"}} )", 0),
      file_of(R"({"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
              R"("b":{"dtype":"BF16","shape":[],"data_offsets":[24,26]}})",
              26),
      file_of(R"({"a":{"dtype":"I64","shape":[1],"data_offsets":[4,12]},)"
              R"("b":{"dtype":"U8","shape":[2,2],"data_offsets":[0,4]},)"
              R"("c":{"dtype":"F16","shape":[0,9],"data_offsets":[12,12]}})",
              12),
      file_of(R"({"a":{"dtype":"F64","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", 0),
      file_of(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
              R"("a":{"dtype":"I32","shape":[1],"data_offsets":[4,8]}})",
              8),
  };
}

}  // namespace troupe::fuzz
