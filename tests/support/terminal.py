"""A program on a terminal: its standard streams are a pseudo-terminal of a given size, and what it
writes there is kept as a person would see it, scrollback included.

The screen knows what Troupe uses: characters, carriage return, newline, "up N rows" and "erase to the
end of the screen" or line. A character that finds no room in its line begins a new one and is
counted: `wraps` holds the lines to which that happened.
"""

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import termios
import time

from program_runs import command

ESCAPE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")
BEGUN_ESCAPE = re.compile(r"\x1b(\[[0-9;?]*)?$")


class Screen:
    def __init__(self, columns):
        self.columns = columns
        self.rows = [[]]
        self.row = 0
        self.column = 0
        self.wraps = []

    def feed(self, text):
        position = 0
        while position < len(text):
            escape = ESCAPE.match(text, position)
            if escape:
                self.escape(escape.group(1), escape.group(2))
                position = escape.end()
                continue
            self.put(text[position])
            position += 1

    def put(self, character):
        if character == "\r":
            self.column = 0
        elif character == "\n":
            self.next_row()
        elif character == "\x1b":
            raise AssertionError("an escape sequence that the screen does not know")
        else:
            if self.column == self.columns:
                self.wraps.append("".join(self.rows[self.row]))
                self.next_row()
                self.column = 0
            row = self.rows[self.row]
            row.extend(" " * (self.column + 1 - len(row)))
            row[self.column] = character
            self.column += 1

    def next_row(self):
        self.row += 1
        if self.row == len(self.rows):
            self.rows.append([])

    def escape(self, number, letter):
        if letter == "A":
            self.row = max(0, self.row - int(number or 1))
        elif letter == "K" or letter == "J":
            del self.rows[self.row][self.column:]
            if letter == "J":
                del self.rows[self.row + 1:]

    def lines(self):
        return ["".join(row).rstrip() for row in self.rows]

    def text(self):
        return "\n".join(self.lines())


class Terminal:
    """Runs troupe on a terminal to its end. `interrupt_at`: Ctrl-C is typed once the screen holds a
    match of this pattern, which is `seen`. `status` is what a shell would have in $?."""

    def __init__(self, *arguments, columns=80, interrupt_at=None, limit_s=100):
        self.screen = Screen(columns)
        self.seen = None
        child, master = pty.fork()
        if child == 0:
            line = command(*arguments)
            os.execv(line[0], line)
        fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.read(master, interrupt_at, time.monotonic() + limit_s)
        _, wait_status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(wait_status)
        self.status = code if code >= 0 else 128 - code

    @property
    def interrupted(self):
        return self.seen is not None

    def read(self, master, interrupt_at, end):
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        pending = ""
        while time.monotonic() < end:
            if not select.select([master], [], [], 0.1)[0]:
                continue
            try:
                piece = os.read(master, 65536)
            except OSError:  # the program has ended
                break
            if not piece:
                break
            pending += decode(piece)
            whole = BEGUN_ESCAPE.sub("", pending)
            self.screen.feed(whole)
            pending = pending[len(whole):]
            if interrupt_at and not self.seen:
                self.seen = re.search(interrupt_at, self.screen.text(), re.MULTILINE)
                if self.seen:
                    os.write(master, b"\x03")
        else:
            raise AssertionError(f"still running:\n{self.screen.text()}")
        os.close(master)

