"""What mkdocs does beyond rendering docs/.

What pages link to outside of docs/ becomes part of the site, below repository/; a docstring's
`Example` is shown as code, and the fields of a NamedTuple with their types.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
HOME = "repository"
LINK = re.compile(r"(\]\()(?!https?:)([^)#\s]+)")
"""A Markdown link up to its anchor."""


def find_target(page: str, link: str) -> str:
    """The path from the repository's root that a link leads to; `page` is in docs/ or HOME."""
    home = page.removeprefix(HOME + "/") if page.startswith(HOME + "/") else f"docs/{page}"
    return posixpath.normpath(posixpath.join(posixpath.dirname(home), link))


def on_files(files: Files, config: Any) -> Files:
    """Add the files outside of docs/ that pages link to, and those that such pages link to."""
    known = {f"docs/{file.src_uri}" for file in files}
    pages = [file.src_uri for file in files if file.src_uri.endswith(".md")]
    while pages:
        page = pages.pop()
        path = find_target(page, posixpath.basename(page))
        for _, link in LINK.findall((ROOT / path).read_text("utf-8")):
            target = find_target(page, link)
            if target not in known and not target.startswith("docs/") and (ROOT / target).is_file():
                known.add(target)
                uri = f"{HOME}/{target}"
                files.append(File.generated(config, uri, abs_src_path=str(ROOT / target)))
                pages += [uri] if target.endswith(".md") else []
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Let links into and out of HOME lead to where their targets are on the site."""
    here = page.file.src_uri

    def lead(match: re.Match[str]) -> str:
        target = find_target(here, match[2])
        uri = target.removeprefix("docs/") if target.startswith("docs/") else f"{HOME}/{target}"
        if files.get_file_from_path(uri) is None:
            return match[0]
        return match[1] + posixpath.relpath(uri, posixpath.dirname(here) or ".")

    return LINK.sub(lead, markdown)


class Sections(griffe.Extension):
    """Sections by the names that griffe knows: code, and the fields of a class without `__init__`.

    griffe finds the types of such fields only if they are called attributes.
    """

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rename the sections, before the docstring is parsed."""
        if obj.docstring:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            if obj.is_class and "__init__" not in obj.members:
                text = re.sub(r"^Args:$", "Attributes:", text, flags=re.MULTILINE)
            obj.docstring.value = text
