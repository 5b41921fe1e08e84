"""Turns pages that read well on GitHub into pages of the site, before Sphinx parses them.

What only the site has is made of what the Markdown says anyway: the navigation of the lists of an index, the signatures
of an API page of its tables of names, and addresses on GitHub of relative links that leave ``docs/``; and the tables of
settings of the texts that ``lockstep train --help-all`` prints.
"""

import importlib
import os
import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
ON_GITHUB = "https://github.com/lockstep-rl/lockstep"
SOURCE_ON_GITHUB = f"{ON_GITHUB}/blob/main"

FENCED = re.compile(r"(^```.*?^```\n)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
TO_PAGE = re.compile(r"\[([^\]]+)\]\(([\w./-]+)\.md\)")
NAMES_OF = re.compile(r"<!-- names of (lockstep[\w.]*) -->")
SETTINGS_HERE = "<!-- settings of lockstep train -->\n"
"""What follows stands on GitHub alone."""
WRITTEN = re.compile(r"--[a-z][\w.-]*\w|\b[a-z]+[._][a-z]\w*(?:\.\w+)*")
"""Options and settings in a text, which stay as they are."""
NAME = re.compile(r"^\| \[`([\w.]+)`\]\(([^)]+)\)", re.MULTILINE)

INDICES = ("index", "decisions/README")
"""Pages whose links are the navigation."""


def read(app: Any, name: str, source: list[str]) -> None:
    """Changes the text of a page before it is parsed; Sphinx's event ``source-read``."""
    from sphinx.util import logging

    warn = logging.getLogger(__name__).warning
    source[0] = page_of_site(name, source[0], lambda said: warn(said, location=name))


def page_of_site(name: str, text: str, warn: Callable[[str], object]) -> str:
    """The text of a page of the site.

    Args:
        name: the page's path in ``docs/``, without its ending.
        text: the page as it is on GitHub.
        warn: takes a line about what is wrong with it.
    """
    if module := NAMES_OF.search(text):
        text = with_signatures(text, module[1], warn)
    if SETTINGS_HERE in text:
        text = text.partition(SETTINGS_HERE)[0] + tables_of_settings(warn)
    if name in INDICES:
        text = with_navigation(text)
    folder = posixpath.dirname(name)
    parts = FENCED.split(text)
    parts[::2] = [LINK.sub(lambda link: "](" + target(link[2], folder, warn) + ")", part) for part in parts[::2]]
    return "".join(parts)


def target(link: str, folder: str, warn: Callable[[str], object]) -> str:
    """A link's address in the site: what leaves ``docs/`` is looked at on GitHub."""
    if re.match(r"[a-z]+:|#", link):
        return link
    path, _, anchor = link.partition("#")
    file = Path(os.path.normpath(DOCS / folder / path))
    if not file.exists():
        warn(f"a link leads to nothing: {link}")
    if file.is_relative_to(DOCS) and file.is_file():
        return link
    kind = "tree" if file.is_dir() else "blob"
    return f"{ON_GITHUB}/{kind}/main/{file.relative_to(ROOT).as_posix()}" + (f"#{anchor}" if anchor else "")


def with_navigation(text: str) -> str:
    """An index and, hidden, a table of contents of the pages that each of its sections links to."""
    start, *rest = HEADING.split(text)
    out, seen = [start], set()
    for title, body in zip(rest[::2], rest[1::2], strict=True):
        found = [(label, path) for label, path in TO_PAGE.findall(body) if not path.startswith("../")]
        fresh = [(label, path) for label, path in dict.fromkeys(found) if path not in seen]
        seen |= {path for _, path in fresh}
        lines = "\n".join(f"{label.replace('`', '')} <{path}>" for label, path in fresh)
        contents = f"```{{toctree}}\n:hidden:\n:caption: {title}\n\n{lines}\n```\n\n" if fresh else ""
        out.append(f"## {title}{body.rstrip()}\n\n{contents}")
    return "".join(out)


def with_signatures(text: str, module: str, warn: Callable[[str], object]) -> str:
    """An API page whose tables lead to signatures and docstrings, which follow each table.

    Args:
        text: the page; the first cell of a table's row is a name of the module, with a link to its file.
        module: whose public names the page lists.
        warn: takes a line about what is wrong with it.
    """
    public = importlib.import_module(module)
    missing = public_names(public) - {name for name, _ in NAME.findall(text)}
    if missing:
        warn(f"{module} has public names that the page doesn't list: {', '.join(sorted(missing))}")

    def whole(name: str) -> str:
        return name if "." in name else f"{module}.{name}"

    out = []
    for block in re.split(r"(?<=\|\n)(?=\n|\Z)", text):
        names = [name for name, _ in NAME.findall(block)]
        out.append(NAME.sub(lambda row: f"| {{py:obj}}`{row[1].rpartition('.')[2]} <{whole(row[1])}>`", block))
        out += [directive(whole(name)) for name in names]
    return "".join(out)


def tables_of_settings(warn: Callable[[str], object]) -> str:
    """A section for each of the config, with a table of its settings: key, type, meaning with the default.

    ``warn`` takes a line about a setting that says nothing of itself.
    """
    from lockstep.config.help import by_section, meaning_of
    from lockstep.config.run import Config, RunOptions

    out, config, options = [], Config(), RunOptions()
    for name, leaves in by_section().items():
        of_runs = [leaf for leaf in leaves if leaf.path in RunOptions.model_fields]
        of_config = [leaf for leaf in leaves if leaf not in of_runs]
        heads = [("Of the run itself", of_config), ("Of the command", of_runs)] if not name else [(f"`{name}`", leaves)]
        for head, listed in heads:
            out += [f"## {head}", "", escaped(listed[0].about), "", "| setting | type | |", "|---|---|---|"]
            for leaf in listed:
                if not leaf.description:
                    warn(f"the setting {leaf.path} has no description")
                kind = "true or false" if leaf.kind == "flag" else f"`{leaf.type}`".replace("|", "\\|")
                out.append(f"| `{leaf.path}` | {kind} | {escaped(meaning_of(leaf, config, options))} |")
            out.append("")
    return "\n".join(out)


def escaped(text: str) -> str:
    """A text in Markdown, with options and settings in it as code."""
    parts = re.split(f"({WRITTEN.pattern})", text)
    parts[::2] = [re.sub(r"([\\`*_{}\[\]<>|$])", r"\\\1", part) for part in parts[::2]]
    parts[1::2] = [f"`{part}`" for part in parts[1::2]]
    return "".join(parts)


def public_names(module: Any) -> set[str]:
    """What a module offers: its ``__all__``, or what its ``__dir__`` says."""
    return {name for name in getattr(module, "__all__", dir(module)) if not name.startswith("_")}


def directive(name: str) -> str:
    """What has Sphinx write the signature and docstring of a name such as ``lockstep.train``."""
    module, _, attribute = name.rpartition(".")
    found = getattr(importlib.import_module(module), attribute)
    kind, options = ("autofunction" if callable(found) else "autodata"), ""
    if isinstance(found, type):
        kind, options = "autoclass", "   :members:\n   :special-members: __call__\n"
    return f"\n```{{eval-rst}}\n.. {kind}:: {name}\n{options}```\n"
