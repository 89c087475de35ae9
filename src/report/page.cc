#include "report/page.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <fmt/format.h>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "io/file.h"
#include "options/options.h"
#include "report/page_files.h"

namespace troupe {
namespace {

std::string_view command_of(PageKind kind) {
  return info_of(kind == PageKind::runs ? Command::report : Command::inspect).name;
}

// How a page of this kind begins.
std::string beginning_of(PageKind kind) {
  return fmt::format("<!doctype html>\n<!-- A page of troupe {}", command_of(kind));
}

std::string escape_html(std::string_view text) {
  std::string escaped;
  for (const char c : text) {
    switch (c) {
      case '&':
        escaped += "&amp;";
        break;
      case '<':
        escaped += "&lt;";
        break;
      case '>':
        escaped += "&gt;";
        break;
      default:
        escaped += c;
    }
  }
  return escaped;
}

// JSON that may stand in an element of a page: nothing in it ends the element.
std::string json_for_page(const nlohmann::ordered_json& data) {
  const std::string text = data.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  std::string escaped;
  escaped.reserve(text.size());
  for (const char c : text) {
    if (c == '<') {
      escaped += "\\u003c";
    } else {
      escaped += c;
    }
  }
  return escaped;
}

}  // namespace

std::string make_page(PageKind kind, const std::string& title, const nlohmann::ordered_json& data) {
  const std::string escaped_title = escape_html(title);
  const std::string json = json_for_page(data);
  const std::array<std::pair<std::string_view, std::string_view>, 7> places = {{
      {"@COMMAND@", command_of(kind)},
      {"@TITLE@", escaped_title},
      {"@STYLE@", kPageStyle},
      {"@DATA@", json},
      {"@LIBRARY@", kChartLibrary},
      {"@SCRIPT@", kPageScript},
      {"@PAGE_SCRIPT@", kind == PageKind::runs ? kRunPageScript : kStepPageScript},
  }};
  std::string page;
  std::string_view rest = kPageHtml;
  while (!rest.empty()) {
    size_t at = std::string_view::npos;
    const std::pair<std::string_view, std::string_view>* found = nullptr;
    for (const auto& place : places) {
      const size_t position = rest.find(place.first);
      if (position < at) {
        at = position;
        found = &place;
      }
    }
    page += rest.substr(0, at);
    if (found == nullptr) break;
    page += found->second;
    rest.remove_prefix(at + found->first.size());
  }
  return page;
}

void check_page_path(PageKind kind, const std::string& path, const std::string& flag) {
  if (!path_exists(path)) {
    std::error_code error;
    const std::string folder = parent_path(path);
    if (std::filesystem::is_directory(folder, error)) return;
    throw_bad_request(
        fmt::format("{0} {1}: there is no folder {2} to write into.", flag, path, folder));
  }
  const std::string beginning = beginning_of(kind);
  std::string found(beginning.size(), '\0');
  std::ifstream file(path, std::ios::binary);
  file.read(found.data(), static_cast<std::streamsize>(found.size()));
  if (found == beginning) return;
  throw_bad_request(fmt::format(
      "{0} {1}: this is there already and is no page of troupe {2}; nothing was written. Give "
      "another name with {0} FILE.",
      flag, path, command_of(kind)));
}

void write_page(PageKind kind, const std::string& path, const std::string& flag,
                const std::string& page) {
  check_page_path(kind, path, flag);
  const Disk disk;
  const std::string temporary = path + ".tmp";
  disk.write_file(temporary, page);
  disk.rename(temporary, path);
}

}  // namespace troupe
