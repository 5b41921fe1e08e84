"""How the doctor runs a script in a rank's process: as Python does."""

import os
import subprocess
import sys
from pathlib import Path

import lockstep

SOURCE = str(Path(lockstep.__file__).parents[1])
RUN = "from lockstep.doctor.watch import watched; watched.run_as_main(['sub/script.py']); print('over')"
THREADS = """
import threading, time
from lockstep.doctor.watch import watched
def later():
    time.sleep(0.2)
    threading.Thread(target=print, args=["from a thread of a thread"]).start()
threading.Thread(target=later).start()
threading.Thread(target=time.sleep, args=[3600], daemon=True).start()
watched.join_threads()
print("over")
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


def test_threads_that_a_script_leaves_behind_are_waited_for(tmp_path):
    assert said(THREADS, tmp_path) == ["from a thread of a thread", "over"]
