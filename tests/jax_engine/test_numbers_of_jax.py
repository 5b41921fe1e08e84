"""What a user's own variables of JAX's say of numbers decides no agent, and NumPy's threads are one."""

import os
import subprocess
import sys

CODE = """if True:
    import jax, numpy, threadpoolctl
    from lockstep.jax_engine.setup.set_up import configure, machine_facts
    configure(1, "cpu", 1)
    blas = {pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"}
    print(jax.config.jax_enable_x64, jax.config.jax_threefry_partitionable, blas, "kernel variables" in machine_facts())
"""


def test_variables_of_jaxs_and_cores_change_no_number():
    variables = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    variables |= {"JAX_ENABLE_X64": "1", "JAX_THREEFRY_PARTITIONABLE": "0", "OPENBLAS_NUM_THREADS": "2"}
    ended = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=variables)
    assert ended.stdout == "False True {1} True\n", ended.stderr
