from dataclasses import replace

import pytest

from lockstep.core.host.slurm import first_host, tasks_per_node
from lockstep.core.topology import (
    Topology,
    error_file,
    from_environment,
    from_flags,
    started_by_lockstep,
    started_by_torchrun,
    without_launcher,
)


def torchrun(rank, world_size, local_rank, local_world_size, **more):
    values = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_world_size}
    return {name: str(value) for name, value in (values | more).items()}


def complaint(environ):
    with pytest.raises(ValueError) as caught:
        from_environment(environ)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_without_a_launcher_there_is_one_rank():
    topology = from_environment({"PATH": "/bin"})
    assert topology == Topology(rank=0, world_size=1, local_rank=0, local_world_size=1, launched=False)
    assert topology.loopback


def test_torchrun_on_one_host():
    topology = from_environment(torchrun(3, 4, 3, 4, MASTER_ADDR="127.0.0.1", MASTER_PORT="29500"))
    assert topology == Topology(3, 4, 3, 4, launched=True, master_port=29500)
    assert topology.on_one_host
    assert topology.loopback


def test_torchrun_on_two_hosts():
    topology = from_environment(torchrun(5, 8, 1, 4, MASTER_ADDR="node-0"))
    assert (topology.rank, topology.world_size) == (5, 8)
    assert (topology.local_rank, topology.local_world_size) == (1, 4)
    assert topology.master_addr == "node-0"
    assert not topology.on_one_host
    assert not topology.loopback


def test_one_rank_under_a_launcher_is_launched():
    assert from_environment(torchrun(0, 1, 0, 1)).launched
    assert not from_environment({}).launched


@pytest.mark.parametrize(
    ("address", "loopback"), [("localhost", True), ("::1", True), ("[::1]", True), ("10.0.0.5", False)]
)
def test_loopback_is_an_address_of_this_host_alone(address, loopback):
    assert from_environment(torchrun(0, 2, 0, 2, MASTER_ADDR=address)).loopback is loopback


@pytest.mark.parametrize(
    ("rank", "address", "place"),
    [(1, "node-0", (0, 1)), (0, "10.0.0.5", (0, 1)), (1, "::1", (1, 2)), (1, "[::1]", (1, 2))],
)
def test_without_local_variables_ranks_are_here_if_they_meet_here_and_else_alone_on_their_hosts(rank, address, place):
    topology = from_environment({"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": address})
    assert (topology.local_rank, topology.local_world_size) == place


def test_the_local_world_size_is_enough_to_be_on_this_host():
    environ = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node-0"}
    assert from_environment(environ) == Topology(1, 2, 1, 2, launched=True, master_addr="node-0")


@pytest.mark.parametrize("rank", [0, 4])
def test_a_local_rank_alone_does_not_tell_how_many_ranks_are_here_if_they_meet_elsewhere(rank):
    """Rank 0, whose numbers are alike, must refuse as well, or it would wait for the others."""
    text = complaint({"RANK": str(rank), "WORLD_SIZE": "8", "LOCAL_RANK": "0", "MASTER_ADDR": "node0"})
    assert "LOCAL_RANK 0 is set without LOCAL_WORLD_SIZE, and MASTER_ADDR 'node0' may be another host's; set" in text


def test_ranks_of_a_script_that_have_met_need_no_local_world_size():
    environ = {"RANK": "4", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "MASTER_ADDR": "node0"}
    assert (from_environment(environ, met=True).rank, from_environment(environ, met=True).world_size) == (4, 8)


@pytest.mark.parametrize("address", [{}, {"MASTER_ADDR": "127.0.0.1"}])
def test_a_local_rank_is_enough_where_all_ranks_meet_on_this_host(address):
    environ = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"} | address
    assert from_environment(environ) == Topology(1, 2, 1, 2, launched=True)


def test_a_local_rank_is_enough_for_a_rank_alone():
    environ = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "node0"}
    assert from_environment(environ) == Topology(launched=True)


