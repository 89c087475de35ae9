#include "runtime/cuda/kernel_trace.h"

#include <algorithm>
#include <cstdlib>
#include <cupti.h>
#include <map>
#include <mutex>

#include "base/error.h"
#include "runtime/device_memory.h"

namespace troupe {
namespace {

constexpr size_t kBufferBytes = size_t{4} << 20;
constexpr size_t kBufferAlignment = 8;
constexpr CUpti_ExternalCorrelationKind kOperations = CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0;

void check_cupti(CUptiResult result, const char* what) {
  if (result == CUPTI_SUCCESS) return;
  const char* text = nullptr;
  cuptiGetResultString(result, &text);
  throw_failed(std::string("CUPTI, ") + what + ": " + (text != nullptr ? text : "unknown error") +
               ". Profiling needs a GPU that no other profiler uses, and a driver that lets this "
               "user profile. Run without --profile.");
}

// The traces that live. CUPTI records while there are any.
struct Traces {
  std::mutex mutex;
  int count = 0;
};

Traces& traces() {
  static Traces instance;
  return instance;
}

// What CUPTI hands over, possibly on a thread of its own, of all GPUs.
struct Collected {
  std::mutex mutex;
  std::vector<LaunchRecord> records;
  std::vector<uint32_t> correlations;        // of the records
  std::map<uint32_t, int32_t> op_of_launch;  // by correlation
};

Collected& collected() {
  static Collected instance;
  return instance;
}

template <class Record>
void add(Collected& to, const Record& record, std::string name) {
  to.records.push_back({.name = std::move(name),
                        .device = record.deviceId,
                        .begin_ns = record.start,
                        .end_ns = record.end});
  to.correlations.push_back(record.correlationId);
}

void collect(Collected& to, const CUpti_Activity* activity) {
  switch (activity->kind) {
    case CUPTI_ACTIVITY_KIND_KERNEL:
    case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: {
      const auto& kernel = *reinterpret_cast<const CUpti_ActivityKernel10*>(activity);
      add(to, kernel, kernel.name);
      break;
    }
    case CUPTI_ACTIVITY_KIND_MEMCPY:
      add(to, *reinterpret_cast<const CUpti_ActivityMemcpy6*>(activity), "copy");
      break;
    case CUPTI_ACTIVITY_KIND_MEMSET:
      add(to, *reinterpret_cast<const CUpti_ActivityMemset4*>(activity), "fill");
      break;
    case CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION: {
      const auto& link = *reinterpret_cast<const CUpti_ActivityExternalCorrelation*>(activity);
      if (link.externalKind == kOperations) {
        to.op_of_launch[link.correlationId] = static_cast<int32_t>(link.externalId);
      }
      break;
    }
    default:
      break;
  }
}

void CUPTIAPI give_buffer(uint8_t** buffer, size_t* size, size_t* most_records) {
  *buffer = static_cast<uint8_t*>(std::aligned_alloc(kBufferAlignment, kBufferBytes));
  *size = *buffer != nullptr ? kBufferBytes : 0;
  *most_records = 0;
}

void CUPTIAPI take_buffer(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t valid) {
  Collected& to = collected();
  const std::lock_guard lock(to.mutex);
  CUpti_Activity* activity = nullptr;
  while (valid > 0 && cuptiActivityGetNextRecord(buffer, valid, &activity) == CUPTI_SUCCESS) {
    collect(to, activity);
  }
  std::free(buffer);
}

// Launches are recorded, too, since operations are attributed through them.
constexpr CUpti_ActivityKind kKinds[] = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL,
                                         CUPTI_ACTIVITY_KIND_MEMCPY,
                                         CUPTI_ACTIVITY_KIND_MEMSET,
                                         CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION,
                                         CUPTI_ACTIVITY_KIND_RUNTIME,
                                         CUPTI_ACTIVITY_KIND_DRIVER};

void stop_recording() {
  for (const CUpti_ActivityKind kind : kKinds) cuptiActivityDisable(kind);
  cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
}

}  // namespace

KernelTrace::KernelTrace() {
  require_gpu();
  const std::lock_guard guard(traces().mutex);
  if (traces().count > 0) {
    ++traces().count;
    running_ = true;
    return;
  }
  Collected& to = collected();
  {
    const std::lock_guard lock(to.mutex);
    to.records.clear();
    to.correlations.clear();
    to.op_of_launch.clear();
  }
  check_cupti(cuptiActivityRegisterCallbacks(give_buffer, take_buffer), "registering");
  for (const CUpti_ActivityKind kind : kKinds) {
    const CUptiResult result = cuptiActivityEnable(kind);
    if (result != CUPTI_SUCCESS) stop_recording();
    check_cupti(result, "beginning to record");
  }
  traces().count = 1;
  running_ = true;
}

KernelTrace::~KernelTrace() {
  stop();
}

void KernelTrace::stop() {
  if (!running_) return;
  running_ = false;
  const std::lock_guard guard(traces().mutex);
  if (--traces().count == 0) stop_recording();
}

void KernelTrace::begin_op(int32_t op) {
  check_cupti(cuptiActivityPushExternalCorrelationId(kOperations, static_cast<uint64_t>(op)),
              "naming an operation");
}

void KernelTrace::end_op() {
  uint64_t op = 0;
  check_cupti(cuptiActivityPopExternalCorrelationId(kOperations, &op), "naming an operation");
}

std::vector<LaunchRecord> KernelTrace::finish(uint32_t device) {
  check_cupti(cuptiActivityFlushAll(0), "handing over records");
  stop();
  Collected& from = collected();
  const std::lock_guard lock(from.mutex);
  std::vector<LaunchRecord> records;
  size_t others = 0;
  for (size_t i = 0; i < from.records.size(); ++i) {
    LaunchRecord& record = from.records[i];
    if (record.device != device) {
      from.correlations[others] = from.correlations[i];
      if (others != i) from.records[others] = std::move(record);
      ++others;
      continue;
    }
    const auto found = from.op_of_launch.find(from.correlations[i]);
    if (found != from.op_of_launch.end()) record.op = found->second;
    records.push_back(std::move(record));
  }
  from.records.resize(others);
  from.correlations.resize(others);
  std::stable_sort(
      records.begin(), records.end(),
      [](const LaunchRecord& a, const LaunchRecord& b) { return a.begin_ns < b.begin_ns; });
  return records;
}

}  // namespace troupe
