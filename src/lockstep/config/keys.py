"""Lists every setting by its dotted key, and validates all sources: errors name key, value and limit."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from lockstep.config.engines import VISIBLE
from lockstep.config.redact import shown_value
from lockstep.config.run import Config, RunOptions
from lockstep.config.words import ALIASES, SWITCHES, advice, algorithms, plain


@dataclass(frozen=True)
class Leaf:
    """One setting: its dotted path, type and meaning, and what its section is about."""

    path: str
    annotation: Any
    description: str = ""
    about: str = ""

    @property
    def kind(self) -> str:
        """The form of its value on the command line: ``flag``, ``list``, ``json`` or ``value``."""
        choices = [a for a in _members(self.annotation) if a is not type(None)]
        if bool in choices:
            return "flag"
        if any(typing.get_origin(a) is tuple for a in choices):
            return "list"
        return "json" if any(typing.get_origin(a) is dict for a in choices) else "value"

    @property
    def optional(self) -> bool:
        """Whether it may be None."""
        return type(None) in _members(self.annotation)

    @property
    def type(self) -> str:
        """Its type in words: ``INT``, ``{exact,fast}``, ``{None}|FLOAT FLOAT``."""
        return "|".join(sorted(map(_type_words, _members(self.annotation)), key=lambda words: words != "{None}"))


def _members(annotation: Any) -> tuple[Any, ...]:
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if union else (annotation,)


def _type_words(kind: Any) -> str:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _type_words(inner[0])
    if origin is typing.Literal:
        return f"{{{','.join(map(str, inner))}}}"
    if origin is tuple:
        return f"[{_type_words(inner[0])} ...]" if inner[-1] is ... else " ".join(map(_type_words, inner))
    return {type(None): "{None}", dict: "JSON"}.get(origin or kind) or kind.__name__.upper()


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[Leaf]:
    """Yields every setting of a config model, depth first."""
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from leaves(info.annotation, f"{prefix}{name}.")
        else:
            about = (model.__doc__ or "").partition("\n")[0]
            yield Leaf(prefix + name, info.annotation, info.description or "", about)


LEAVES = {leaf.path: leaf for model in (Config, RunOptions) for leaf in leaves(model)}
FREE = {path for path, leaf in LEAVES.items() if leaf.kind == "json"}
"""Settings whose value is a free table: ``env.kwargs``, ``network.custom_kwargs``."""
FREE_NAMES = {path.split(".")[-1] for path in FREE}
"""Last words of their paths."""

SECTIONS = {path[:place] for path in LEAVES for place, letter in enumerate(path) if letter == "."}
"""Paths of all sections: ``ppo``, ``env.atari``."""


def negated(flag: str) -> str:
    """Spells ``--log.tensorboard`` as ``--log.no-tensorboard``; returns an option that can't be negated as it is."""
    path = flag[2:].replace("-", "_")
    path = ALIASES.get(path, path)
    section, dot, last = path.rpartition(".")
    is_flag = path in LEAVES and LEAVES[path].kind == "flag"
    return f"--{section}{dot}no-{last}".replace("_", "-") if is_flag else flag


def check_no_booleans(values: Any, path: str = "") -> None:
    """Refuses a YAML ``true`` where a number is wanted, which would silently become 1.

    Raises:
        ValueError: a setting in the nested ``values``, which stand below the prefix ``path``, is one; one line.
    """
    for key, value in values.items() if isinstance(values, Mapping) else ():
        inner = f"{path}{key}"
        kind = LEAVES[inner].kind if inner in LEAVES else "flag"
        listed = value if kind == "list" and isinstance(value, list | tuple) else [value]
        wrong = next((each for each in listed if isinstance(each, bool)), None)
        if wrong is not None and kind != "flag":
            raise ValueError(f"{inner}: {wrong}: a number or text is wanted here, not true or false")
        if inner not in FREE:
            check_no_booleans(value, f"{inner}.")


def nearest(key: str, known: Sequence[str]) -> str:
    """Returns ``'; did you mean X?'`` for the closest known key, or ""."""
    alias = ALIASES.get(plain(key.split(".")[-1]))
    if alias in known:
        return f"; did you mean {alias}?"
    lookup = {k.split(".")[-1]: k for k in known} | {k: k for k in known}
    sections = {k.split(".")[0]: k.split(".")[0] for k in known if "." in k} if "." not in key else {}
    close = difflib.get_close_matches(key, lookup | sections, 1, 0.6) or difflib.get_close_matches(
        key.split(".")[-1], lookup, 1, 0.6
    )
    return f"; did you mean {(lookup | sections)[close[0]]}?" if close else ""


def _path(error: Any) -> str:
    """Returns the dotted key of an error, without the union member that pydantic appends."""
    parts = [str(part) for part in error["loc"]]
    for end in range(len(parts), 0, -1):
        if ".".join(parts[:end]) in LEAVES:
            return ".".join(parts[:end])
    return ".".join(parts)