TASK_5 = {
    **{"SLURM_STEP_NODELIST": "n[0-1]", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"},
    **{"SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"},
}
PROCESS_5 = {
    **{"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8"},
    **{"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
}


@pytest.mark.parametrize("started", [TASK_5, PROCESS_5])
@pytest.mark.parametrize("local", [{}, {"LOCAL_RANK": "1"}])
def test_a_script_that_names_its_ranks_under_srun_or_mpirun_needs_no_local_variables(started, local):
    environ = {**started, "RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "n0"} | local
    topology = from_environment(environ)
    assert (topology.local_rank, topology.local_world_size, topology.on_one_host) == (1, 4, False)


@pytest.mark.parametrize(
    "other",
    [
        {"RANK": "4"},  # ranks are numbered otherwise, or are other processes than the tasks
        {"WORLD_SIZE": "16"},
        {"SLURM_STEP_TASKS_PER_NODE": "nonsense"},
    ],
)
def test_tasks_that_are_not_the_ranks_say_nothing_of_them(other):
    environ = {**TASK_5, "RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "n0"} | other
    topology = from_environment(environ)
    assert (topology.local_rank, topology.local_world_size) == (0, 1)


def test_without_local_variables_every_rank_is_on_this_host():
    assert from_environment({"RANK": "1", "WORLD_SIZE": "2"}) == Topology(1, 2, 1, 2, launched=True)


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        (torchrun(4, 4, 0, 4), "RANK 4 of WORLD_SIZE 4"),
        (torchrun(-1, 4, 0, 4), "RANK -1 of WORLD_SIZE 4"),
        (torchrun(0, 0, 0, 1), "RANK 0 of WORLD_SIZE 0"),
        (torchrun(3, 4, 2, 2), "LOCAL_RANK 2 of LOCAL_WORLD_SIZE 2"),
        (torchrun(3, 4, -1, 2), "LOCAL_RANK -1 of LOCAL_WORLD_SIZE 2"),
        (torchrun(0, 2, 0, 4), "LOCAL_WORLD_SIZE 4"),
    ],
)
def test_variables_that_contradict_one_another(environ, named):
    text = complaint(environ)
    assert named in text
    assert "torchrun" in text


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
@pytest.mark.parametrize("value", ["", "two", "1.0"])
def test_variables_that_are_no_numbers(name, value):
    text = complaint(torchrun(1, 2, 1, 2) | {name: value})
    assert "whole numbers" in text
    assert repr(value) in text


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE"])
def test_half_a_launcher_is_no_single_rank(missing):
    """Several processes that each take themselves for the only rank would write over one another."""
    environ = torchrun(1, 2, 1, 2)
    del environ[missing]
    assert missing in complaint(environ)


def test_where_a_failing_rank_leaves_its_message(tmp_path):
    assert error_file({"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}) == tmp_path / "error.json"
    assert error_file({"TORCHELASTIC_ERROR_FILE": ""}) is None
    assert error_file({}) is None


def test_who_started_this_rank():
    assert started_by_lockstep({"LOCKSTEP_LAUNCHER": "1"})
    assert not started_by_lockstep(torchrun(0, 1, 0, 1))
    assert started_by_torchrun(torchrun(0, 1, 0, 1, TORCHELASTIC_MAX_RESTARTS=0))
    assert not started_by_torchrun(torchrun(0, 1, 0, 1))
    assert not started_by_torchrun({"LOCKSTEP_LAUNCHER": "1", "TORCHELASTIC_MAX_RESTARTS": "3"})


@pytest.mark.parametrize(("most", "again"), [("0", False), ("3", True)])
def test_whether_torchrun_starts_ranks_again(most, again):
    assert from_environment(torchrun(0, 2, 0, 2, TORCHELASTIC_MAX_RESTARTS=most)).starts_again is again
    assert not from_environment(torchrun(0, 2, 0, 2)).starts_again


def test_several_agents_of_one_host_meet_on_loopback():
    topology = from_environment(torchrun(1, 2, 0, 1, MASTER_ADDR="127.0.0.1"))
    assert topology.loopback
    assert not topology.on_one_host


# ---- where ranks meet


def test_where_ranks_meet():
    topology = from_environment(torchrun(0, 2, 0, 2, MASTER_ADDR="node-0", MASTER_PORT="4321"))
    assert topology.master == topology.coordinator == "node-0:4321"
    assert from_environment(torchrun(0, 2, 0, 2)).master == "127.0.0.1:29500"
    assert from_environment(torchrun(0, 2, 0, 2, MASTER_ADDR="fe80::1", MASTER_PORT="1")).master == "[fe80::1]:1"
    assert from_environment(torchrun(0, 2, 0, 2, MASTER_ADDR="[fe80::1]", MASTER_PORT="1")).master == "[fe80::1]:1"


@pytest.mark.parametrize(("port", "coordinator"), [("29400", 29401), ("65535", 1)])
def test_jax_meets_beside_a_store_that_the_launcher_holds(port, coordinator):
    """torchrun listens on its port already; every process comes to the same other one."""
    held = torchrun(0, 2, 0, 2, MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE="True")
    assert from_environment(held).master == f"127.0.0.1:{port}"
    assert from_environment(held).coordinator == f"127.0.0.1:{coordinator}"


@pytest.mark.parametrize("port", ["0", "65536", "-1", "http", ""])
def test_a_port_that_is_none(port):
    text = complaint(torchrun(0, 2, 0, 2, MASTER_PORT=port))
    assert f"MASTER_PORT {port!r}" in text


def test_a_rank_alone_needs_no_host_to_meet_others_on():
    """A job of pods that was scaled down to one: the name of its service may not be there."""
    for address in ("nosuchhost.invalid", "", " "):
        assert from_environment(torchrun(0, 1, 0, 1, MASTER_ADDR=address)).loopback
    held = torchrun(0, 1, 0, 1, MASTER_ADDR="node-0", TORCHELASTIC_USE_AGENT_STORE="True")
    assert from_environment(held).master_addr == "node-0"  # which holds a store, so it is there


@pytest.mark.parametrize("address", ["", " ", "[]"])
def test_an_empty_address_is_refused_where_ranks_meet(address):
    text = complaint(torchrun(0, 2, 0, 2, MASTER_ADDR=address))
    assert f"MASTER_ADDR {address!r} is no host's name" in text


# ---- Slurm


def step(procid, ntasks, localid, per_node, nodelist="node[01-02]", nodeid=0, **more):
    values = {
        "SLURM_JOB_ID": 77,
        "SLURM_STEP_ID": 3,
        "SLURM_STEP_NODELIST": nodelist,
        "SLURM_STEP_TASKS_PER_NODE": per_node,
        "SLURM_NTASKS": ntasks,
        "SLURM_PROCID": procid,
        "SLURM_LOCALID": localid,
        "SLURM_NODEID": nodeid,
    }
    return {name: str(value) for name, value in (values | more).items()}


def without(environ, *names):
    return {name: value for name, value in environ.items() if name not in names}


def test_a_slurm_step_on_two_hosts():
    topology = from_environment(step(5, 6, 1, "4,2", "gpu[007,009]-ib,cpu1", nodeid=1))
    assert (topology.rank, topology.world_size) == (5, 6)
    assert (topology.local_rank, topology.local_world_size) == (1, 2)
    assert topology.launched
    assert not topology.agent_store
    assert topology.coordinator == f"gpu007-ib:{61440 + (77 * 2531 + 3) % 4096}"


def test_a_slurm_step_on_one_host_meets_on_loopback():
    topology = from_environment(step(1, 2, 1, "2", "node07"))
    assert (topology.rank, topology.local_world_size, topology.master_addr) == (1, 2, "127.0.0.1")
    assert topology.loopback


def test_two_steps_of_a_job_meet_on_different_ports():
    first, second = (from_environment(step(0, 2, 0, "2", SLURM_STEP_ID=number)).master_port for number in (0, 1))
    assert first != second
    assert 61440 <= first <= 65535


def test_steps_of_jobs_that_run_side_by_side_meet_on_different_ports():
    """The second step of one job and the first of the next, for instance."""
    places = [
        step(0, 2, 0, "2", SLURM_JOB_ID=job, SLURM_STEP_ID=number) for job in range(77, 93) for number in range(8)
    ]
    assert len({from_environment(place).master_port for place in places}) == len(places)


def test_torchrun_and_our_launcher_start_ranks_again_and_nobody_else():
    by_hand = torchrun(0, 2, 0, 2)
    assert not from_environment(step(0, 2, 0, "2")).restarts
    assert not from_environment(by_hand).restarts
    assert from_environment(by_hand | {"TORCHELASTIC_MAX_RESTARTS": "0"}).restarts
    assert from_environment(by_hand | {"LOCKSTEP_LAUNCHER": "1"}).restarts


def test_srun_and_mpirun_may_end_all_ranks_when_one_fails():
    by_hand = torchrun(0, 2, 0, 2)
    assert not from_environment(by_hand).ends_all
    assert not from_flags("127.0.0.1:4000", 2, 1, {}).ends_all
    assert from_environment(step(0, 2, 0, "2")).ends_all
    assert from_environment(step(0, 2, 0, "2") | by_hand).ends_all
    assert from_environment(by_hand | {"OMPI_COMM_WORLD_RANK": "0"}).ends_all
    assert from_flags("127.0.0.1:4000", 2, 1, step(0, 2, 0, "2")).ends_all


def test_slurm_says_how_many_cores_each_task_has():
    assert from_environment(step(0, 4, 0, "4", SLURM_CPUS_PER_TASK=8)).cores == 8
    assert from_environment(step(0, 4, 0, "4")).cores is None


def test_the_tasks_have_their_cores_also_where_a_script_says_itself_which_rank_each_is():
    task = step(1, 4, 1, "4", SLURM_CPUS_PER_TASK=8)
    exported = {"RANK": "1", "WORLD_SIZE": "4"}
    assert from_environment(task | exported).cores == 8
    assert from_environment(task | exported | {"MASTER_ADDR": "node01", "LOCAL_RANK": "1"}).cores == 8
    assert from_flags("127.0.0.1:4000", 4, 1, task).cores == 8
    assert from_environment(without(task, "SLURM_CPUS_PER_TASK") | exported).cores is None


@pytest.mark.parametrize(
    ("environ", "of_others"),
    [
        (step(0, 4, 0, "4"), torchrun(0, 4, 0, 4, TORCHELASTIC_MAX_RESTARTS=0)),
        (step(0, 4, 0, "4"), torchrun(0, 4, 0, 4, LOCKSTEP_LAUNCHER=1)),
        (step(0, 2, 0, "1(x2)"), torchrun(0, 8, 0, 4)),  # a task starts several by hand, which share what it has
        (step(0, 4, 0, "4", SLURM_STEP_NUM_TASKS=1), torchrun(0, 4, 0, 4)),
        (without(step(0, 4, 0, "4"), "SLURM_STEP_NODELIST"), torchrun(0, 4, 0, 4)),  # a batch script
    ],
)
def test_ranks_that_are_no_tasks_share_the_cores_of_theirs(environ, of_others):
    assert from_environment(environ | of_others | {"SLURM_CPUS_PER_TASK": "8"}).cores is None


def test_the_user_may_say_where_slurms_tasks_meet():
    topology = from_environment(step(0, 2, 0, "1(x2)", MASTER_ADDR="10.0.0.1", MASTER_PORT=5000))
    assert topology.master == "10.0.0.1:5000"


def test_torchruns_variables_win_over_slurms():
    """As in ``srun -n 2 torchrun …``, and for ranks that ``--nproc`` started inside a step."""
    environ = step(1, 2, 0, "1(x2)", nodeid=1)
    assert from_environment(environ).rank == 1
    both = from_environment(environ | torchrun(3, 4, 3, 4))
    assert both == replace(from_environment(torchrun(3, 4, 3, 4)), ends_all=True)


@pytest.mark.parametrize(
    "environ",
    [
        without(step(0, 8, 0, "4(x2)"), "SLURM_STEP_NODELIST"),  # a batch script, before any srun
        step(0, 1, 0, "1", "node07"),
        step(0, 8, 0, "1", "node07", SLURM_STEP_NUM_TASKS=1),  # a shell on a node of a larger allocation
    ],
)
def test_where_slurm_started_no_ranks_there_is_one(environ):
    assert from_environment(environ) == Topology()


@pytest.mark.parametrize("missing", ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_STEP_TASKS_PER_NODE"])
def test_half_a_slurm_step_is_no_single_rank(missing):
    text = complaint(without(step(1, 4, 1, "2(x2)"), missing))
    assert f"{missing} is not set" in text
    assert "srun" in text


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        (step(4, 4, 0, "2(x2)"), "SLURM_PROCID 4 of 4 tasks"),
        (step(0, 4, 2, "2(x2)"), "SLURM_LOCALID 2 of SLURM_STEP_TASKS_PER_NODE 2(x2)"),
        (step(0, 4, 0, "2,1"), "of 4 tasks"),
        (step(0, 4, 0, "2(x2)", nodeid=2), "SLURM_NODEID"),
        (step("one", 4, 0, "2(x2)"), "'one'"),
        (step(0, 4, 0, "two"), "'two'"),
        (step(0, 4, 0, "2(x2)", "[01-02"), "names no host"),
    ],
)
def test_slurms_variables_that_contradict_one_another(environ, named):
    assert named in complaint(environ)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[001-003],other", "node001"),
        ("node[007,009-012]", "node007"),
        ("rack[2-3]n[01,05].local,x[1-2]", "rack2n01.local"),
    ],
)
def test_the_first_host_of_a_list(nodelist, host):
    assert first_host(nodelist) == host


def test_tasks_of_each_node():
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert tasks_per_node("4") == [4]
    with pytest.raises(ValueError, match="no number of tasks"):
        tasks_per_node("2(x3")


# ---- mpirun


def mpirun(rank, size, local_rank, local_size, **more):
    """Open MPI's variables of one process."""
    values = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_SIZE": local_size}
    named = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in values.items()}
    return named | {name: str(value) for name, value in more.items()}


