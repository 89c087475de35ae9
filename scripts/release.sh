#!/usr/bin/env bash
# Makes the files of a release in build-release: packages, wheel, documentation, and their hashes.
# Checks first that the version is ready: a clean tree, a section of CHANGELOG.md, a run in
# tests/fixtures/releases (made by tests/fixtures/make_release.py), and everything that .ci/run runs.
# Ends with what is left to do by hand.
# Usage: scripts/release.sh
set -euo pipefail
cd "$(dirname "$0")/.."

version=$(sed -n 's/^project(.* VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)
complain() {
  echo "error: $*" >&2
  exit 1
}
[[ -n $version ]] || complain "CMakeLists.txt names no version."
[[ -z $(git status --porcelain) ]] || complain "There are changes that are not committed."
grep -q "^## \[$version\] - " CHANGELOG.md || complain "CHANGELOG.md has no section [$version]."
[[ -f tests/fixtures/releases/$version/expected.json ]] ||
  complain "No run of $version is kept: python3 tests/fixtures/make_release.py build/troupe"

.ci/run
make package wheel docs
cmake --install build-package --strip --prefix build-package/tried >/dev/null
bash packaging/try_program.sh build-package/tried/bin/troupe

rm -rf build-release
mkdir build-release
cp build-package/packages/*.{deb,tar.gz,whl} build-release/
tar -czf "build-release/troupe-$version-documentation.tar.gz" -C build-docs site
(cd build-release && sha256sum -- * | tee SHA256SUMS)
echo "To do: git tag -a v$version -m 'Troupe $version'; publish what is in build-release."
