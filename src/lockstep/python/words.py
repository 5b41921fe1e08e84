"""Rewrites error messages that name command-line options so that they name arguments in Python."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from lockstep.config.keys import LEAVES, Leaf

OPTION = re.compile(r"--([a-z]+(?:[.-][a-z]+)*)")
COMMAND = re.compile(r"lockstep (?!train\b)[a-z]+ [^,;()]*$")
"""Matches text that ends within another command; the options of such a command aren't rewritten."""
NAME = re.compile(r"[\w./-]*[./\d-][\w./-]*|[A-Z]+")
"""Matches a path or a name: a word with a digit, ``.``, ``/`` or ``-``, or in capitals; others are prose."""
VALUE = re.compile(r"(?P<value>\d+-\d+|-?[\d._]+(?:e-?\d+)?|true|false|none|auto|max|[A-Z]+|[\w.]+:\w+)\b")
NAMED = ("resume", "name", "runs_dir", "env.id", "checkpoint.mirror")
LITERALS = {"true": "True", "false": "False", "none": "None"}
METHODS = re.compile(r"^(?:argument )?--(checkpoint|episodes|onnx|seed|torch)\b:? ")
"""Matches a refused option at the start of a message, if the method that was called has an argument of that name."""
USAGE = re.compile(r" \(lockstep [a-z]+ --help\)$")
SAME_SECTION = re.compile(r"\b(\w+)=dict\(([^()]*)\) \1=dict\(")


def in_python(message: str) -> str:
    """Rewrites a message's options as arguments of ``lockstep.train``: ``--ppo.gamma 1`` as ``ppo=dict(gamma=1)``.

    Options of other commands stay as they are.
    """
    said, at = "", 0
    while (option := OPTION.search(message, at)) is not None:
        said += message[at : option.start()]
        at = option.end()
        leaf, on = _leaf_of(option[1])
        if leaf is None or COMMAND.search(message[: option.start()]):
            said += option[0]
            continue
        values = [str(on)] if leaf.kind == "flag" else []
        while leaf.kind != "flag" and (not values or leaf.kind == "list"):
            found = _value_at(message, at, leaf)
            if found is None:
                break
            values.append(_literal(found))
            at += 1 + len(found)
        value = ", ".join(values) or "…"
        section, _, name = leaf.path.rpartition(".")
        argument = f"{name}={f'[{value}]' if leaf.kind == 'list' and values else value}"
        said += f"{section}=dict({argument})" if section else argument
    return SAME_SECTION.sub(r"\1=dict(\2, ", said + message[at:])


@contextlib.contextmanager
def in_callers_words() -> Iterator[None]:
    """Rewrites a ``ValueError`` of the block to name arguments of the method that was called, not options."""
    try:
        yield
    except ValueError as error:
        message = str(error)
        if "--" in message:
            error.args = (in_python(USAGE.sub("", METHODS.sub(r"\1: ", message))),)
        raise


def _leaf_of(option: str) -> tuple[Leaf | None, bool]:
    """Returns an option's setting, None if unknown, and whether the option turns it on; ``log.no-wandb`` doesn't."""
    path = option.replace("-", "_")
    section, dot, name = path.rpartition(".")
    negated = LEAVES.get(f"{section}{dot}{name.removeprefix('no_')}")
    return (LEAVES[path], True) if path in LEAVES else (negated, False)


def _value_at(message: str, at: int, leaf: Leaf) -> str | None:
    """Returns the word after an option, or None if it isn't a value but continues the sentence."""
    if message[at : at + 1] != " ":
        return None
    word = re.split(r"[\s,;)]", message[at + 1 :], maxsplit=1)[0].rstrip(".")
    if leaf.path in NAMED and NAME.fullmatch(word):
        return word
    found = VALUE.match(message, at + 1)
    if found is not None:
        return found["value"].rstrip(".")
    return word if word and word in re.split(r"[{},|]", leaf.type) else None


def _literal(word: str) -> str:
    if word in LITERALS or word.isupper():
        return LITERALS.get(word, word)
    return word if re.fullmatch(r"-?[\d._]+(?:e-?\d+)?", word) else repr(word)
