#include "cli/blas.h"

#include <dlfcn.h>

namespace troupe {
namespace {

std::string ask_openblas(const char* function) {
  void* address = dlsym(RTLD_DEFAULT, function);
  if (address == nullptr) return {};
  const char* answer = reinterpret_cast<char* (*)()>(address)();
  return answer != nullptr ? answer : std::string();
}

}  // namespace

std::string blas_library() {
  const std::string config = ask_openblas("openblas_get_config");
  return config.substr(0, config.find("  "));
}

std::string blas_processor_for(std::string_view level) {
  if (level == "x86-64-v2") return "Nehalem";
  if (level == "x86-64-v3") return "Haswell";
  if (level == "x86-64-v4") return "SkylakeX";
  return {};
}

std::string blas_processor() {
  return ask_openblas("openblas_get_corename");
}

}  // namespace troupe
