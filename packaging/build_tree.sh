#!/usr/bin/env bash
# Builds Troupe in a bare Debian or Ubuntu, as root, and installs it into TREE with every library that
# it needs except glibc and libstdc++: TREE then works in any system whose both are as new. Where nvcc
# is (in PATH or /usr/local/cuda), it is built for GPUs, and cuDNN, NCCL, cuBLAS and NVRTC are in TREE,
# too. The first stage of packaging/Containerfile and packaging/troupe.def.
# Usage: packaging/build_tree.sh TREE        ARCH in the environment: as TROUPE_ARCH (CMakeLists.txt)
set -euo pipefail
cd "$(dirname "$0")/.."

tree=$1
libraries=$tree/lib/troupe
options=()
if [[ -n ${ARCH:-} ]]; then options+=(-DTROUPE_ARCH="$ARCH"); fi
groups=(build package)
if command -v nvcc >/dev/null || [[ -x /usr/local/cuda/bin/nvcc ]]; then
  groups+=(cuda)
  options+=(-DTROUPE_CUDA=ON)
fi

bash scripts/install_dependencies.sh "${groups[@]}"
bash scripts/build.sh package troupe "${options[@]}"
cmake --install build-package --strip --prefix "$tree" >build-package/install.log

if [[ ${groups[*]} == *cuda* ]]; then
  cmake --install build-package --component nvidia --prefix "$tree" >>build-package/install.log
fi

"$tree/bin/troupe" --version
if missing=$(ldd "$tree/bin/troupe" "$libraries"/* | grep 'not found'); then
  echo "error: $tree lacks libraries: $missing" >&2
  exit 1
fi
