#include "base/cuda/nvidia_libraries.h"

#include <array>
#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <span>

// The functions that Troupe and cudnn-frontend call.
#define TROUPE_CUBLASLT(FUNCTION)                \
  FUNCTION(cublasLtCreate)                       \
  FUNCTION(cublasLtDestroy)                      \
  FUNCTION(cublasLtGetStatusString)              \
  FUNCTION(cublasLtGetVersion)                   \
  FUNCTION(cublasLtMatmul)                       \
  FUNCTION(cublasLtMatmulAlgoGetHeuristic)       \
  FUNCTION(cublasLtMatmulDescCreate)             \
  FUNCTION(cublasLtMatmulDescDestroy)            \
  FUNCTION(cublasLtMatmulDescSetAttribute)       \
  FUNCTION(cublasLtMatmulPreferenceCreate)       \
  FUNCTION(cublasLtMatmulPreferenceDestroy)      \
  FUNCTION(cublasLtMatmulPreferenceSetAttribute) \
  FUNCTION(cublasLtMatrixLayoutCreate)           \
  FUNCTION(cublasLtMatrixLayoutDestroy)          \
  FUNCTION(cublasLtMatrixLayoutSetAttribute)
#define TROUPE_CUDNN(FUNCTION)            \
  FUNCTION(cudnnBackendCreateDescriptor)  \
  FUNCTION(cudnnBackendDestroyDescriptor) \
  FUNCTION(cudnnBackendExecute)           \
  FUNCTION(cudnnBackendFinalize)          \
  FUNCTION(cudnnBackendGetAttribute)      \
  FUNCTION(cudnnBackendSetAttribute)      \
  FUNCTION(cudnnCreate)                   \
  FUNCTION(cudnnDestroy)                  \
  FUNCTION(cudnnGetErrorString)           \
  FUNCTION(cudnnGetLastErrorString)       \
  FUNCTION(cudnnGetStream)                \
  FUNCTION(cudnnGetVersion)               \
  FUNCTION(cudnnSetStream)
#define TROUPE_NCCL(FUNCTION)      \
  FUNCTION(ncclAllGather)          \
  FUNCTION(ncclCommAbort)          \
  FUNCTION(ncclCommDestroy)        \
  FUNCTION(ncclCommGetAsyncError)  \
  FUNCTION(ncclCommInitRankConfig) \
  FUNCTION(ncclGetErrorString)     \
  FUNCTION(ncclGetLastError)       \
  FUNCTION(ncclGetUniqueId)        \
  FUNCTION(ncclGetVersion)         \
  FUNCTION(ncclGroupEnd)           \
  FUNCTION(ncclGroupStart)         \
  FUNCTION(ncclRecv)               \
  FUNCTION(ncclSend)
#define TROUPE_NVRTC(FUNCTION)     \
  FUNCTION(nvrtcCompileProgram)    \
  FUNCTION(nvrtcCreateProgram)     \
  FUNCTION(nvrtcDestroyProgram)    \
  FUNCTION(nvrtcGetCUBIN)          \
  FUNCTION(nvrtcGetCUBINSize)      \
  FUNCTION(nvrtcGetErrorString)    \
  FUNCTION(nvrtcGetPTX)            \
  FUNCTION(nvrtcGetPTXSize)        \
  FUNCTION(nvrtcGetProgramLog)     \
  FUNCTION(nvrtcGetProgramLogSize) \
  FUNCTION(nvrtcVersion)
#define TROUPE_CUPTI(FUNCTION)                     \
  FUNCTION(cuptiActivityDisable)                   \
  FUNCTION(cuptiActivityEnable)                    \
  FUNCTION(cuptiActivityFlushAll)                  \
  FUNCTION(cuptiActivityGetNextRecord)             \
  FUNCTION(cuptiActivityPopExternalCorrelationId)  \
  FUNCTION(cuptiActivityPushExternalCorrelationId) \
  FUNCTION(cuptiActivityRegisterCallbacks)         \
  FUNCTION(cuptiGetResultString)
