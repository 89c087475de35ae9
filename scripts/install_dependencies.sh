#!/usr/bin/env bash
# Installs the Debian or Ubuntu packages that are missing, and only those. Says in one line what it
# installs; says nothing when nothing is missing. On other systems it does nothing: the build names
# what it lacks. The group cuda, for machines with the CUDA toolkit, also installs Python packages
# with the libraries that no toolkit contains into the folder build-dependencies: those that are
# found nowhere else (cmake/TroupeCudaLibraries.cmake). The group readers installs Hugging Face's
# transformers 4 and 5, each into a folder of its own there, for tests/cli/hf_readers_test.py; where
# PyPI cannot be reached it says so and goes on: that test is then skipped. The group docs installs
# MkDocs there.
#
# Without root and sudo, packages are unpacked into build-dependencies/debian instead, where the build
# finds their libraries; a compiler, cmake and ninja must be there already. --unpack does so for the
# packages that it names, whether they are installed or not: the folder can then be copied to a
# machine of the same distribution that reaches no network.
# Usage: scripts/install_dependencies.sh [GROUP...]    groups: build (default), package,
#   lint, fuzz, browser, docs, quickstart, cuda, readers
#        scripts/install_dependencies.sh --unpack PACKAGE...
set -euo pipefail
cd "$(dirname "$0")/.."

# PACKAGE, or PACKAGE:COMMAND when a command found in PATH serves as well, however it came there.
build_packages=(
  g++:g++ cmake:cmake ninja-build:ninja make:make ccache:ccache python3:python3
  libopenblas-dev libfmt-dev libcli11-dev nlohmann-json3-dev libxxhash-dev libtomlplusplus-dev
  libpcre2-dev libutf8proc-dev libsentencepiece-dev libjs-chart.js libopenmpi-dev openmpi-bin
  libgtest-dev libbenchmark-dev
)
lint_packages=(clang-format:clang-format clang-tidy:clang-tidy)
fuzz_packages=(clang:clang++)
# The runtime libraries of clang's sanitizers and libFuzzer: a package of their own, but not yet in
# Ubuntu 22.04.
if ! grep -qs '^VERSION_ID="22.04"' /etc/os-release; then fuzz_packages+=(libclang-rt-dev); fi
quickstart_packages=(bible-kjv:bible)
browser_packages=(chromium:chromium)
package_packages=(libmpich-dev) # the headers of the second kind of MPI (cmake/TroupeMpi.cmake)
cuda_packages=(cmake:cmake python3:python3 python3-pip:pip3)

# As a tree like /, beside the list of packages that were asked for.
unpacked=build-dependencies/debian

log=$(mktemp)
folder=$(mktemp -d)
trap 'rm -rf "$log" "$folder"' EXIT

# Ends with the end of the log.
fail() {
  tail -n 40 "$log" >&2
  echo "error: $*" >&2
  exit 1
}

