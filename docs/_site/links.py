"""A hook of MkDocs: links from the documents to files of the repository beside them.

In the repository, documents link to programs, tests and pages above ``docs/``, and a reader follows
these links in the repository's browser. On the site there are no such files: they are links to the
repository.
"""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"\]\(\.\./([^)\s]*)\)")


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    """Let links out of ``docs/`` lead to the repository."""
    return _OUTSIDE.sub(rf"]({config.repo_url}/blob/main/\1)", markdown)
