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

// A calibration with another number in each field.
Calibration of_all_fields() {
  Calibration calibration = some();
  for (const DType dtype : {DType::bf16, DType::f32, DType::f64}) {
    for (const int64_t size : {256, 1024}) {
      const auto rate = static_cast<double>(calibration.products.size() + 1) * 1.5e11;
      calibration.products.push_back({.dtype = dtype, .size = size, .flops_per_s = rate});
    }
  }
  calibration.attention = {
      {.sequence = 64, .flops_per_s = 3.25e10, .gradient_flops_per_s = 4.125e10},
      {.sequence = 512, .flops_per_s = 1e12, .gradient_flops_per_s = 2.5e12}};
  calibration.share_under_load = 0.875;
  LinkCalibration within{.ranks = 4, .bandwidth = 3e10, .latency = 6.25e-6};
  for (const uint64_t bytes : {uint64_t{1} << 16, uint64_t{3} << 20}) {
    within.times.push_back({.kind = "all_gather",
                            .bytes = bytes,
                            .sent_bytes = 0.75 * static_cast<double>(bytes),
                            .rounds = 3,
                            .seconds = 1e-4});
    within.times.push_back({.kind = "sum_over_ranks",
                            .bytes = bytes,
                            .sent_bytes = 1.5 * static_cast<double>(bytes),
                            .rounds = 6,
                            .seconds = 5e-4});
  }
  LinkCalibration across = within;
  across.ranks = 2;
  across.bandwidth = 1.25e9;
  across.latency = 42e-6;
  calibration.links = {.within_machine = within, .across_machines = across};
  return calibration;
}

TEST(Calibration, IsSaidInTables) {
  EXPECT_EQ(text_of(of_all_fields()),
            "4 threads of here\n"
            "\n"
            "products of                   bf16             f32             f64\n"
            "  256 x 256            0.15 TFLOP/s     0.45 TFLOP/s     0.75 TFLOP/s\n"
            "  1024 x 1024           0.3 TFLOP/s      0.6 TFLOP/s      0.9 TFLOP/s\n"
            "attention over             forward        gradient\n"
            "  64 tokens          0.0325 TFLOP/s  0.04125 TFLOP/s\n"
            "  512 tokens              1 TFLOP/s      2.5 TFLOP/s\n"
            "copying            45 GB/s, to or from the host 20 GB/s\n"
            "between operations 0.05 us\n"
            "under load         88 % of the best product's rate\n"
            "4 ranks of a machine, what each sends of tensors of\n"
            "                        all_gather  sum_over_ranks\n"
            "  64.00 KiB            0.4915 GB/s     0.1966 GB/s\n"
            "  3.00 MiB              23.59 GB/s      9.437 GB/s\n"
            "  a link of 30 GB/s, 6.2 us for each round\n"
            "2 ranks of as many machines, what each sends of tensors of\n"
            "                        all_gather  sum_over_ranks\n"
            "  64.00 KiB            0.4915 GB/s     0.1966 GB/s\n"
            "  3.00 MiB              23.59 GB/s      9.437 GB/s\n"
            "  a link of 1.25 GB/s, 42.0 us for each round\n");
}

TEST(Calibration, IsWrittenWithWhereEachFigureComesFrom) {
  EXPECT_EQ(file_of(of_all_fields()),
            "name = \"4 threads of here\"\n"
            "measured = true\n"
            "compute_capability = 0          # 0: a CPU\n"
            "multiprocessors = 4             # of a CPU: threads\n"
            "memory_gib = 3                  # free when measured\n"
            "bf16_tflops = 0.15              # measured: the best of square products\n"
            "fp32_tflops = 0.25              # measured: the best of square products\n"
            "fp64_tflops = 0.125             # measured: the best of square products\n"
            "memory_gb_s = 45                # measured: copying\n"
            "attention_scale = 0.75          # measured: attention over planned\n"
            "# Products in a row have 0.875 of their best rate.\n"
            "host_gb_s = 20                  # measured: copies from and to the host\n"
            "gpus_per_node = 4               # of this machine\n"
            "gpus_per_nvlink = 4             # not measured: an estimate\n"
            "nvlink_gb_s = 10                # measured: collectives of 4 ranks\n"
            "nvlink_latency_us = 8           # measured: collectives of 4 ranks\n"
            "network_gb_s = 2.5              # measured: collectives of 2 ranks\n"
            "network_latency_us = 20         # measured: collectives of 2 ranks\n"
            "launch_us = 0.05                # measured: small operations in a row\n");
  Calibration shipped = some();
  shipped.links_are_known = true;
  EXPECT_EQ(file_of(shipped),
            "name = \"4 threads of here\"\n"
            "measured = true\n"
            "compute_capability = 0          # 0: a CPU\n"
            "multiprocessors = 4             # of a CPU: threads\n"
            "memory_gib = 3                  # free when measured\n"
            "bf16_tflops = 0.15              # measured: the best of square products\n"
            "fp32_tflops = 0.25              # measured: the best of square products\n"
            "fp64_tflops = 0.125             # measured: the best of square products\n"
            "memory_gb_s = 45                # measured: copying\n"
            "attention_scale = 0.75          # measured: attention over planned\n"
            "# Products in a row have 1.000 of their best rate.\n"
            "host_gb_s = 20                  # measured: copies from and to the host\n"
            "gpus_per_node = 4               # of this machine\n"
            "gpus_per_nvlink = 4             # as of the kind that is shipped\n"
            "nvlink_gb_s = 10                # as of the kind that is shipped\n"
            "nvlink_latency_us = 8           # as of the kind that is shipped\n"
            "network_gb_s = 2.5              # as of the kind that is shipped\n"
            "network_latency_us = 20         # as of the kind that is shipped\n"
            "launch_us = 0.05                # measured: small operations in a row\n");
}

}  // namespace
}  // namespace troupe
