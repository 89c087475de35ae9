#!/usr/bin/env bash
# Makes a Python wheel of build-package (make package's build): the package troupe of python/, with the
# program and all that `make install` installs in it, and a command `troupe` that becomes the program.
# Its platform is the one that auditwheel finds: the oldest glibc that the program runs with.
# Usage: scripts/make_wheel.sh        writes build-package/packages/troupe-*.whl
set -euo pipefail
cd "$(dirname "$0")/.."

tools=build-package/wheel-tools
packages=build-package/packages
log=build-package/wheel.log
version=$(sed -n 's/^project(Troupe VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)

fail() {
  tail -n 20 "$log" >&2
  echo "error: $*" >&2
  exit 1
}

if [[ ! -d $tools ]]; then
  python3 -m pip install --disable-pip-version-check --target "$tools.new" 'wheel>=0.45' \
    'auditwheel>=6' >"$log" 2>&1 || fail "pip could not install wheel and auditwheel."
  mv "$tools.new" "$tools"
fi
with_tools() { PYTHONPATH=$tools python3 -m "$@"; }

tree=build-package/wheel
rm -rf "$tree" build-package/wheel-linux
mkdir -p "$tree/troupe" "$tree/troupe-$version.dist-info" "$packages"
cp python/troupe/*.py python/troupe/py.typed "$tree/troupe/"
cp LICENSE "$tree/troupe-$version.dist-info/"
cmake --install build-package --strip --prefix "$tree/troupe/program" >"$log" 2>&1 ||
  fail "cmake could not install into the wheel."
# A wheel holds no links: each library keeps the name by which programs ask for it.
for link in $(find "$tree/troupe/program/lib" -type l); do
  mv "$(realpath "$link")" "$link.file"
  mv "$link.file" "$link"
done

cat >"$tree/troupe-$version.dist-info/METADATA" <<TEXT
Metadata-Version: 2.1
Name: troupe
Version: $version
Summary: Trainer for Mixture-of-Experts language models
License: Apache-2.0
Requires-Python: >=3.9
Provides-Extra: checkpoints
Requires-Dist: numpy; extra == "checkpoints"
Requires-Dist: xxhash; extra == "checkpoints"
Description-Content-Type: text/markdown
TEXT
# For GPUs: what the program loads (src/base/cuda/nvidia_libraries.cc), of the CUDA that it was built
# with where the driver must know it.
cuda=$("$tree/troupe/program/bin/troupe" --version | sed -n 's/^cuda  *\([0-9]*[.][0-9]*\).*/\1/p')
if [[ -n $cuda ]]; then
  {
    echo 'Provides-Extra: cuda'
    for package in "nvidia-cublas~=13.0" "nvidia-cudnn-cu13>=9.15.1,<10" "nvidia-nccl-cu13~=2.27" \
      "nvidia-cuda-nvrtc==$cuda.*" "nvidia-cuda-cupti==$cuda.*"; do
      echo "Requires-Dist: $package; extra == \"cuda\""
    done
  } >>"$tree/troupe-$version.dist-info/METADATA"
fi
echo >>"$tree/troupe-$version.dist-info/METADATA"
cat docs/python.md >>"$tree/troupe-$version.dist-info/METADATA"
cat >"$tree/troupe-$version.dist-info/WHEEL" <<TEXT
Wheel-Version: 1.0
Generator: troupe
Root-Is-Purelib: false
Tag: py3-none-linux_$(uname -m)
TEXT
printf '[console_scripts]\ntroupe = troupe.__main__:main\n' \
  >"$tree/troupe-$version.dist-info/entry_points.txt"

mkdir build-package/wheel-linux
with_tools wheel pack "$tree" --dest-dir build-package/wheel-linux >"$log" 2>&1 ||
  fail "wheel could not pack $tree."
wheel=$(echo build-package/wheel-linux/*.whl)
with_tools auditwheel show "$wheel" >"$log" 2>&1 || fail "auditwheel could not read $wheel."
platform=$(tr '\n' ' ' <"$log" | sed -n 's/.*following platform tag: *"\([a-z0-9_]*\)".*/\1/p')
if [[ $platform != manylinux_* ]]; then
  fail "auditwheel found no manylinux platform (found: '$platform'): a library is missing."
fi
with_tools wheel tags --platform-tag "$platform" --remove "$wheel" >"$log" 2>&1 ||
  fail "wheel could not change the platform to $platform."
mv build-package/wheel-linux/*.whl "$packages/"
ls "$packages"/troupe-*.whl
