"""Tables of numbers on terminals of any width: every digit is there."""

import re
import sys

import pytest

from lockstep.scaling.tables import print_numbers

TITLE = "lockstep/CartPole-v1, weak scaling"
HEADS = ("ranks", "steps/s", "of ideal", "limited by")
ROWS = [
    ["1", "1,234,567", "100%", "environments"],
    ["2", "2,345,678", "95% [90–99]", "rollout (launching small kernels)"],
    ["16", "23,456,789", "88% [80–97]", "rollout (launching small kernels)"],
]


def printed(capsys, monkeypatch, width, terminal=True):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.setenv("COLUMNS", str(width))
    print_numbers(TITLE, HEADS, ROWS, prose=("limited by",))
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().out).splitlines()


def cells(line):
    return [cell.strip() for cell in line.replace("┃", "│").split("│")[1:-1]]


@pytest.mark.parametrize(("width", "terminal"), [(80, True), (140, True), (20, False)])
def test_a_table_has_a_row_for_each_where_there_is_room(capsys, monkeypatch, width, terminal):
    lines = printed(capsys, monkeypatch, width, terminal)
    assert lines[0].strip() == TITLE
    assert [cells(line) for line in lines if line.startswith("│")] == ROWS


def test_only_words_are_wrapped(capsys, monkeypatch):
    rows = [cells(line) for line in printed(capsys, monkeypatch, 60) if line.startswith("│")]
    assert [row[:3] for row in rows if row[0]] == [row[:3] for row in ROWS]
    assert " ".join(row[3] for row in rows).split() == " ".join(row[3] for row in ROWS).split()


@pytest.mark.parametrize("width", [44, 34])
def test_a_narrow_terminal_gets_a_column_for_each(capsys, monkeypatch, width):
    lines = printed(capsys, monkeypatch, width)
    assert lines[0] == TITLE
    assert max(map(len, lines)) <= width
    turned = {}
    for line in lines:
        if line.startswith(("│", "┃")):
            name, *values = cells(line)
            turned.setdefault(name, []).extend(values)
    assert [turned[head] for head in HEADS[:3]] == [[row[i] for row in ROWS] for i in range(3)]


def test_no_digit_is_lost_on_a_terminal_too_narrow_for_a_single_column(capsys, monkeypatch):
    lines = printed(capsys, monkeypatch, 20)
    assert digits_of(lines) == digits_of([TITLE, *(cell for row in ROWS for cell in row)])


def digits_of(texts):
    return sorted(character for text in texts for character in text if character.isdigit())