def hydra(rank, size, local_rank, local_size, **more):
    """The variables of MPICH's and Intel MPI's mpiexec."""
    values = {"PMI_RANK": rank, "PMI_SIZE": size, "MPI_LOCALRANKID": local_rank, "MPI_LOCALNRANKS": local_size}
    return {name: str(value) for name, value in (values | more).items()}


MPIRUNS = pytest.mark.parametrize("started", [mpirun, hydra])


@MPIRUNS
def test_processes_of_mpirun_on_one_host_are_ranks_that_meet_on_loopback(started):
    assert from_environment(started(1, 2, 1, 2)) == Topology(1, 2, 1, 2, launched=True, ends_all=True)


@MPIRUNS
def test_processes_of_mpirun_on_several_hosts_meet_where_the_user_says(started):
    topology = from_environment(started(5, 8, 1, 4, MASTER_ADDR="node-0", MASTER_PORT=5000))
    assert (topology.rank, topology.world_size) == (5, 8)
    assert (topology.local_rank, topology.local_world_size) == (1, 4)
    assert topology.master == "node-0:5000"


@MPIRUNS
@pytest.mark.parametrize("given", [{}, {"MASTER_ADDR": "127.0.0.1"}])
def test_processes_of_mpirun_on_several_hosts_need_a_host_that_all_reach(started, given):
    text = complaint(started(5, 8, 1, 4, **given))
    assert "8 processes, 4 of them on this host" in text
    assert "mpirun -x MASTER_ADDR=HOST or mpiexec -genv MASTER_ADDR HOST" in text
    met = from_environment(started(5, 8, 1, 4, **given), met=True)
    assert (met.rank, met.world_size, met.local_rank, met.local_world_size) == (5, 8, 1, 4)


