"""The files in examples/cluster: each is listed, is what its ending says, and starts what ``lockstep train`` takes."""

import configparser
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from lockstep.config.command_line import parse_arguments
from lockstep.core.files import write_json

CLUSTER = Path(__file__).parents[1] / "examples" / "cluster"


def documents() -> list[dict]:
    return list(yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text()))


def pod() -> dict:
    return documents()[1]["spec"]["template"]["spec"]


def unit() -> dict[str, str]:
    parser = configparser.ConfigParser(interpolation=None, comment_prefixes="#", strict=False)
    parser.read_string((CLUSTER / "torchrun.service").read_text().replace("\\\n", " "))
    return dict(parser["Service"])


def torchrun_words(name: str) -> list[str]:
    """What stands behind ``torchrun`` in a file, with ``=`` or without."""
    words = pod()["containers"][0]["command"] if name == "kubernetes.yaml" else shlex.split(unit()["execstart"])
    start = next(n for n, word in enumerate(words) if word.endswith("torchrun"))
    return [part for word in words[start + 1 :] for part in word.split("=", 1)]


def variables_of(name: str) -> set[str]:
    """The environment variables that a file sets."""
    if name == "kubernetes.yaml":
        return {variable["name"] for variable in pod()["containers"][0]["env"]}
    return set(re.findall(r"^Environment=(\w+)=", (CLUSTER / name).read_text(), re.MULTILINE))


def words_of(name: str) -> list[str]:
    """What stands behind ``lockstep train`` in a file."""
    if name == "kubernetes.yaml":
        words = pod()["containers"][0]["command"]
    elif name == "torchrun.service":
        words = shlex.split(unit()["execstart"])
    else:
        text = (CLUSTER / name).read_text().replace("\\\n", " ")
        (line,) = re.findall(r"^srun .*", text, re.MULTILINE)
        line = line.replace('"$@"', "CartPole-v1").replace("$SLURM_JOB_NAME", "name")
        words = shlex.split(line)
    return [part for word in words[words.index("train") + 1 :] for part in word.split("=", 1)]


@pytest.mark.parametrize("name", ["slurm.sbatch", "torchrun.service", "kubernetes.yaml"])
def test_what_a_file_starts_is_taken(name):
    words = words_of(name)
    assert "auto" in " ".join(words[-2:])
    parse_arguments(words)
    with pytest.raises(ValueError, match="unknown option"):
        parse_arguments([*words, "--nosuch"])


@pytest.mark.parametrize(("name", "hosts"), [("torchrun.service", "1:4"), ("kubernetes.yaml", "2")])
def test_agents_that_come_and_go_keep_no_address_of_an_earlier_round(name, hosts):
    words = torchrun_words(name)
    assert words[words.index("--nnodes") + 1] == hosts
    comes_and_goes = ":" in hosts
    assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE" in variables_of(name)) == comes_and_goes
    assert ({"--local-addr", "--rdzv-conf", "--collective-timeout"} <= set(words)) == comes_and_goes


def test_the_unit_gives_each_host_an_address_of_its_own():
    words = torchrun_words("torchrun.service")
    assert "OWN_ADDRESS" in variables_of("torchrun.service")
    assert words[words.index("--local-addr") + 1] == "${OWN_ADDRESS}"


DONE = {"torchrun.service": 1, "kubernetes.yaml": 0}
"""What is said to whoever asks whether to start: systemd skips a unit then, a pod ends well."""


@pytest.mark.parametrize("name", DONE)
@pytest.mark.parametrize("status", ["finished", "stopped by signal 15", None])
def test_a_run_that_is_done_is_not_started_again(tmp_path, name, status):
    if status is not None:
        summary = tmp_path / "runs" / words_of(name)[words_of(name).index("--name") + 1] / "summary.json"
        summary.parent.mkdir(parents=True)
        write_json(summary, {"status": status, "iteration": 8})
    if name == "kubernetes.yaml":
        command = pod()["containers"][0]["command"]
        command = [*command[: command.index("torchrun")], "sh", "-c", "exit 7"]  # in place of torchrun
    else:
        command = shlex.split(unit()["execcondition"])
    code = subprocess.run(command, cwd=tmp_path, check=False).returncode
    assert code == (DONE[name] if status == "finished" else {"torchrun.service": 0, "kubernetes.yaml": 7}[name])


def test_the_list_names_every_file():
    listed = re.findall(r"\]\(([\w.-]+)\)", (CLUSTER / "README.md").read_text())
    assert sorted(listed) == sorted(path.name for path in CLUSTER.iterdir() if path.name != "README.md")


def test_pods_meet_where_the_service_and_the_job_say():
    service, job = documents()
    name = service["metadata"]["name"]
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod()["subdomain"] == name
    command = pod()["containers"][0]["command"]
    port = service["spec"]["ports"][0]["port"]
    assert f"--rdzv-endpoint={job['metadata']['name']}-0.{name}:{port}" in command
    assert f"--nnodes={job['spec']['completions']}" in command
    mounted = {mount["name"] for mount in pod()["containers"][0]["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod()["volumes"]}


@pytest.mark.parametrize("name", ["slurm.sbatch", "ray_job.sh"])
def test_the_job_script_is_one_that_bash_reads(name):
    done = subprocess.run(["bash", "-n", CLUSTER / name], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
