"""What MkDocs is told of the project (mkdocs.yml): the pages that lie outside docs/, and where a link
between files of the repository leads on the site. A link to a file that is no page stays as its text;
one to a file that does not exist ends the build.
"""

import pathlib
import posixpath
import re

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Pages outside docs/: their place on the site.
OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md",
           "LICENSE": "license.md", "fuzz/README.md": "fuzz.md"}
SOURCE_OF = {page: source for source, page in OUTSIDE.items()}

LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def on_files(files, config):
    for source, page in OUTSIDE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        if source == "LICENSE":
            text = "# License\n\n" + text
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    here = page.file.src_uri
    folder = posixpath.dirname(SOURCE_OF.get(here, "docs/" + here))

    def moved(match):
        image, text, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match.group(0)
        path, _, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(folder, path))
        if not (ROOT / path).exists():
            raise PluginError(f"{here}: there is no {path}")
        on_site = OUTSIDE.get(path, path.removeprefix("docs/"))
        if files.get_file_from_path(on_site) is None:
            return text
        link = posixpath.relpath(on_site, posixpath.dirname(here) or ".")
        return f"{image}[{text}]({link}{'#' + anchor if anchor else ''})"

    parts = FENCE.split(markdown)
    return "".join(part if FENCE.fullmatch(part) else LINK.sub(moved, part) for part in parts)
