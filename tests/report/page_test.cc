// Pages hold what they are given, whatever it is, and are written over no other file.
#include "report/page.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

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
  EXPECT_EQ(message_of(ExitStatus::bad_request,
                       [&] { check_page_path(PageKind::runs, folder / "no/x.html", "--output"); }),
            "--output " + (folder / "no/x.html") + ": there is no folder " + (folder / "no") +
                " to write into.");
}

}  // namespace
}  // namespace troupe::testing
