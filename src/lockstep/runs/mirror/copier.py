"""Copies a run to its mirror in the background while it trains, and tries again what fails."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.core.files import replace_text
from lockstep.core.process import say
from lockstep.runs.checkpoint import MANIFEST, checkpoints_in, step_of
from lockstep.runs.directory import CHECKPOINTS, CONFIG, LOCK, OWN_NAMES, SUMMARY, WANDB
from lockstep.runs.mirror.fetch import manifests_on, steps_on
from lockstep.runs.mirror.held import Held, found, holding
from lockstep.runs.mirror.lease import LEASE, RENEW_SECONDS, Lease, LeaseGoneError, LeaseLostError
from lockstep.runs.mirror.place import Place, said_by

LOOK_SECONDS = 0.5
"""Seconds between two looks at the run's directory."""
BACKOFF = (1.0, 60.0)
"""Seconds to wait after the first failure, doubled after each further one, and the most to wait."""
SHARE = 0.1
"""Share of the time that copying may take, except for the last copy: it shares a processor with training."""
LAST_SECONDS, FAILED_SECONDS = 60.0, 10.0
"""Seconds that the last copy may take, with all that failed before; the second, if the run failed and may restart."""
LINES = {".jsonl", ".csv"}
"""Suffixes of files whose last line may be half written."""


