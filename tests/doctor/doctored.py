"""The doctor as the tests call it: by its command line, with its report as JSON."""

import json
from dataclasses import dataclass
from typing import Any

from command_line import Ended, lockstep


@dataclass(frozen=True)
class Report:
    """What came of ``lockstep doctor``."""

    ended: Ended
    json: dict[str, Any]

    @property
    def kinds(self) -> list[str]:
        return [finding["kind"] for finding in self.json["findings"]]

    @property
    def causes(self) -> str:
        return " ".join(finding["cause"] for finding in self.json["findings"])


def doctor(*words: Any, cwd, **more: str) -> Report:
    """``lockstep doctor --json FILE WORDS``; ``more`` are environment variables."""
    file = cwd / "report.json"
    ended = lockstep("doctor", "--json", file, *words, cwd=cwd, **more)
    assert file.is_file(), ended.stderr
    report = Report(ended, json.loads(file.read_text()))
    assert ended.code == report.json["status"]
    assert f"{report.json['verdict']}: " in ended.stdout
    return report
