#include "base/build_info.h"

namespace troupe {

std::string_view build_compiler() {
  return TROUPE_COMPILER;
}

std::string_view build_processor() {
  return TROUPE_ARCH;
}

std::string_view build_cuda() {
  return TROUPE_CUDA_VERSION;
}

}  // namespace troupe
