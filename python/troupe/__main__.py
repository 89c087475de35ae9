"""The command `troupe` of the wheel, and python -m troupe: becomes the program."""

import os
import sys

from .program import program_path


def main() -> None:
    program = program_path()
    os.execv(program, ["troupe", *sys.argv[1:]])


if __name__ == "__main__":
    main()
