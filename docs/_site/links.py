"""A hook of MkDocs: links from the documents to files of the repository beside them.

In the repository, documents link to programs, tests and pages above ``docs/``, and a reader follows
these links in the repository's browser. On the site there are no such files: they are links to the
repository.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"\]\((\.\./[^)\s]*)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Let links out of ``docs/`` lead to the repository."""
    folder = posixpath.dirname(page.file.src_uri)

    def outside(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[1]))
        if not target.startswith("../"):
            return link[0]
        return f"]({config.repo_url}/blob/main/{target.removeprefix('../')})"

    return _LINK.sub(outside, markdown)
