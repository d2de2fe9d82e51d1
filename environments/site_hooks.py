"""What the site's pages need beside their text: the pages of benchmarks/, and links as they are in the site.

mkdocs.yml names this file; MkDocs calls the two functions. In the tree, benchmarks/ stands beside docs/; in the site it
is below the other pages. A link to a file of the source becomes its text, for the site has none; a link whose text is a
page's file name gets the page's title.
"""

import re
from functools import cache
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
TO_SOURCE = re.compile(r"\[([^\]]*)\]\((?:\.\./)+(?!benchmarks/|docs/)[^)]*\)")
NAMED_BY_FILE = re.compile(r"\[`?(?:[\w.]+/)*\w+\.md`?\]\(([^)#]+\.md)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page in sorted((ROOT / "benchmarks").rglob("*.md")):
        files.append(File.generated(config, page.relative_to(ROOT).as_posix(), abs_src_path=str(page)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    source = Path(page.file.abs_src_path or "")
    markdown = NAMED_BY_FILE.sub(lambda link: write_link(source.parent / link[1], link), markdown)
    markdown = TO_SOURCE.sub(r"\1", markdown)
    if page.file.src_uri.startswith("benchmarks/"):
        return re.sub(r"\]\(((?:\.\./)+)docs/", r"](\1", markdown)
    return markdown.replace("](../benchmarks/", "](benchmarks/")


def write_link(to: Path, link: re.Match[str]) -> str:
    return f"[{read_title(to)}]({link[1]}{link[2] or ''})" if to.is_file() else link[0]


@cache
def read_title(page: Path) -> str:
    return re.search(r"^# (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)[1]