@MPIRUNS
def test_a_single_process_of_mpirun_is_no_rank_of_a_launcher(started):
    assert from_environment(started(0, 1, 0, 1)) == Topology()


def test_each_call_of_open_mpis_mpirun_has_a_port_of_its_own():
    names = [f"prterun-node-{number}@1" for number in range(8)]
    ports = [from_environment(mpirun(0, 2, 0, 2, PMIX_NAMESPACE=name)).master_port for name in names]
    assert len(set(ports)) == len(names)
    assert all(61440 <= port <= 65535 for port in ports)
    assert ports[0] == from_environment(mpirun(1, 2, 1, 2, PMIX_NAMESPACE=names[0])).master_port


@MPIRUNS
def test_torchruns_variables_win_over_mpiruns(started):
    topology = from_environment(started(1, 2, 1, 2) | torchrun(3, 4, 3, 4))
    assert topology == replace(from_environment(torchrun(3, 4, 3, 4)), ends_all=True)


@MPIRUNS
def test_mpiruns_variables_win_over_those_of_the_step_that_starts_its_processes(started):
    """In an allocation mpirun has a daemon on each node, which are the tasks of a step."""
    assert from_environment(step(1, 2, 0, "1(x2)", nodeid=1) | started(3, 4, 3, 4)).rank == 3


