"""Sphinx settings. Build with ``python -m sphinx -W -n docs docs/_build``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import latex2mathml.converter
from docutils import nodes

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import messages  # noqa: E402  (needs the path above)

from graphpipe import __version__  # noqa: E402

project = "GraphPipe"
author = "The GraphPipe authors"
copyright = "The GraphPipe authors, Apache-2.0"
release = __version__
version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
]
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "pictures/README.md"]

html_math_renderer = "mathml"
html_theme = "furo"
html_title = f"GraphPipe {release}"
html_show_sphinx = False

nitpicky = True
# Types of other projects have no pages here, and aliases of types none of their own; what has
# "graphpipe." in its name must be found.
nitpick_ignore_regex = [(r"py:.*", r"(?!graphpipe\b).*")]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_default_options = {
    "members": True,
    "undoc-members": False,
    # pydantic adds these to every record.
    "exclude-members": "model_config, model_post_init, file_kind, file_version",
}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True


def _write_message_index(app: object) -> None:
    """The index of messages is made from the sources, so that it is complete."""
    target = HERE / "_build" / "generated"
    target.mkdir(parents=True, exist_ok=True)
    (target / "messages.txt").write_text(messages.index(HERE.parent / "src"), encoding="utf-8")


def _formula(display: str) -> Any:
    """Writes formulas as MathML, which browsers draw themselves, without a connection."""

    def visit(translator: Any, node: nodes.Element) -> None:
        translator.body.append(latex2mathml.converter.convert(node.astext(), display=display))
        raise nodes.SkipNode

    return (visit, None)


def _attributes_have_no_type_line(
    app: object, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Keeps napoleon from reading "Ranks of a run: every device" as "type: description"."""
    if what in ("attribute", "data", "property") and lines:
        lines.insert(0, "")


def _types_may_be_internal(app: object, domain: Any, node: nodes.Element) -> bool | None:
    """A type in a signature may be of a module without a page; a reference in prose may not."""
    in_prose = bool(node.children) and isinstance(node.children[0], nodes.literal)
    return None if in_prose else (domain is not None and domain.name == "py") or None


def setup(app: Any) -> None:
    app.add_html_math_renderer("mathml", _formula("inline"), _formula("block"))
    app.connect("builder-inited", _write_message_index)
    app.connect("warn-missing-reference", _types_may_be_internal)
    app.connect("autodoc-process-docstring", _attributes_have_no_type_line, priority=100)
