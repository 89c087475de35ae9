#!/usr/bin/env python3
"""The recipes for container images (packaging) agree with the sources and with each other. They are
not built here: that needs an engine and a network.

Usage: containers_test.py TROUPE SOURCE_FOLDER
"""

import pathlib
import re
import subprocess
import sys
import unittest

SOURCE = pathlib.Path(__file__).parents[2]
CONTAINERFILE = (SOURCE / "packaging/Containerfile").read_text()
APPTAINER = (SOURCE / "packaging/troupe.def").read_text()


def copied_by_containerfile():
    """Files and folders of the sources, and where in /src they go."""
    for words in re.findall(r"(?m)^COPY (?!--)(.*)$", CONTAINERFILE):
        *sources, target = words.split()
        for each in sources:
            yield each, "." if target == "./" else target


def copied_by_apptainer():
    files = re.search(r"(?ms)^%files\n(.*?)\n\n", APPTAINER)[1]
    for line in files.splitlines():
        source, target = line.split()
        assert target == f"/src/{source}", line
        yield source


class Recipes(unittest.TestCase):
    def test_they_copy_the_same_and_it_exists(self):
        copied = dict(copied_by_containerfile())
        self.assertEqual(sorted(copied), sorted(copied_by_apptainer()))
        for name, target in copied.items():
            path = SOURCE / name
            self.assertTrue(path.exists(), name)
            self.assertEqual(target, name if path.is_dir() else ".")

    def test_what_a_build_reads_is_copied(self):
        """Folders that CMake files and the scripts of a build name."""
        copied = dict(copied_by_containerfile())
        named = re.findall(r"\$\{PROJECT_SOURCE_DIR\}/(\w+)", "\n".join(
            path.read_text() for path in [SOURCE / "CMakeLists.txt",
                                          *(SOURCE / "cmake").glob("*.cmake")]))
        self.assertIn("configs", named)
        self.assertEqual({name for name in named if (SOURCE / name).exists()} - set(copied), set())

    def test_both_stages_begin_with_the_same_images(self):
        images = re.findall(r"(?m)^ARG (\w+)_IMAGE=(?:docker\.io/)?(\S+)$", CONTAINERFILE)
        self.assertEqual([name for name, _ in images], ["BUILD", "RUN"])
        for name, image in images:
            self.assertIn(f"\n    {name.lower()}_image={image}\n", APPTAINER)

    def test_the_script_is_one_for_bash(self):
        script = SOURCE / "packaging/build_tree.sh"
        for recipe in (CONTAINERFILE, APPTAINER):
            self.assertRegex(recipe, r" ARCH='?[${} a-zA-Z]+'? bash [/a-z]*/build_tree\.sh /opt/troupe\n")
        done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stderr), (0, ""))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