def test_what_slurm_sets_for_mpi_is_no_mpirun():
    task = step(1, 4, 1, "4")
    assert from_environment(task | {"PMI_RANK": "1", "PMI_SIZE": "4"}) == from_environment(task)


@MPIRUNS
@pytest.mark.parametrize("missing", range(4))
def test_half_an_mpirun_is_no_single_rank(started, missing):
    environ = started(1, 2, 1, 2)
    name, *others = [list(environ)[missing], *(each for each in environ if each != list(environ)[missing])]
    text = complaint(without(environ, name))
    assert f"{name} is not set" in text
    assert f"unset {' and '.join(others)}, or" in text
    assert from_environment(without(environ, name), met=True) == Topology()
    assert "set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and MASTER_ADDR" in text


@MPIRUNS
@pytest.mark.parametrize("place", [(2, 2, 1, 2), (0, 2, 2, 2), (0, 2, 0, 4), ("one", 2, 1, 2)])
def test_mpiruns_variables_that_contradict_one_another(started, place):
    text = complaint(started(*place))
    assert "whole numbers" in text or "don't fit together" in text
    assert str(place[0]) in text


# ---- coordinator flags


def test_coordinator_flags_on_loopback_are_processes_of_this_host():
    topology = from_flags("127.0.0.1:4000", 2, 1, {})
    assert topology == Topology(1, 2, 1, 2, launched=True, master_port=4000)
    assert topology.loopback
    assert from_flags("[::1]:4000", 2, 1, {}).coordinator == "[::1]:4000"


