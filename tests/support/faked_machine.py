"""Machines that answer otherwise than this one: a library that is loaded before all others stands for
files of the kernel and for BLAS. main() of program_runs.py comes first, since it is compiled into the
folder of the test.
"""

import os
import shutil
import subprocess

from program_runs import HERE, command

_COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
# FAKED_FILES: a folder whose files stand for those of /proc and /sys of the same name. FAKED_BLAS: what
# OpenBLAS calls itself; FAKED_CORE: its processor, unless OPENBLAS_CORETYPE gives one. WRONG_FLOATS,
# WRONG_DOUBLES: the index of an element of the product, from the end where it is negative.
_LIBRARY = """
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <string>

namespace {
template <class F> F* real(const char* name) {
  return reinterpret_cast<F*>(dlsym(RTLD_NEXT, name));
}
template <class T> void spoil(const char* variable, T* c, int64_t m, int64_t n, int64_t ldc) {
  const char* where = std::getenv(variable);
  if (where == nullptr) return;
  const int64_t index = std::atoi(where) < 0 ? m * n + std::atoi(where) : std::atoi(where);
  c[index / n * ldc + index % n] += 1;
}
}
extern "C" {
using File = FILE*(const char*, const char*);
FILE* fopen64(const char* path, const char* mode) {
  const char* folder = std::getenv("FAKED_FILES");
  std::string name = path;
  if (folder != nullptr && (name.starts_with("/proc/meminfo") || name.starts_with("/sys/kernel/mm"))) {
    name = folder + name.substr(name.rfind('/'));
  }
  return real<File>("fopen64")(name.c_str(), mode);
}
using Answer = char*();
char* openblas_get_config() {
  char* faked = std::getenv("FAKED_BLAS");
  return faked != nullptr ? faked : real<Answer>("openblas_get_config")();
}
char* openblas_get_corename() {
  char* faked = std::getenv("FAKED_CORE");
  char* chosen = std::getenv("OPENBLAS_CORETYPE");
  if (faked != nullptr) return chosen != nullptr ? chosen : faked;
  return real<Answer>("openblas_get_corename")();
}
using Single = void(int, int, int, int, int, int, float, const float*, int, const float*, int, float,
                    float*, int);
void cblas_sgemm(int order, int ta, int tb, int m, int n, int k, float alpha, const float* a, int lda,
                 const float* b, int ldb, float beta, float* c, int ldc) {
  real<Single>("cblas_sgemm")(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
  spoil("WRONG_FLOATS", c, m, n, ldc);
}
using Double = void(int, int, int, int, int, int, double, const double*, int, const double*, int, double,
                    double*, int);
void cblas_dgemm(int order, int ta, int tb, int m, int n, int k, double alpha, const double* a, int lda,
                 const double* b, int ldb, double beta, double* c, int ldc) {
  real<Double>("cblas_dgemm")(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
  spoil("WRONG_DOUBLES", c, m, n, ldc);
}
}
"""


def _library():
    library = HERE.folder / "faked.so"
    if not library.exists():
        source = HERE.folder / "faked.cc"
        source.write_text(_LIBRARY)
        subprocess.run([_COMPILER, "-std=c++20", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def memory_of(kib):
    """/proc/meminfo where so much is available."""
    return f"MemTotal: 9 kB\nMemAvailable: {kib} kB\n"


def run_on_faked_machine(*arguments, memory, pages="always madvise [never]", **variables):
    """Runs troupe to its end where these are the contents of /proc/meminfo and of the file that says
    which huge pages there are, with more environment variables."""
    files = HERE.folder / "files"
    files.mkdir(exist_ok=True)
    (files / "meminfo").write_text(memory)
    (files / "enabled").write_text(pages)
    kept = {name: value for name, value in os.environ.items() if name != "OPENBLAS_CORETYPE"}
    faked = {"LD_PRELOAD": str(_library()), "FAKED_FILES": str(files),
             "ASAN_OPTIONS": "verify_asan_link_order=0"}
    return subprocess.run(command(*arguments), env=kept | faked | variables, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, check=False)
