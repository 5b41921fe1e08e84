"""Settings of the documentation as a site: Sphinx with Furo reads the Markdown pages of ``docs/`` (``make docs``)."""

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import links  # noqa: E402
import pages  # noqa: E402
from pages import ROOT, SOURCE_ON_GITHUB  # noqa: E402

import lockstep  # noqa: E402

project = "Lockstep"
author = "The Lockstep authors"
project_copyright = author
version = release = lockstep.__version__
language = "en"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.linkcode",
    "sphinx_copybutton",
]
root_doc = "index"
exclude_patterns = ["_site"]
highlight_language = "none"

myst_heading_anchors = 4
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(?!lockstep\.).*"),
    ("py:class", r"lockstep\..*"),
    ("py:meth", r"lockstep\.jax_engine\..*"),
]
"""Types of other libraries have no page here, nor have classes that only annotations name, nor the engine's methods."""

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autoclass_content = "class"
python_maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = f"Lockstep {release}"
html_baseurl = "https://lockstep-rl.github.io/lockstep/"
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_search_scorer = str(HERE / "scorer.js")
html_theme_options = {
    "source_repository": "https://github.com/lockstep-rl/lockstep/",
    "source_branch": "main",
    "source_directory": "docs/",
}


def linkcode_resolve(domain: str, info: dict[str, str]) -> str | None:
    """The lines on GitHub where an object of the API is defined; None for what isn't code of ours."""
    if domain != "py" or not info["module"]:
        return None
    found: Any = importlib.import_module(info["module"])
    try:
        for name in info["fullname"].split("."):
            found = getattr(found, name)
        found = inspect.unwrap(getattr(found, "fget", found))
        file = Path(inspect.getsourcefile(found) or "").resolve()
        lines, first = inspect.getsourcelines(found)
    except (AttributeError, TypeError, OSError):
        return None
    if not file.is_relative_to(ROOT):
        return None
    return f"{SOURCE_ON_GITHUB}/{file.relative_to(ROOT).as_posix()}#L{first}-L{first + len(lines) - 1}"


def setup(app: Any) -> None:
    """Connects what stands in the two files beside this one."""
    app.connect("source-read", pages.read)
    app.connect("build-finished", links.check)
