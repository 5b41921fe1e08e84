#!/bin/sh
# Trains on a Ray cluster, as a Ray job: the files of this directory go along, so that modules of your own are found.
#
#   RAY_ADDRESS=http://HEAD:8265 RUNS=/data/runs sh ray_job.sh CartPole-v1 --total-steps 200000
#
# Submitting needs `pip install 'ray[default]'`. The job's driver runs on the head node: rank 0 starts there, and it needs
# a CPU of Ray's (a GPU with --device cuda), and a disk that outlives the job for $RUNS: an absolute path there. It has no
# default, for the home directory of this machine may be none of the head node's.
# With --engine jax, which takes no range of processes, give their number: NPROC=4.
# `ray job stop` gives the job 3 seconds before it kills it; the variable below makes it wait for an iteration, its
# checkpoint and the last copy to a mirror.
#
# `lockstep train --launcher ray` was run on two local nodes of Ray 2.60.0, started by hand; this script itself was not
# run: there was no job server.
set -eu
: "${RUNS:?where runs lie on the head node, an absolute path}" "${NAME:=cluster}" "${NPROC:=1:64}"

exec ray job submit --working-dir . --runtime-env-json '{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "120"}}' -- \
    lockstep train "$@" --launcher ray --nproc "$NPROC" --max-restarts 100 --runs-dir "$RUNS" --name "$NAME" --resume auto
