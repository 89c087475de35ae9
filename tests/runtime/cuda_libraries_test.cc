#include "runtime/cuda_libraries.h"

#include <gtest/gtest.h>

namespace troupe {
namespace {

TEST(CudaLibraries, RefusesCudnnThatWritesOutsideItsMemory) {
  EXPECT_EQ(cudnn_problem(91501), "");
  EXPECT_EQ(cudnn_problem(91900), "");
  EXPECT_EQ(cudnn_problem(100000), "");
  const std::string problem = cudnn_problem(91300);
  EXPECT_NE(problem.find("cuDNN 9.13.0 "), std::string::npos) << problem;
  EXPECT_NE(problem.find("Install 9.15.1 or newer"), std::string::npos) << problem;
  EXPECT_NE(cudnn_problem(91500), "");
}

}  // namespace
}  // namespace troupe
