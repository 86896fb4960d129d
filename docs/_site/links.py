"""Hooks of MkDocs: links that are right in the repository, and would be wrong on the site.

In the repository, documents link to programs, tests and pages above ``docs/``, and a reader follows
these links in the repository's browser. On the site there are no such files: they are links to the
repository. The index for language models links to the pages' sources, which the site does not
have either: there it links to the pages.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\]\((\.\./[^)\s]*)\)")
_PAGE = re.compile(r"\]\(([\w/-]+)\.md\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Let links out of ``docs/`` lead to the repository."""
    folder = posixpath.dirname(page.file.src_uri)

    def outside(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[1]))
        if not target.startswith("../"):
            return link[0]
        return f"]({config.repo_url}/blob/main/{target.removeprefix('../')})"

    return _LINK.sub(outside, markdown)


def on_post_build(config: Any, **_: Any) -> None:
    """Let the index for language models link to the pages of the site, by their whole addresses."""
    index = Path(config.site_dir, "llms.txt")
    text = index.read_text(encoding="utf-8")
    index.write_text(_PAGE.sub(rf"]({config.site_url.rstrip('/')}/\1/)", text), encoding="utf-8")