NAMES = {"network.custom": "my_networks:Net", "ppo.loss": "my_losses:with_penalty"}
"""Settings that name a user's own object, with an example."""
WANTED = {
    "nproc": "a number of ranks, at least 1, a range such as 2:8, or auto",
    "env.workers": "a number of processes a rank, 0 for none, or auto",
    "seed": "one whole number from 0 on, of at most 40 digits, is wanted; several seeds are --seeds 0-4",
    "seeds": "numbers are wanted, e.g. 0-4, or 0,3,7",
    "ppo.adam_betas": "two numbers are wanted, e.g. 0.9 0.999",
    "env.reward_clip": "two numbers are wanted, e.g. -1 1",
}
"""What settings of several types or of two numbers may be; pydantic names the type that it tried last, or a field."""
PATTERNS = {
    **{path: f"the module and the name in it are wanted, e.g. {example}" for path, example in NAMES.items()},
    "coordinator": "a host and a port are wanted, e.g. 10.0.0.1:29400",
}
"""The form that texts must have."""


def _describe(error: Any) -> str:
    kind, path = error["type"], _path(error)
    value = shown_value(error["input"], path)
    wanted = WANTED.get(path) if kind != "value_error" else None
    wanted = PATTERNS.get(path, wanted) if kind == "string_pattern_mismatch" else wanted
    if wanted is not None:
        return f"{path}: {value!r}: {wanted}"
    if path == "algorithm":
        return f"algorithm: {value!r}: {algorithms(str(value))}"
    if path == "device" and (one := re.fullmatch(rf"({'|'.join(VISIBLE)}):([0-9]+)", str(value))):
        return f"device: {value!r}: write {one[1]}; {VISIBLE[one[1]]}={one[2]} before the command chooses which"
    if path == "normalize":
        return f"normalize: {value!r}: {advice('normalize', '')}"
    if kind == "extra_forbidden":
        return _unknown(path, value)
    if kind == "float_parsing" and str(value).startswith(FALLING):
        return _falling(path, str(value))
    if kind in ("value_error", "assertion_error"):
        text = str(error["ctx"]["error"])
        return text if text.startswith(path) or not path else f"{path}: {text}"
    message = error["msg"][0].lower() + error["msg"][1:]
    return f"{path}: {value!r}: {message}"


def _unknown(path: str, value: Any) -> str:
    """Says what to write in place of an unknown key."""
    if re.search(r"[-_]v\d+$", path):
        name = re.sub(r"_(v\d+)$", r"-\1", path)
        return f"{name}: the environment stands in a key of its own, env: {name}, and its settings beside that"
    word = path.rpartition(".")[2]
    said = advice(word, str(value))
    if said is None and plain(word) in SWITCHES:
        return f"{path}: {value!r} is neither true nor false"
    return f"{path}: unknown key{nearest(path, list(LEAVES))}" if said is None else said


FALLING = "lin_"
"""Prefix of a number in RL Zoo's files that means that it falls to 0."""
SCHEDULED = {
    "ppo.learning_rate": "ppo.schedule: linear lowers the learning rate to 0",
    "ppo.clip_range": "ppo.clip_schedule: linear lowers the clip ranges to 0",
    "ppo.value_clip_range": "ppo.clip_schedule: linear lowers the clip ranges to 0",
    "ppo.entropy_coef": "ppo.entropy_schedule: linear lowers the entropy coefficient to 0",
}
"""Settings that can fall, each with the setting that makes it, and what this does."""


def _falling(path: str, value: str) -> str:
    falls = SCHEDULED.get(path, "it stays as it is; there is no schedule for it")
    return f"{path}: {value!r}: write {value.removeprefix(FALLING)}; {falls}"


AND_MORE = " (and "
"""What follows the first problem in a line about several."""


def validate(model: type[BaseModel], values: Mapping[str, Any], source: str, stored: bool = False) -> Any:
    """Builds a config model; raises a one-line ``ValueError`` with key, value and limit if that fails.

    If the values are ``stored`` in a run, the line for an unknown key says that a newer version may have written it.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problems = list({_path(e): e for e in reversed(error.errors())}.values())[::-1]
        others = ", ".join(_path(problem) for problem in problems[1:])
        more = f"{AND_MORE}{len(problems) - 1} more: {others})" if others else ""
        if stored and any(problem["type"] == "extra_forbidden" for problem in problems):
            more += "; a newer lockstep may have written it, and reads it"
        raise ValueError(f"{source}: {_describe(problems[0])}{more}") from None


def validate_completed(model: type[BaseModel], whole: Mapping[str, Any], alone: Mapping[str, Any], file: str) -> Any:
    """Builds a config model of a file's settings that the command line completes, or replaces.

    Args:
        model: the config model.
        whole: the settings of both.
        alone: the file's.
        file: its name.

    Raises:
        ValueError: as :func:`validate`; of the file if its settings alone have the first problem.
    """
    try:
        return validate(model, whole, "command line")
    except ValueError as error:
        first = str(error).removeprefix("command line: ").partition(AND_MORE)[0]
        try:
            validate(model, alone, file)
        except ValueError as in_file:
            if str(in_file).startswith(f"{file}: {first}"):
                raise in_file from None
        raise