class Mirror:
    """Keeps the copy of one run up to date, in a thread of the process that holds the run.

    Args:
        run: the run's directory.
        place: the run's place on the mirror.
        lease: on that place, already taken.
        left: manifests of the checkpoints that were there when it was taken, by name: an earlier process's.

    Attributes:
        failures: how often copying failed.
        error: the last failure in one line; None if the last copy succeeded.
    """

    def __init__(self, run: Path, place: Place, lease: Lease, left: Mapping[str, bytes] | None = None) -> None:
        self._run, self._place, self._lease = run, place, lease
        self._sent: dict[str, tuple[int, int]] = {}
        self._there: set[str] | None = None
        self._manifests: dict[str, bytes] = {}
        self._known: dict[str, bytes] = dict(left or {})
        self._gone, self._checked = False, _seconds()
        self._over, self._lost = threading.Event(), False
        self._thread = threading.Thread(target=self._copy_on, name="mirror", daemon=True)
        self.failures = 0
        self.error: str | None = None

    def start(self) -> None:
        """Copies what is there, and from now on everything that is committed."""
        self._thread.start()

    @property
    def step(self) -> int | None:
        """Global step of the newest checkpoint that is whole on the mirror; None if there is none."""
        steps = [step for name in list(self._manifests) if (step := step_of(Path(name))) is not None]
        return max(steps, default=None)

    def state(self) -> dict[str, Any]:
        """Returns the state of the mirror for ``summary.json``."""
        return {"url": self._place.url, "step": self.step, "failures": self.failures, "error": self.error}

    def finish(self, seconds: float = LAST_SECONDS) -> None:
        """Copies for the last time, for about ``seconds``; the summary gets the mirror's state, and is copied last."""
        deadline = time.monotonic() + seconds
        self._over.set()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self.error = self.error or f"not done after {seconds:.0f} s"
        summary = self._run / SUMMARY
        if summary.is_file():
            self._write_state(summary)
        if self.error is None and not self._lost:
            last = threading.Thread(target=self._last, name="mirror-last", daemon=True)
            last.start()
            last.join(max(1.0, deadline - time.monotonic()))
            if last.is_alive():
                self.error = f"not done after {seconds:.0f} s"
        if self.error is not None:
            behind = "nothing is" if self.step is None else f"step {self.step:,} is the newest"
            _warn(f"{self._place.url} is behind at the end, {behind} there ({self.error}); the run's directory has all")
            if summary.is_file():
                self._write_state(summary)

    def _write_state(self, summary: Path) -> None:
        with contextlib.suppress(OSError, ValueError):
            told = json.loads(summary.read_text())
            replace_text(summary, json.dumps({**told, "mirror": self.state()}, indent=2) + "\n")

    def _last(self) -> None:
        try:
            self._copy_file(SUMMARY)
            self._lease.give_back()
        except Exception as error:
            self.error = said_by(error)

    # --- the thread -------------------------------------------------------------------------------------------------

    def _copy_on(self) -> None:
        """Copies whenever a checkpoint was committed, and once more at the end; waits longer after each failure."""
        wait, seen, again = BACKOFF[0], None, 0.0
        while True:
            over = self._over.wait(LOOK_SECONDS)
            stamp = self._stamp()
            began = time.monotonic()
            if not over and (stamp == seen or began < again):
                continue
            try:
                self.copy()
            except Exception as error:
                if self._failed(error):
                    return
                again = time.monotonic() + wait
                if over:
                    time.sleep(min(wait, LAST_SECONDS / 4))
                wait = min(2 * wait, BACKOFF[1])
                continue
            if self.error is not None:
                say(f"lockstep: {self._place.url} is up to date again")
            seen, wait, self.error = stamp, BACKOFF[0], None
            again = time.monotonic() + (time.monotonic() - began) * (1 / SHARE - 1)
            if over:
                return

    def _failed(self, error: Exception) -> bool:
        """Records a failure, and warns of the first in a row; returns whether to give up."""
        self.failures += 1
        self._lost = isinstance(error, LeaseLostError)
        if self.error is None:
            then = "nothing more is copied" if self._lost else "training goes on, and copying is tried again"
            _warn(f"{said_by(error)}; {then}")
        self.error = said_by(error)
        return self._lost

    def _stamp(self) -> list[str]:
        """Returns the names of checkpoints, which change when one is committed."""
        return [path.name for path in checkpoints_in(self._run / CHECKPOINTS)]

    # --- copying ----------------------------------------------------------------------------------------------------

    def copy(self) -> None:
        """Updates the mirror: config, logs, then checkpoints, each one's manifest last; then removes what is gone here.

        Raises:
            MirrorError: something can't be read or written there, or another process writes it.
            LeaseGoneError: the place was emptied or is away; the next copy takes it again and sends everything.
        """
        self._make_sure_of_the_lease()
        self._checked = _seconds()
        if self._there is None:
            self._there = set(self._place.names())
            listed = {f"step_{step}" for step in steps_on(sorted(self._there))}
            self._manifests = {name: text for name, text in self._manifests.items() if name in listed}
        try:
            self._copy()
        except Exception:
            self._there = None  # unknown what has arrived
            raise

    def _make_sure_of_the_lease(self) -> None:
        """Checks that this process may write; forgets what was sent if the place may have lost it.

        A lease that is gone is taken again at the second look only: a share that isn't mounted may be back by then.
        """
        if self._gone:
            self._check_nobody_wrote()
            self._lease.take_again()
        try:
            is_known = self._lease.check()
        except LeaseGoneError:
            self._gone = True
            self._forget()
            raise
        self._gone = False
        if not is_known:
            self._forget()

    def _check_nobody_wrote(self) -> None:
        """Raises a ``LeaseLostError`` if there is a checkpoint of another process, which has given its lease back."""
        for name, manifest in manifests_on(self._place).items():
            here = found(self._run / CHECKPOINTS / name)
            if manifest not in (self._known.get(name), here and here.manifest):
                raise LeaseLostError(f"{self._place.url} was written by another process meanwhile")

    def _forget(self) -> None:
        """Forgets what is on the mirror, so that everything is looked for and copied again."""
        self._known |= self._manifests
        self._sent, self._manifests, self._there = {}, {}, None

    def _stay_ours(self) -> None:
        """Checks the lease once more if this process may have stood still since: another one takes it then."""
        if _seconds() - self._checked > RENEW_SECONDS:
            self._lease.check()
            self._checked = _seconds()

    def _copy(self) -> None:
        with holding(self._run / CHECKPOINTS, self._manifests) as (
            committed,
            newest,
        ):  # all have their rows in the logs
            self._go_back(committed)
            for name in sorted(self._files(), key=lambda name: name != CONFIG):
                self._copy_file(name)
            for path in committed:
                self._copy_checkpoint(newest if newest is not None and newest.path == path else found(path))
        self._remove_gone()

    def _go_back(self, committed: Sequence[Path]) -> None:
        """Takes checkpoints off the mirror that come after the newest one here, before their rows go.

        The run has resumed from an earlier one, which is there first: its rows are.
        """
        assert self._there is not None
        newest = max((step_of(path) or 0 for path in committed), default=None)
        later = [step for step in steps_on(sorted(self._there)) if newest is not None and step > newest]
        if not later:
            return
        for path in committed:
            self._copy_checkpoint(found(path))
        if len(later) == len(steps_on(sorted(self._there))):
            return  # the last checkpoint stays until there is another
        names = [f"{CHECKPOINTS}/step_{step}/{MANIFEST}" for step in later]
        self._stay_ours()
        self._place.remove(names)
        self._there -= set(names)
        for step in later:
            self._manifests.pop(f"step_{step}", None)

    def _files(self) -> list[str]:
        """Lists the files to copy, without checkpoints and the summary, which have their own turns."""
        left_out = {LOCK, WANDB, CHECKPOINTS, SUMMARY}
        found = []
        for top in sorted(OWN_NAMES - left_out):
            path = self._run / top
            files = sorted(path.rglob("*")) if path.is_dir() and not path.is_symlink() else [path]
            found += [f.relative_to(self._run).as_posix() for f in files if f.is_file() and not f.is_symlink()]
        return [name for name in found if not Path(name).name.startswith(".")]

    def _copy_file(self, name: str) -> None:
        """Copies a file if it has changed since it was last copied."""
        path = self._run / name
        try:
            status = path.stat()
            stamp = (status.st_size, status.st_mtime_ns)
            if self._sent.get(name) == stamp:
                return
            content = path.read_bytes()
        except FileNotFoundError:
            return
        if path.suffix in LINES:
            content = content[: content.rfind(b"\n") + 1]
        self._stay_ours()
        self._place.write(name, content)
        self._sent[name] = stamp
        if self._there is not None:
            self._there.add(name)

    def _copy_checkpoint(self, one: Held | None) -> None:
        """Copies a checkpoint that isn't there yet; skips one that is removed meanwhile, because it was too old."""
        if one is None or self._there is None or self._manifests.get(one.path.name) == one.manifest:
            return
        folder = f"{CHECKPOINTS}/{one.path.name}"
        try:
            if f"{folder}/{MANIFEST}" in self._there:
                is_whole = self._there.issuperset(f"{folder}/{name}" for name in one.files)
                if is_whole and self._place.read(f"{folder}/{MANIFEST}") == one.manifest:
                    self._manifests[one.path.name] = one.manifest
                    return
                self._place.remove([f"{folder}/{MANIFEST}"])
            for name, digest in one.files.items():
                content = one.read(name)
                if hashlib.sha256(content).hexdigest() != digest:
                    return  # damaged here, or replaced just now
                self._there.add(f"{folder}/{name}")
                self._place.write(f"{folder}/{name}", content)
        except FileNotFoundError:
            return
        self._stay_ours()
        self._place.write(f"{folder}/{MANIFEST}", one.manifest)
        self._there.add(f"{folder}/{MANIFEST}")
        self._manifests[one.path.name] = one.manifest

    def _remove_gone(self) -> None:
        """Removes from the mirror what isn't in the run's directory any more, manifests of checkpoints first.

        The mirror's newest checkpoint stays until a newer one is there, unless the run has resumed from an earlier one.
        """
        assert self._there is not None
        steps = {path.name: step_of(path) or 0 for path in checkpoints_in(self._run / CHECKPOINTS)}
        newest = max(steps_on(sorted(self._there)), default=0)
        here = {*steps, f"step_{newest}"} if newest < max(steps.values(), default=0) else set(steps)
        gone = {name for name in self._there if name.startswith(f"{CHECKPOINTS}/") and name.split("/")[1] not in here}
        kept = set(self._files()) | ({SUMMARY} if (self._run / SUMMARY).is_file() else set())
        owned = {n for n in self._there if n.split("/")[0] in OWN_NAMES - {CHECKPOINTS, WANDB}}
        gone |= owned - kept - {LEASE}
        if not steps_on(sorted(self._there - gone)) and steps_on(sorted(gone)):
            return  # the last checkpoint stays until there is another
        ordered = sorted(gone, key=lambda name: not name.endswith(f"/{MANIFEST}"))
        self._stay_ours()
        self._place.remove(ordered)
        self._there -= gone
        for name in gone:
            self._sent.pop(name, None)
            if name.endswith(f"/{MANIFEST}"):
                self._manifests.pop(name.split("/")[1], None)


def _seconds() -> float:
    """Returns the seconds of a clock that runs on while the machine is suspended, where there is one."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def _warn(text: str) -> None:
    say(f"lockstep: warning: {text}")
