// troupe doctor: what this machine offers, and whether the numbers it computes are right.
#include <cmath>
#include <cstdio>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

#include "base/build_info.h"
#include "base/commit.h"
#include "base/machine.h"
#include "base/units.h"
#include "cli/blas.h"
#include "cli/command.h"
#include "comm/join_processes.h"
#include "data/json_text.h"
#include "ops/cpu/gemm.h"
#include "ops/kernel_level.h"
#include "runtime/cuda_libraries.h"
#include "runtime/device_memory.h"
#include "train/terminal.h"

namespace troupe {
namespace {

// One line of the result. `problem` says what to do; empty when all is well.
struct Finding {
  std::string name;
  std::string text;
  nlohmann::ordered_json value;
  std::string problem;
};

Finding find_version() {
  return {"version", std::string(kVersion), std::string(kVersion), {}};
}

Finding find_build() {
  nlohmann::ordered_json value = {{"commit", build_commit()},
                                  {"compiler", build_compiler()},
                                  {"processor", kernel_levels().front()},
                                  {"cuda_compiler", nullptr}};
  if (!build_cuda().empty()) value["cuda_compiler"] = build_cuda();
  return {"build",
          fmt::format("commit {}, {}, for processor {}", build_commit(), build_compiler(),
                      kernel_levels().front()),
          value,
          {}};
}

Finding find_cpu_kernels() {
  std::vector<std::string_view> usable;
  for (const std::string_view level : kernel_levels()) {
    if (processor_has(level)) usable.push_back(level);
  }
  return {"cpu_kernels",
          fmt::format("{} (of {} in this build)", kernel_level(), fmt::join(kernel_levels(), ", ")),
          {{"used", kernel_level()}, {"usable", usable}, {"built", kernel_levels()}},
          {}};
}

Finding find_cuda() {
  if (!has_cuda()) return {"cuda", "not in this build", false, {}};
  const std::string reason = why_no_gpu();
  return {"cuda",
          "in this build" + (reason.empty() ? "" : "; no GPU can be used: " + reason),
          true,
          {}};
}

Finding find_cuda_libraries() {
  Finding finding{"cuda_libraries", {}, nlohmann::ordered_json::object(), cuda_library_problem()};
  // Who has no GPU needs none of them.
  if (!finding.problem.empty() && !why_no_gpu().empty()) {
    finding.text = std::exchange(finding.problem, {});
  }
  for (const auto& [name, version] : cuda_library_versions()) {
    finding.text += (finding.text.empty() ? "" : ", ") + fmt::format("{} {}", name, version);
    finding.value[name] = version;
  }
  return finding;
}

Finding find_mpi() {
  if (!load_mpi(MpiKind::open_mpi)) return {"mpi", "none: " + mpi_problem(), nullptr, {}};
  return {"mpi", mpi_name(), mpi_name(), {}};
}

Finding find_transports() {
  nlohmann::ordered_json transports = {"tcp"};
  std::string text = "over TCP (torchrun, srun, by hand)";
  if (load_mpi(MpiKind::open_mpi)) {
    transports.push_back("mpi");
    text += ", through MPI (mpirun, srun --mpi=pmix)";
  }
  return {"processes", text, transports, {}};
}

Finding find_cores() {
  const int cores = usable_cores();
  return {"cores", fmt::format("{} of {} usable", cores, installed_cores()), cores, {}};
}

// The kernels' own path to BLAS: a product whose exact result is known, in both types.
template <class T>
bool product_is_right() {
  // Small whole numbers: every sum is exact, so no tolerance is needed.
  constexpr int64_t kM = 37;
  constexpr int64_t kN = 29;
  constexpr int64_t kK = 53;
  std::vector<T> a(kM * kK);
  std::vector<T> b(kK * kN);
  std::vector<T> c(kM * kN, T{-1});
  for (size_t i = 0; i < a.size(); ++i) a[i] = static_cast<T>(static_cast<int>(i * 7 % 11) - 5);
  for (size_t i = 0; i < b.size(); ++i) b[i] = static_cast<T>(static_cast<int>(i * 5 % 13) - 6);
  gemm_tile<T>(false, false, kM, kN, kK, T{1}, a.data(), kK, b.data(), kN, T{0}, c.data(), kN);
  for (int64_t i = 0; i < kM; ++i) {
    for (int64_t j = 0; j < kN; ++j) {
      T sum = 0;
      for (int64_t k = 0; k < kK; ++k) sum += a[i * kK + k] * b[k * kN + j];
      if (c[i * kN + j] != sum) return false;
    }
  }
  return true;
}

Finding find_blas() {
  const std::string library = blas_library().empty() ? "unnamed" : blas_library();
  const std::string core = blas_processor();
  Finding finding{"blas", library, nlohmann::ordered_json::object(), {}};
  finding.value["library"] = library;
  finding.value["core"] = nullptr;
  if (!core.empty()) {
    finding.value["core"] = core;
    finding.text += fmt::format("; kernels for {}", core);
  }
  if (!product_is_right<float>() || !product_is_right<double>()) {
    finding.problem =
        "a matrix product comes out wrong: BLAS is broken on this processor. Install another "
        "version of it";
  }
  return finding;
}

Finding find_memory() {
  const uint64_t bytes = available_memory_bytes();
  Finding finding{"available_memory_bytes", format_bytes(bytes), bytes, {}};
  if (bytes == 0) {
    finding.text = "unknown";
    finding.problem =
        "/proc/meminfo does not say how much memory is available, so runs that do "
        "not fit cannot be refused";
  }
  return finding;
}

Finding find_page_size() {
  const long bytes = sysconf(_SC_PAGESIZE);
  return {"page_size_bytes", format_bytes(static_cast<uint64_t>(bytes)), bytes, {}};
}

// The kernel's choice is the word in brackets: "always [madvise] never".
Finding find_huge_pages() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string word;
  while (file >> word) {
    if (word.size() > 2 && word.front() == '[' && word.back() == ']') {
      const std::string mode = word.substr(1, word.size() - 2);
      return {"transparent_huge_pages", mode, mode, {}};
    }
  }
  return {"transparent_huge_pages", "unknown", nullptr, {}};
}

void print_json(const std::vector<Finding>& findings, bool healthy) {
  nlohmann::ordered_json json;
  json["healthy"] = healthy;
  json["problems"] = nlohmann::ordered_json::array();
  for (const Finding& finding : findings) {
    json[finding.name] = finding.value;
    if (!finding.problem.empty()) json["problems"].push_back(finding.name + ": " + finding.problem);
  }
  fmt::print("{}", printed_json(json));
}

void print_text(const std::vector<Finding>& findings, bool healthy) {
  for (const Finding& finding : findings) {
    const std::string line = fmt::format("{:<24} {}", finding.name, finding.text);
    fmt::print("{}\n", wrap_text(line, kDefaultColumns, 25));
    if (finding.problem.empty()) continue;
    fmt::print("{}\n", wrap_text("  PROBLEM: " + finding.problem + ".", kDefaultColumns, 2));
  }
  fmt::print("{}\n", healthy ? "All is well." : "Troupe will not work well here.");
}

}  // namespace

ExitStatus run_doctor(const Options& options) {
  std::vector<Finding> findings = {find_version(),     find_build(),      find_cuda(),
                                   find_mpi(),         find_transports(), find_cores(),
                                   find_cpu_kernels(), find_memory(),     find_page_size(),
                                   find_huge_pages(),  find_blas()};
  if (has_cuda()) findings.insert(findings.begin() + 3, find_cuda_libraries());
  bool healthy = true;
  for (const Finding& finding : findings) healthy = healthy && finding.problem.empty();
  if (options.json) {
    print_json(findings, healthy);
  } else {
    print_text(findings, healthy);
  }
  return healthy ? ExitStatus::done : ExitStatus::failed;
}

}  // namespace troupe