#define TROUPE_NVIDIA(FUNCTION) \
  TROUPE_CUBLASLT(FUNCTION)     \
  TROUPE_CUDNN(FUNCTION) TROUPE_NCCL(FUNCTION) TROUPE_NVRTC(FUNCTION) TROUPE_CUPTI(FUNCTION)

// A function is a jump to where its slot points.
#if defined(__x86_64__)
#define TROUPE_JUMP(slot) "endbr64\njmp *" slot "(%rip)\n"
#elif defined(__aarch64__)
#define TROUPE_JUMP(slot) "adrp x16, " slot "\nldr x16, [x16, :lo12:" slot "]\nbr x16\n"
#endif
#define TROUPE_DEFINE(name)                                                         \
  asm(".text\n.globl " #name "\n.type " #name ", %function\n.p2align 4\n" #name     \
      ":\n" TROUPE_JUMP("troupe_slot_of_" #name) ".size " #name ", .-" #name "\n"); \
  extern "C" {                                                                      \
  void* troupe_slot_of_##name = reinterpret_cast<void*>(&call_before_loading);      \
  }

namespace {

[[noreturn]] void call_before_loading() {
  std::fputs("troupe: a function of NVIDIA's libraries was called before they were loaded.\n",
             stderr);
  std::abort();
}

}  // namespace

TROUPE_NVIDIA(TROUPE_DEFINE)

namespace troupe {
namespace {

struct Function {
  const char* name;
  void** slot;
};

#define TROUPE_ENTRY(name) Function{#name, &troupe_slot_of_##name},
constexpr std::array kCublasLt = {TROUPE_CUBLASLT(TROUPE_ENTRY)};
constexpr std::array kCudnn = {TROUPE_CUDNN(TROUPE_ENTRY)};
constexpr std::array kNccl = {TROUPE_NCCL(TROUPE_ENTRY)};
constexpr std::array kNvrtc = {TROUPE_NVRTC(TROUPE_ENTRY)};
constexpr std::array kCupti = {TROUPE_CUPTI(TROUPE_ENTRY)};

struct Library {
  const char* name;
  const char* file;
  const char* package;  // of PyPI
  std::span<const Function> functions;
};

constexpr std::array kLibraries = {
    Library{"cuBLASLt", "libcublasLt.so.13", "nvidia-cublas", kCublasLt},
    Library{"cuDNN", "libcudnn.so.9", "nvidia-cudnn-cu13", kCudnn},
    Library{"NCCL", "libnccl.so.2", "nvidia-nccl-cu13", kNccl},
    Library{"NVRTC", "libnvrtc.so.13", "nvidia-cuda-nvrtc", kNvrtc},
    Library{"CUPTI", "libcupti.so.13", "nvidia-cuda-cupti", kCupti},
};

// Empty: loaded.
std::string load(const Library& library) {
  void* const handle = dlopen(library.file, RTLD_LAZY | RTLD_GLOBAL);
  if (handle == nullptr) return std::string(library.name) + " (" + library.file + ")";
  for (const Function& function : library.functions) {
    void* const address = dlsym(handle, function.name);
    if (address == nullptr) {
      return std::string(library.name) + " (" + library.file + " is too old: it lacks " +
             function.name + ")";
    }
    *function.slot = address;
  }
  return {};
}

std::string load_all() {
  std::string missing;
  std::string packages;
  for (const Library& library : kLibraries) {
    const std::string text = load(library);
    if (text.empty()) continue;
    missing += (missing.empty() ? "" : ", ") + text;
    packages += std::string(" ") + library.package;
  }
  if (missing.empty()) return {};
  return "libraries of NVIDIA were not found: " + missing + ". Install them: pip install" +
         packages + "; or name their folders in LD_LIBRARY_PATH";
}

}  // namespace

const std::string& load_nvidia_libraries() {
  static const std::string problem = load_all();
  return problem;
}

}  // namespace troupe
