"""How the doctor runs a script in a rank's process: as Python does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep

SOURCE = str(Path(lockstep.__file__).parents[1])
RUN = "from lockstep.doctor.watch import watched; watched.run_as_main(['sub/script.py']); print('over')"
THREADS = """
import atexit, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
def later():
    time.sleep(0.2)
    threading.Thread(target=print, args=["from a thread of a thread"]).start()
class Kept:
    alive = True
pool, kept = ThreadPoolExecutor(1), Kept()
pool.submit(int).result()
threading.Thread(target=later).start()
threading.Thread(target=time.sleep, args=[3600], daemon=True).start()
atexit.register(print, "at exit")
"""
WATCHED = """
import gc, sys
from lockstep.doctor.watch import watched
class Watcher:
    def end(self, error):
        print("over", any(type(x).__name__ == "Kept" for x in gc.get_objects()))
sys.exit(watched._run(Watcher(), ["sub/script.py"]))
"""
IMPORTS = """
import importlib.util, sys
from lockstep.doctor.watch.watched import AfterImport
sys.meta_path.insert(0, AfterImport("wave", lambda: print("told", "wave" in sys.modules)))
print(*(importlib.util.find_spec(name).name for name in ("wave", "json", "wave")))
import wave
import wave
print(any(isinstance(finder, AfterImport) for finder in sys.meta_path), hasattr(wave, "open"))
"""


def said(code, cwd, **more):
    paths = os.pathsep.join([str(cwd / "own"), SOURCE])
    given = {**os.environ, "PYTHONPATH": paths, **more}
    words = [sys.executable, "-c", code]
    ended = subprocess.run(words, cwd=cwd, env=given, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_a_script_has_its_directory_first_on_the_path_unless_python_is_safe(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "script.py").write_text("import sys; print(sys.path[:2])")
    assert said(RUN, tmp_path, PYTHONSAFEPATH="") == [str([str(tmp_path / "sub"), str(tmp_path / "own")]), "over"]
    assert said(RUN, tmp_path, PYTHONSAFEPATH="1") == [str([str(tmp_path / "own"), SOURCE]), "over"]


@pytest.mark.parametrize("end", ["", "sys.exit()"])
def test_threads_and_executors_that_a_script_leaves_behind_end_before_the_last_look(tmp_path, end):
    """Idle threads of an executor end only when Python tells them to, at its exit."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "script.py").write_text(THREADS + end)
    first, over, last = said(WATCHED, tmp_path)
    assert (first, over.split()[0], last) == ("from a thread of a thread", "over", "at exit")
    assert end or over == "over True"


def test_a_module_that_is_only_looked_for_is_told_of_once_it_is_imported(tmp_path):
    """As by transformers and datasets, which ask whether PyTorch is installed."""
    assert said(IMPORTS, tmp_path) == ["wave json wave", "told True", "False True"]
