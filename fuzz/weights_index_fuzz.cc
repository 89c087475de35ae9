// model.safetensors.index.json beside two shards that are in order.
#include "harness.h"
#include "io/safetensors.h"

namespace troupe::fuzz {
namespace {

constexpr std::string_view kIndex =
    R"({"metadata":{"total_size":20},"weight_map":{)"
    R"("a":"model-00001-of-00002.safetensors","b":"model-00001-of-00002.safetensors",)"
    R"("c":"model-00002-of-00002.safetensors"}})";

// A folder of its own: the writer makes the shards, each input replaces the index.
const std::string& folder() {
  static const std::string path = [] {
    std::string name = scratch_folder() + "/model";
    const Disk disk;
    SafetensorsFolderWriter writer(
        disk, name,
        {{"a", FileDType::f32, {2}}, {"b", FileDType::u8, {4}}, {"c", FileDType::f64, {1}}}, 12);
    const std::vector<std::byte> data(8);
    writer.append(0, data);
    writer.append(1, std::span(data).first(4));
    writer.append(2, data);
    writer.finish();
    return name;
  }();
  return path;
}

}  // namespace

void parse(std::string_view input) {
  folder();
  put_file("model/model.safetensors.index.json", input);
  const SafetensorsFolder model = SafetensorsFolder::open(folder());
  for (const SafetensorsFile& file : model.files()) {
    for (const TensorEntry& entry : file.entries()) {
      if (model.find(entry.name).entry == nullptr) report_finding("a tensor is not found");
    }
  }
}

std::vector<std::string> seeds() {
  return {std::string(kIndex), R"({"weight_map":{}})",
          R"({"weight_map":{"a":"../a","b":"/","c":"."}})"};
}

}  // namespace troupe::fuzz
