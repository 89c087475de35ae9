#include "comm/mpi_library.h"

#include <array>
#include <dlfcn.h>
#include <filesystem>
#include <fmt/format.h>
#include <string>
#include <system_error>

#include "base/error.h"
#include "base/machine.h"
#include "base/text.h"
#include "comm/mpi/mpi_entry.h"

namespace troupe {
namespace {

struct MpiFamily {
  MpiKind kind = MpiKind::open_mpi;
  const char* name = "";
  const char* library = "";               // ours, below lib/troupe
  std::array<const char*, 2> files = {};  // MPI's own
  const char* package = "";
};

constexpr std::array kMpiFamilies = {
    MpiFamily{.kind = MpiKind::open_mpi,
              .name = "Open MPI",
              .library = "libtroupe_openmpi.so",
              .files = {"libmpi.so.40", nullptr},
              .package = "openmpi-bin"},
    MpiFamily{.kind = MpiKind::mpich,
              .name = "MPICH",
              .library = "libtroupe_mpich.so",
              .files = {"libmpi.so.12", "libmpich.so.12"},  // the latter is Debian's
              .package = "mpich"},
};

struct Mpi {
  const MpiEntry* entry = nullptr;
  std::string name;
  std::string problem;
};

// False: there is no such MPI here, and another may be tried. Otherwise it is in this process, with
// the names that all kinds have, and no other can be.
bool open_family(const MpiFamily& family, Mpi& mpi) {
  std::error_code error;
  const std::filesystem::path ours =
      program_file().parent_path().parent_path() / "lib/troupe" / family.library;
  if (!std::filesystem::exists(ours, error)) return false;
  bool has_mpi = false;
  for (const char* file : family.files) {
    // MPI's own plugins expect to see its symbols.
    has_mpi = has_mpi || (file != nullptr && dlopen(file, RTLD_NOW | RTLD_GLOBAL) != nullptr);
  }
  mpi.problem += fmt::format("{}{} ({}; Debian's package {})", mpi.problem.empty() ? "" : " or ",
                             family.name, family.files[0], family.package);
  if (!has_mpi) return false;
  void* const library = dlopen(ours.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const reason = dlerror();
    mpi.problem = fmt::format("{} is too old or too new: {}", family.name,
                              printable(reason == nullptr ? "" : reason, kLongestComplaint));
    return true;
  }
  mpi.entry = static_cast<const MpiEntry*>(dlsym(library, kMpiEntryName));
  TROUPE_CHECK(mpi.entry != nullptr, "the library is ours");
  mpi.name = mpi.entry->name();
  mpi.problem.clear();
  return true;
}

Mpi open_mpi(MpiKind first) {
  Mpi mpi;
  for (const bool is_first : {true, false}) {
    for (const MpiFamily& family : kMpiFamilies) {
      if ((family.kind == first) == is_first && open_family(family, mpi)) return mpi;
    }
  }
  mpi.problem = mpi.problem.empty() ? "this build has none"
                                    : "neither LD_LIBRARY_PATH nor the system has " + mpi.problem;
  return mpi;
}

const Mpi& mpi(MpiKind first = MpiKind::open_mpi) {
  static const Mpi opened = open_mpi(first);
  return opened;
}

}  // namespace

bool load_mpi(MpiKind first) {
  return mpi(first).entry != nullptr;
}

const std::string& mpi_name() {
  return mpi().name;
}

const std::string& mpi_problem() {
  return mpi().problem;
}

std::unique_ptr<Post> join_mpi() {
  if (mpi().entry == nullptr) throw_bad_request("There is no MPI: " + mpi().problem + ".");
  return std::unique_ptr<Post>(mpi().entry->join());
}

}  // namespace troupe
