// The file of a calibration: that it is read as it was written, and says what is not measured.
#include "train/calibration.h"

#include <algorithm>
#include <fmt/format.h>
#include <fstream>
#include <gtest/gtest.h>
#include <optional>
#include <string>

#include "base/machine.h"
#include "options/cluster_options.h"
#include "train/train_test_support.h"

namespace troupe {
namespace {

GpuModel written_and_read(const Calibration& calibration) {
  const TempFolder folder;
  const std::string path = folder / "mine.toml";
  std::ofstream(path) << file_of(calibration);
  return hardware_of(path);
}

Calibration some() {
  Calibration calibration;
  GpuModel& hardware = calibration.hardware;
  hardware.name = "4 threads of here";
  hardware.traits = {.compute_capability = kNoGpu, .multiprocessors = 4};
  hardware.memory_bytes = uint64_t{3} << 30;
  hardware.bf16_flops = 1.5e11;
  hardware.f32_flops = 2.5e11;
  hardware.f64_flops = 1.25e11;
  hardware.attention_scale = 0.75;
  hardware.memory_bandwidth = 4.5e10;
  hardware.host_bandwidth = 2e10;
  hardware.gpus_per_node = 4;
  hardware.gpus_per_nvlink = 4;
  hardware.nvlink_bandwidth = 1e10;
  hardware.nvlink_latency = 8e-6;
  hardware.network_bandwidth = 2.5e9;
  hardware.network_latency = 2e-5;
  hardware.launch_seconds = 5e-8;
  return calibration;
}

TEST(Calibration, IsReadAsItWasWritten) {
  const GpuModel model = written_and_read(some());
  const GpuModel expected = some().hardware;
  EXPECT_EQ(model.name, expected.name);
  EXPECT_TRUE(model.measured);
  EXPECT_EQ(model.traits, expected.traits);
  EXPECT_EQ(model.memory_bytes, expected.memory_bytes);
  EXPECT_EQ(model.gpus_per_node, expected.gpus_per_node);
  EXPECT_EQ(model.gpus_per_nvlink, expected.gpus_per_nvlink);
  // Six digits are written.
  const auto expect_near = [](double value, double written, const char* what) {
    EXPECT_NEAR(value, written, 1e-5 * written) << what;
  };
  expect_near(model.bf16_flops, expected.bf16_flops, "bf16");
  expect_near(model.f32_flops, expected.f32_flops, "f32");
  expect_near(model.f64_flops, expected.f64_flops, "f64");
  expect_near(model.attention_scale, expected.attention_scale, "attention");
  expect_near(model.memory_bandwidth, expected.memory_bandwidth, "memory");
  expect_near(model.host_bandwidth, expected.host_bandwidth, "host");
  expect_near(model.nvlink_bandwidth, expected.nvlink_bandwidth, "nvlink");
  expect_near(model.nvlink_latency, expected.nvlink_latency, "nvlink latency");
  expect_near(model.network_bandwidth, expected.network_bandwidth, "network");
  expect_near(model.network_latency, expected.network_latency, "network latency");
  expect_near(model.launch_seconds, expected.launch_seconds, "launch");
}

TEST(Calibration, SaysWhatIsAnEstimate) {
  Calibration calibration = some();
  EXPECT_NE(file_of(calibration).find("# not measured: an estimate"), std::string::npos);
  calibration.links_are_known = true;
  EXPECT_EQ(file_of(calibration).find("# not measured: an estimate"), std::string::npos);
  EXPECT_EQ(file_of(calibration).find("# measured: collectives"), std::string::npos);
  calibration.links.within_machine = LinkCalibration{.ranks = 3};
  EXPECT_NE(file_of(calibration).find("# measured: collectives of 3 ranks"), std::string::npos);
}

TEST(Calibration, MeasuresEveryFigure) {
  uint64_t last = 0;
  uint64_t all = 0;
  const std::optional<Calibration> measured = calibrate(
      {.ranks = 2, .threads = 2}, /*processes=*/nullptr, [&](uint64_t done, uint64_t total) {
        EXPECT_EQ(done, last + 1);
        last = done;
        all = total;
      });
  ASSERT_TRUE(measured);
  const Calibration& calibration = *measured;
  EXPECT_EQ(last, all) << "the report counts to its end";
  const GpuModel& hardware = calibration.hardware;
  EXPECT_EQ(hardware.traits.compute_capability, kNoGpu);
  EXPECT_EQ(hardware.traits.multiprocessors, 2);
  // All that is free; what others take at the same time is less than three quarters of it.
  EXPECT_GE(hardware.memory_bytes, std::max(uint64_t{1} << 30, available_memory_bytes() / 4));
  for (const double figure :
       {hardware.bf16_flops, hardware.f32_flops, hardware.f64_flops, hardware.memory_bandwidth,
        hardware.host_bandwidth, hardware.nvlink_bandwidth}) {
    EXPECT_GT(figure, 0);
  }
  ASSERT_EQ(calibration.products.size(), 12U);
  for (const ProductRate& rate : calibration.products) EXPECT_GT(rate.flops_per_s, 0) << rate.size;
  const std::string text = text_of(calibration);
  for (const ProductRate& rate : calibration.products) {
    EXPECT_NE(text.find(fmt::format("\n  {0} x {0} ", rate.size)), std::string::npos) << text;
  }
  for (const AttentionRate& rate : calibration.attention) {
    EXPECT_GT(rate.flops_per_s, 0) << rate.sequence;
    EXPECT_GT(rate.gradient_flops_per_s, 0) << rate.sequence;
    EXPECT_NE(text.find(fmt::format("\n  {} tokens ", rate.sequence)), std::string::npos) << text;
  }
  EXPECT_EQ(calibration.attention.size(), 3U);
  EXPECT_GT(hardware.attention_scale, 0);
  EXPECT_GT(calibration.share_under_load, 0);
  EXPECT_LE(calibration.share_under_load, 1);
  ASSERT_TRUE(calibration.links.within_machine);
  EXPECT_FALSE(calibration.links.across_machines) << "threads are on one machine";
  EXPECT_EQ(calibration.links.within_machine->times.size(), 9U) << "three sizes, three collectives";
  EXPECT_EQ(hardware.nvlink_bandwidth, calibration.links.within_machine->bandwidth);
  EXPECT_EQ(hardware.nvlink_latency, calibration.links.within_machine->latency);
  EXPECT_NE(text.find("2 ranks of a machine"), std::string::npos) << text;
  // The figure of a dtype is that of its best size.
  EXPECT_EQ(hardware.bf16_flops,
            std::max({calibration.products[0].flops_per_s, calibration.products[1].flops_per_s,
                      calibration.products[2].flops_per_s, calibration.products[3].flops_per_s}));
}

}  // namespace
}  // namespace troupe
