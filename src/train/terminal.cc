#include "train/terminal.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <limits>
#include <sys/ioctl.h>
#include <unistd.h>

#include "base/units.h"

namespace troupe {
namespace {

bool starts_character(char byte) {
  return (static_cast<unsigned char>(byte) & 0xC0U) != 0x80U;
}

std::string time_of_day() {
  const std::time_t now = std::time(nullptr);
  std::tm local = {};
  localtime_r(&now, &local);
  return fmt::format("{:%H:%M:%S} ", local);
}

// Appends the line to `text`. Blanks within it stay, since they may align something, except where
// it is broken.
void wrap_line(std::string_view line, size_t columns, size_t indent, std::string& text) {
  const size_t margin = std::min(line.find_first_not_of(' '), line.size());
  text += line.substr(0, margin);
  size_t column = margin;
  bool line_is_empty = true;
  for (size_t at = margin; at < line.size();) {
    const size_t word = line.find_first_not_of(' ', at);
    if (word == std::string_view::npos) break;
    const size_t end = std::min(line.find(' ', word), line.size());
    const size_t width = columns_of(line.substr(word, end - word));
    if (!line_is_empty && column + (word - at) + width > columns) {
      text += '\n' + std::string(margin + indent, ' ');
      column = margin + indent;
      at = word;
    }
    text += line.substr(at, end - at);
    column += word - at + width;
    line_is_empty = false;
    at = end;
  }
}

void write_out(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

}  // namespace

int terminal_columns(int descriptor) {
  if (isatty(descriptor) == 0) return 0;
  winsize size = {};
  if (ioctl(descriptor, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return kDefaultColumns;
  return size.ws_col;
}

size_t columns_of(std::string_view utf8) {
  return static_cast<size_t>(std::count_if(utf8.begin(), utf8.end(), starts_character));
}

std::string fit_to(std::string_view utf8, size_t columns) {
  if (columns_of(utf8) <= columns) return std::string(utf8);
  if (columns == 0) return {};
  size_t end = 0;
  for (size_t characters = 0; end < utf8.size(); ++end) {
    if (starts_character(utf8[end]) && ++characters == columns) break;
  }
  return std::string(utf8.substr(0, end)) + "…";
}

std::string fit_lines(std::string_view utf8, int columns) {
  if (columns <= 0) return std::string(utf8);
  std::string text;
  for (size_t begin = 0; begin < utf8.size();) {
    const size_t end = std::min(utf8.find('\n', begin), utf8.size());
    text += fit_to(utf8.substr(begin, end - begin), static_cast<size_t>(columns));
    if (end < utf8.size()) text += '\n';
    begin = end + 1;
  }
  return text;
}

std::string wrap_words(const std::vector<std::string>& words, size_t columns, size_t first_indent,
                       size_t indent) {
  std::string text(first_indent, ' ');
  size_t column = first_indent;
  bool line_is_empty = true;
  for (const std::string& word : words) {
    const size_t width = columns_of(word);
    if (!line_is_empty && column + 1 + width > columns) {
      text += "\n" + std::string(indent, ' ');
      column = indent;
      line_is_empty = true;
    }
    if (!line_is_empty) {
      text += ' ';
      ++column;
    }
    text += word;
    column += width;
    line_is_empty = false;
  }
  return text;
}

std::string wrap_text(std::string_view utf8, size_t columns, size_t indent) {
  std::string text;
  while (true) {
    const size_t newline = utf8.find('\n');
    const std::string_view line = utf8.substr(0, newline);
    if (columns_of(line) <= columns) {
      text += line;
    } else {
      wrap_line(line, columns, indent, text);
    }
    if (newline == std::string_view::npos) return text;
    text += '\n';
    utf8.remove_prefix(newline + 1);
  }
}

std::string wrap_for_terminal(std::string_view utf8, int descriptor, size_t indent) {
  const int columns = terminal_columns(descriptor);
  return columns > 0 ? wrap_text(utf8, static_cast<size_t>(columns), indent) : std::string(utf8);
}

std::string counted(int64_t count, std::string_view one, std::string_view several) {
  if (count == 1) return fmt::format("1 {}", one);
  return several.empty() ? fmt::format("{} {}s", count, one) : fmt::format("{} {}", count, several);
}

void print_note(std::string_view utf8) {
  std::fprintf(stderr, "%s\n", wrap_for_terminal(utf8, STDERR_FILENO, 2).c_str());
}

std::string block_chart(const std::vector<double>& values, size_t columns) {
  static constexpr const char* kBlocks[] = {" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  constexpr double kHighest = 8;
  const size_t groups = std::min(values.size(), columns);
  double largest = 0;
  for (const double value : values) largest = std::max(largest, value);
  std::string chart;
  for (size_t group = 0; group < groups; ++group) {
    const size_t begin = group * values.size() / groups;
    const size_t end = (group + 1) * values.size() / groups;
    const double value = *std::max_element(values.begin() + static_cast<std::ptrdiff_t>(begin),
                                           values.begin() + static_cast<std::ptrdiff_t>(end));
    const double height = largest > 0 ? std::ceil(kHighest * value / largest) : 0;
    chart += kBlocks[static_cast<size_t>(std::clamp(height, 0.0, kHighest))];
  }
  return chart;
}

std::string format_time_left(double seconds) {
  constexpr double kMinute = 59.5;  // where rounding reaches it
  return (seconds < kMinute ? fmt::format("{:.0f} s", seconds)
                            : format_duration(std::round(seconds))) +
         " left";
}

LiveLine::LiveLine() : on_terminal_(isatty(STDERR_FILENO) != 0) {}

LiveLine::~LiveLine() {
  if (open_columns_ > 0) write_out("\n");
}

size_t LiveLine::columns() const {
  if (!on_terminal_) return std::numeric_limits<size_t>::max();
  // In the last column some terminals wrap already.
  return static_cast<size_t>(std::max(2, terminal_columns(STDERR_FILENO)) - 1);
}

// A window that became narrower shows the live line in several rows.
std::string LiveLine::erase() const {
  if (open_columns_ == 0) return {};
  const size_t rows = (open_columns_ - 1) / (columns() + 1);
  return (rows > 0 ? fmt::format("\x1b[{}A", rows) : std::string()) + "\r\x1b[J";
}

void LiveLine::stay(std::string_view text) {
  if (on_terminal_) {
    write_out(erase() + wrap_text(text, columns(), 2) + "\n");
  } else {
    const bool is_block = text.find('\n') != std::string_view::npos;
    write_out((is_block ? std::string() : time_of_day()) + std::string(text) + "\n");
  }
  open_columns_ = 0;
}

void LiveLine::live(std::string_view text) {
  if (!on_terminal_) return;
  const std::string line = fit_to(text, columns());
  write_out(erase() + line);
  open_columns_ = columns_of(line);
}

void LiveLine::clear() {
  write_out(erase());
  open_columns_ = 0;
}

}  // namespace troupe
