// What a person reads on standard error while a command works: lines that stay, and below them one
// live line that is rewritten in place.
//
// Where standard error is a terminal, its width is asked before every line, so that a window that
// changes its size is followed; no line is wider than it. Elsewhere (a file, a pipe) there is no
// live line, and each line that stays begins with the time of day; a table of several lines stands
// as it is. Functions of text are pure; a LiveLine belongs to one thread. Nothing here fails: what
// cannot be written is lost.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace troupe {

// The width of texts where the terminal does not say how wide it is.
inline constexpr int kDefaultColumns = 80;

// Columns of the terminal of this descriptor, as it is now; 0: it is no terminal.
int terminal_columns(int descriptor);

// How many columns a text takes: its characters, each of which is one column wide.
size_t columns_of(std::string_view utf8);

// The beginning of the text that fits; "…" at its end says that some is missing.
std::string fit_to(std::string_view utf8, size_t columns);

// fit_to() for each line; `columns` as terminal_columns() says, so 0 cuts nothing.
std::string fit_lines(std::string_view utf8, int columns);

// Lines broken at blanks, so that none is wider than `columns` unless one word is. Lines after the
// first begin with `indent` blanks. No newline at the end.
std::string wrap_text(std::string_view utf8, size_t columns, size_t indent);

// wrap_text() for the terminal of this descriptor; as it stands where that is none.
std::string wrap_for_terminal(std::string_view utf8, int descriptor, size_t indent);

// "1 document", "2 documents"; `several` where that is not one letter more.
std::string counted(int64_t count, std::string_view one, std::string_view several = {});

// A note or a warning on standard error, wrapped for its terminal, with a newline.
void print_note(std::string_view utf8);

// wrap_text() for words that must not be broken, such as a flag with its value.
std::string wrap_words(const std::vector<std::string>& words, size_t columns, size_t first_indent,
                       size_t indent);

// "▁▂▃▄▅▆▇█", one block for each of at most `columns` groups of neighbouring values, as high as the
// largest value of the group. The highest block is the largest value of all. Zeros are blanks.
std::string block_chart(const std::vector<double>& values, size_t columns);

// "12 s left", "3 min 05 s left".
std::string format_time_left(double seconds);

class LiveLine {
 public:
  LiveLine();
  // Leaves the live line on the screen, complete.
  ~LiveLine();
  LiveLine(const LiveLine&) = delete;
  LiveLine& operator=(const LiveLine&) = delete;

  bool on_terminal() const { return on_terminal_; }
  // For texts that are made to fit: of the terminal now, or without one enough for anything.
  size_t columns() const;

  // A line that stays, broken at blanks where the terminal is too narrow. It takes the place of the
  // live line.
  void stay(std::string_view text);
  // The live line, cut to the terminal's width. Nothing without a terminal.
  void live(std::string_view text);
  // Takes the live line away.
  void clear();

 private:
  std::string erase() const;

  bool on_terminal_;
  size_t open_columns_ = 0;  // of the live line on the screen; 0: there is none
};

}  // namespace troupe