# The packages, and what they need that the system lacks. Lists and archives are our own: apt's are
# root's.
unpack_debian_packages() {
  local needed
  apt() { apt-get -q -o Dir::State::Lists="$folder/lists" -o Dir::Cache="$folder" "$@"; }
  echo "Unpacking Debian packages into $unpacked: $*"
  mkdir -p "$folder/lists/partial" "$folder/archives/partial" "$unpacked"
  if ! {
    { apt update || true; } &&
      apt --simulate --no-install-recommends install "$@" >"$folder/plan" &&
      mapfile -t needed < <({
        awk '$1 == "Inst" { print $2 }' "$folder/plan"
        printf '%s\n' "$@"
      } | sort -u) &&
      (cd "$folder" && apt download "${needed[@]}")
  } >"$log" 2>&1; then
    fail "apt-get could not download: $*"
  fi
  for archive in "$folder"/*.deb; do dpkg-deb --extract "$archive" "$unpacked"; done
  printf '%s\n' "$@" >>"$unpacked/packages"
}

if [[ ${1-} == --unpack ]]; then
  shift
  unpack_debian_packages "$@"
  exit
fi

if (($# == 0)); then set -- build; fi
wanted=()
with_cuda=false
with_readers=false
with_docs=false
for group in "$@"; do
  case $group in
    build) wanted+=("${build_packages[@]}") ;;
    package) wanted+=("${package_packages[@]}") ;;
    fuzz) wanted+=("${fuzz_packages[@]}") ;;
    lint) wanted+=("${lint_packages[@]}") ;;
    browser) wanted+=("${browser_packages[@]}") ;;
    quickstart) wanted+=("${quickstart_packages[@]}") ;;
    cuda)
      wanted+=("${cuda_packages[@]}")
      with_cuda=true
      ;;
    readers)
      with_readers=true
      ;;
    docs)
      with_docs=true
      ;;
    *)
      echo "error: unknown group '$group'; the groups are build, package, lint, fuzz, browser, docs, quickstart, cuda and readers." >&2
      exit 2
      ;;
  esac
done

install_debian_packages() {
  local missing=() as_root=() unpacks=false entry package status command
  if ((EUID != 0)); then
    if command -v sudo >/dev/null; then as_root=(sudo); else unpacks=true; fi
  fi
  for entry in "${wanted[@]}"; do
    package=${entry%%:*}
    if [[ $entry == *:* ]] && command -v "${entry#*:}" >/dev/null; then continue; fi
    if grep -qsx "$package" "$unpacked/packages"; then continue; fi
    if [[ $unpacks == true && $package == *openmpi* ]]; then continue; fi # must lie where it was built for
    status=$(dpkg-query -W -f '${db:Status-Status}\n' "$package" 2>/dev/null || true)
    if ! grep -qx installed <<<"$status"; then missing+=("$package"); fi
  done
  if ((${#missing[@]} == 0)); then return; fi

  if [[ $unpacks == true ]]; then
    for command in g++ make python3 cmake ninja; do
      if command -v "$command" >/dev/null; then continue; fi
      echo "error: $command is missing, and neither root nor sudo is available to install it." \
        "(cmake and ninja also come with: python3 -m pip install --user cmake ninja)" >&2
      exit 1
    done
    unpack_debian_packages "${missing[@]}"
    return
  fi

  echo "Installing Debian packages: ${missing[*]}"
  apt() { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q "$@"; }
  # One unreachable source must not keep the others from serving, so a failed update is no error yet.
  if ! {
    apt update || true
    apt install -y --no-install-recommends "${missing[@]}"
  } >"$log" 2>&1; then
    fail "apt-get could not install: ${missing[*]}"
  fi
}

install_python_packages() {
  local missing
  mapfile -t missing < <(cmake -P cmake/TroupeCudaLibraries.cmake | grep .)
  if ((${#missing[@]} == 0)); then return; fi
  echo "Installing Python packages into build-dependencies: ${missing[*]}"
  if ! python3 -m pip install --disable-pip-version-check --no-deps --upgrade \
    --target build-dependencies "${missing[@]}" >"$log" 2>&1; then
    fail "pip could not install: ${missing[*]}"
  fi
}

# Installs pip where it is missing.
require_pip() {
  if command -v pip3 >/dev/null; then return; fi
  (
    wanted=(python3-pip:pip3)
    install_debian_packages
  )
}

install_docs() {
  local target=build-dependencies/docs
  if [[ -d $target/mkdocs ]]; then return; fi
  require_pip
  echo "Installing Python packages into $target: mkdocs-material"
  rm -rf "$target.new"
  if ! python3 -m pip install --disable-pip-version-check --target "$target.new" \
    'mkdocs-material==9.*' >"$log" 2>&1; then
    fail "pip could not install: mkdocs-material"
  fi
  mv "$target.new" "$target"
}

# Neither needs torch to read configurations and tokenizers. What fails here only skips a test.
install_readers() {
  local version target
  for version in 4 5; do
    target=build-dependencies/transformers-$version
    if [[ -d $target/transformers ]]; then continue; fi
    if ! require_pip; then
      echo "There is no pip: the tests that need transformers will be skipped." >&2
      return
    fi
    echo "Installing Python packages into $target: transformers $version"
    rm -rf "$target.new"
    if ! python3 -m pip install --disable-pip-version-check --target "$target.new" \
      "transformers==$version.*" jinja2 >"$log" 2>&1; then
      tail -n 3 "$log" >&2
      echo "pip could not install transformers $version: the tests that need it will be skipped." >&2
      rm -rf "$target.new"
      continue
    fi
    mv "$target.new" "$target"
  done
}

if command -v dpkg-query >/dev/null; then install_debian_packages; fi
if [[ $with_cuda == true ]]; then install_python_packages; fi
if [[ $with_readers == true ]]; then install_readers; fi
if [[ $with_docs == true ]]; then install_docs; fi
