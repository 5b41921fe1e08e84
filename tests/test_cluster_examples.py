"""The files in examples/cluster: each is listed, is what its ending says, and starts what ``lockstep train`` takes."""

import configparser
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from lockstep.config.command_line import parse_arguments

CLUSTER = Path(__file__).parents[1] / "examples" / "cluster"


def documents() -> list[dict]:
    return list(yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text()))


def pod() -> dict:
    return documents()[1]["spec"]["template"]["spec"]


def unit() -> dict[str, str]:
    parser = configparser.ConfigParser(interpolation=None, comment_prefixes="#", strict=False)
    parser.read_string((CLUSTER / "torchrun.service").read_text().replace("\\\n", " "))
    return dict(parser["Service"])


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
    return words[words.index("train") + 1 :]


@pytest.mark.parametrize("name", ["slurm.sbatch", "torchrun.service", "kubernetes.yaml"])
def test_what_a_file_starts_is_taken(name):
    words = words_of(name)
    assert "auto" in " ".join(words[-2:])
    parse_arguments(words)
    with pytest.raises(ValueError, match="unknown option"):
        parse_arguments([*words, "--nosuch"])


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


def test_the_job_script_is_one_that_bash_reads():
    done = subprocess.run(["bash", "-n", CLUSTER / "slurm.sbatch"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
