// Pages hold what they are given, whatever it is, and are written over no other file.
#include "report/page.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "report/page_files.h"
#include "support/errors.h"
#include "support/files.h"

namespace troupe::testing {
namespace {

// The text of `page` between two others.
std::string between(const std::string& page, const std::string& begin, const std::string& end) {
  const size_t from = page.find(begin);
  if (from == std::string::npos) return "no " + begin;
  const size_t to = page.find(end, from + begin.size());
  return page.substr(from + begin.size(), to - from - begin.size());
}

TEST(Page, TitlesAndDataStayWhatTheyAre) {
  const std::string title = "a <b> & \"c\" @DATA@";
  const std::string page = make_page(PageKind::runs, title, {{"<x>", "@TITLE@ & </script>"}});
  EXPECT_EQ(between(page, "<title>", "</title>"), "a &lt;b&gt; &amp; \"c\" @DATA@");
  EXPECT_NE(page.find("{\"\\u003cx>\":\"@TITLE@ & \\u003c/script>\"}"), std::string::npos);
  EXPECT_TRUE(page.starts_with("<!doctype html>\n<!-- A page of troupe report"));
  EXPECT_TRUE(page.ends_with("</html>\n")) << page.substr(page.size() - 40);
  EXPECT_TRUE(make_page(PageKind::step, title, {})
                  .starts_with("<!doctype html>\n<!-- A page of troupe inspect"));
  for (const char* place : {"@COMMAND@", "@STYLE@", "@LIBRARY@", "@SCRIPT@", "@PAGE_SCRIPT@"}) {
    EXPECT_EQ(page.find(place), std::string::npos) << place;
  }
}

// Each place of the page's file holds what it is for, and all else stays as it is there.
TEST(Page, IsItsFileWithEachPlaceFilled) {
  const auto expected = [](const std::string& command, std::string_view script) {
    std::string page(kPageHtml);
    for (const auto& [place, text] :
         std::vector<std::pair<std::string, std::string_view>>{{"@COMMAND@", command},
                                                               {"@TITLE@", "title"},
                                                               {"@STYLE@", kPageStyle},
                                                               {"@DATA@", "{\"a\":1}"},
                                                               {"@LIBRARY@", kChartLibrary},
                                                               {"@SCRIPT@", kPageScript},
                                                               {"@PAGE_SCRIPT@", script}}) {
      size_t at = 0;
      while ((at = page.find(place, at)) != std::string::npos) {
        page.replace(at, place.size(), text);
        at += text.size();
      }
    }
    return page;
  };
  EXPECT_TRUE(make_page(PageKind::runs, "title", {{"a", 1}}) == expected("report", kRunPageScript));
  EXPECT_TRUE(make_page(PageKind::step, "title", {{"a", 1}}) ==
              expected("inspect", kStepPageScript));
  EXPECT_NE(kRunPageScript, kStepPageScript);
}

TEST(Page, IsWrittenOverAPageOfItsKindAlone) {
  const TempFolder folder;
  const std::string path = folder / "page.html";
  const std::string page = make_page(PageKind::runs, "first", {});
  write_page(PageKind::runs, path, "--output", page);
  EXPECT_EQ(get_file(path), page);
  const std::string second = make_page(PageKind::runs, "second", {});
  write_page(PageKind::runs, path, "--output", second);
  EXPECT_EQ(get_file(path), second);
  EXPECT_EQ(folder.files(), std::vector<std::string>{"page.html"});
  EXPECT_EQ(
      message_of(ExitStatus::bad_request,
                 [&] { write_page(PageKind::step, path, "--html", page); }),
      "--html " + path +
          ": this is there already and is no page of troupe inspect; nothing was written. Give "
          "another name with --html FILE.");
  EXPECT_EQ(get_file(path), second);
  // What is shorter than the beginning of a page, or differs in its last letter.
  const std::string beginning = "<!doctype html>\n<!-- A page of troupe report";
  for (const std::string& other : {std::string(), beginning.substr(0, beginning.size() - 1),
                                   beginning.substr(0, beginning.size() - 1) + "d"}) {
    put_file(path, other);
    expect_phrase(message_of(ExitStatus::bad_request,
                             [&] { check_page_path(PageKind::runs, path, "--output"); }),
                  "is no page of troupe report");
  }
  put_file(path, beginning);
  check_page_path(PageKind::runs, path, "--output");
  EXPECT_EQ(message_of(ExitStatus::bad_request,
                       [&] { check_page_path(PageKind::runs, folder / "no/x.html", "--output"); }),
            "--output " + (folder / "no/x.html") + ": there is no folder " + (folder / "no") +
                " to write into.");
}

}  // namespace
}  // namespace troupe::testing
