"""Reads and writes YAML for config files: numbers as in YAML 1.2, and no key twice in a mapping."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from lockstep.core.errors import one_line

_MERGED = "tag:yaml.org,2002:merge"
_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_NUMBERS = (
    (_INT, re.compile(r"[-+]?(?:[0-9][0-9_]*|0b[01_]+|0o[0-7_]+|0x[0-9a-fA-F_]+)$"), "-+0123456789"),
    (
        _FLOAT,
        re.compile(
            r"(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]{1,3})?"
            r"|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]{1,3}|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        "-+0123456789.",
    ),
)
"""``1e-3`` is a number and ``2:8`` a text; PyYAML, which follows YAML 1.1, reads a text and 128."""


def check_once(keys: Sequence[str], where: str = "") -> None:
    """Raises a one-line ``ValueError`` if a mapping has a key twice, where parsers would take the last one."""
    twice = next((key for number, key in enumerate(keys) if key in keys[:number]), None)
    if twice is not None:
        raise ValueError(f"{twice} stands twice in one mapping{where}; put it together, or leave one out")


def read_yaml(text: str) -> Any:
    """Parses YAML safely: nothing in it is executed.

    Raises:
        ValueError: it isn't valid YAML, or a mapping has a key twice; one line.
    """
    import yaml

    try:
        return _loader()(text).get_single_data()
    except yaml.YAMLError as error:
        raise ValueError(one_line(error).replace(' in "<unicode string>",', " in")) from None


def write_yaml(values: Any) -> str:
    """Writes YAML that :func:`read_yaml` and other parsers read as the same values."""
    import yaml

    return yaml.dump(values, Dumper=_dumper(), sort_keys=False, default_flow_style=None)


@functools.cache
def _loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses a key that stands twice, and reads numbers as YAML 1.2 does."""

        yaml_implicit_resolvers: ClassVar = {
            first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_INT, _FLOAT)]
            for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
            node = super().compose_mapping_node(anchor)
            written = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.tag != _MERGED]
            check_once(written, f" (from line {node.start_mark.line + 1} on)")
            return node

        def whole(self, node: Any) -> int:
            text = self.construct_scalar(node).replace("_", "")
            return int(text, 0 if re.match("[-+]?0[box]", text) else 10)

    for tag, pattern, first in _NUMBERS:
        Loader.add_implicit_resolver(tag, pattern, list(first))
    Loader.add_constructor(_INT, Loader.whole)
    return Loader


@functools.cache
def _dumper() -> Any:
    import yaml

    class Dumper(yaml.SafeDumper):
        """Quotes texts that YAML 1.1 or 1.2 would read as numbers."""

    for tag, pattern, first in _NUMBERS:
        Dumper.add_implicit_resolver(tag, pattern, list(first))
    return Dumper
