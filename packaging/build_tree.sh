#!/usr/bin/env bash
# Builds Troupe in a bare Debian or Ubuntu, as root, and installs it into TREE with every library that
# it needs except glibc and libstdc++: TREE then works in any system whose both are as new. Where nvcc
# is (in PATH or /usr/local/cuda), it is built for GPUs, and cuDNN, NCCL, cuBLAS and NVRTC are in TREE,
# too. The first stage of packaging/Containerfile and packaging/troupe.def.
# Usage: packaging/build_tree.sh TREE        ARCH in the environment: the processor, as -march takes it
set -euo pipefail
cd "$(dirname "$0")/.."

tree=$1
libraries=$tree/lib/troupe
options=(-DTROUPE_ARCH="${ARCH:-x86-64-v3}")
groups=(build)
if command -v nvcc >/dev/null || [[ -x /usr/local/cuda/bin/nvcc ]]; then
  groups+=(cuda)
  options+=(-DTROUPE_CUDA=ON)
fi

bash scripts/install_dependencies.sh "${groups[@]}"
bash scripts/build.sh package troupe "${options[@]}"
cmake --install build-package --strip --prefix "$tree" >build-package/install.log

# What LIBRARY of the build loads by name while it runs, which no list of needs has: FILES beside it.
take_along() {
  local library folder
  library=$(ldd build-package/bin/troupe | awk -v name="$1" 'index($1, name) == 1 { print $3 }')
  folder=$(dirname "$(realpath "$library")")
  find "$folder" -name "$2" -exec cp --update --dereference {} "$libraries/" \;
}
if [[ ${groups[*]} == *cuda* ]]; then
  take_along libcudnn.so. 'libcudnn*.so.[0-9]'
  take_along libnvrtc.so. 'libnvrtc-builtins.so.[0-9]*.[0-9]'
fi

"$tree/bin/troupe" --version
if missing=$(ldd "$tree/bin/troupe" "$libraries"/* | grep 'not found'); then
  echo "error: $tree lacks libraries: $missing" >&2
  exit 1
fi
