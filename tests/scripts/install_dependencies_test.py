#!/usr/bin/env python3
"""Which packages scripts/install_dependencies.sh installs or unpacks, with commands in the place of
apt's and dpkg's that write down what they are asked for.

Usage: install_dependencies_test.py PROGRAM SOURCE_FOLDER     (the program is not used)
"""

import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SOURCE_FOLDER = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).resolve().parents[2]

# All packages need libneeded1; libabsent-dev cannot be downloaded.
COMMANDS = {
    "apt-get": """
words=()
while (($#)); do
  case $1 in
    -o) shift ;;
    *) words+=("$1") ;;
  esac
  shift
done
echo "${words[*]}" >>"$CALLS"
case " ${words[*]} " in
  *" --simulate "*) echo "Inst libneeded1 (1.0 somewhere)" ;;
  *" libabsent-dev "*) exit 100 ;;
  *" download "*)
    for word in "${words[@]}"; do
      if [[ $word != -* && $word != download ]]; then touch "$word.deb"; fi
    done ;;
esac
""",
    "dpkg-query": "exit 1\n",
    "dpkg-deb": 'touch "$3/$(basename "$2" .deb)"\n',
    "sudo": 'exec "$@"\n',
}


class InstallDependencies(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.tree = Path(folder.name)
        (self.tree / "scripts").mkdir()
        shutil.copy(SOURCE_FOLDER / "scripts" / "install_dependencies.sh", self.tree / "scripts")
        (self.tree / "bin").mkdir()
        for name, text in COMMANDS.items():
            (self.tree / "bin" / name).write_text("#!/usr/bin/env bash\n" + text)
            (self.tree / "bin" / name).chmod(0o755)

    def run_script(self, *arguments):
        environment = {**os.environ, "CALLS": str(self.tree / "calls"),
                       "PATH": f"{self.tree}/bin:{os.environ['PATH']}"}
        return subprocess.run(["bash", str(self.tree / "scripts" / "install_dependencies.sh"),
                               *arguments], env=environment, capture_output=True, text=True,
                              check=False)

    def calls(self):
        path = self.tree / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def unpacked(self):
        folder = self.tree / "build-dependencies" / "debian"
        return sorted(path.name for path in folder.iterdir())

    def test_unpacks_packages_with_what_they_need(self):
        result = self.run_script("--unpack", "liba-dev", "libb-dev")
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        self.assertEqual(self.unpacked(), ["liba-dev", "libb-dev", "libneeded1", "packages"])
        packages = self.tree / "build-dependencies" / "debian" / "packages"
        self.assertEqual(packages.read_text().split(), ["liba-dev", "libb-dev"])

    def test_says_what_cannot_be_downloaded(self):
        result = self.run_script("--unpack", "libabsent-dev")
        self.assertEqual(result.returncode, 1)
        self.assertIn("could not download: libabsent-dev", result.stderr)
        self.assertEqual(self.unpacked(), [])

    def test_does_not_install_what_is_unpacked(self):
        asked = set()
        self.run_script("build")
        for call in self.calls():
            if " install " in f" {call} ":
                asked |= {word for word in call.split() if word.startswith("lib")}
        self.assertIn("libfmt-dev", asked)
        (self.tree / "calls").unlink()

        folder = self.tree / "build-dependencies" / "debian"
        folder.mkdir(parents=True)
        everything = asked | {"g++", "cmake", "ninja-build", "make", "ccache", "python3",
                              "nlohmann-json3-dev", "openmpi-bin"}
        (folder / "packages").write_text("\n".join(everything) + "\n")
        result = self.run_script("build")
        self.assertEqual((result.returncode, result.stdout, self.calls()), (0, "", []))

        (folder / "packages").write_text("\n".join(everything - {"libfmt-dev"}) + "\n")
        self.run_script("build")
        installs = [call for call in self.calls() if " install " in f" {call} "]
        self.assertEqual([call.split()[-1] for call in installs], ["libfmt-dev"])

    def test_readers_that_cannot_be_installed_are_no_error(self):
        for name, text in (("python3", "exit 1\n"), ("pip3", "exit 1\n")):
            (self.tree / "bin" / name).write_text("#!/usr/bin/env bash\n" + text)
            (self.tree / "bin" / name).chmod(0o755)
        result = self.run_script("readers")
        self.assertEqual(result.returncode, 0)
        for version in (4, 5):
            self.assertIn(f"pip could not install transformers {version}", result.stderr)
        self.assertFalse((self.tree / "build-dependencies").exists())


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