def test_coordinator_flags_elsewhere_are_one_process_a_host():
    topology = from_flags("node-0:4000", 2, 1, {})
    assert (topology.local_rank, topology.local_world_size) == (0, 1)
    assert not topology.on_one_host
    assert topology.coordinator == "node-0:4000"


def test_coordinator_flags_win_over_slurm_and_contradict_torchrun():
    assert from_flags("node-0:4000", 2, 1, step(0, 4, 0, "2(x2)")).rank == 1
    with pytest.raises(ValueError, match=r"^coordinator: node-0:4000, but a launcher .* leave one out$"):
        from_flags("node-0:4000", 2, 1, torchrun(0, 2, 0, 2))


@pytest.mark.parametrize("port", [0, 65536])
def test_a_coordinators_port_that_is_none(port):
    with pytest.raises(ValueError, match=f"^coordinator: node-0:{port}: ports go from 1 to 65535$"):
        from_flags(f"node-0:{port}", 2, 0, {})


# ---- what a child inherits


@pytest.mark.parametrize(
    "environ",
    [torchrun(1, 2, 1, 2), step(1, 2, 1, "2"), mpirun(1, 2, 1, 2), hydra(1, 2, 1, 2), {"LOCKSTEP_LAUNCHER": "1"}],
)
def test_a_run_of_its_own_is_no_rank_of_this_one(environ):
    kept = without_launcher(environ | {"HOME": "/here"})
    assert from_environment(kept) == Topology()
    assert not started_by_lockstep(kept)
    assert kept["HOME"] == "/here"
