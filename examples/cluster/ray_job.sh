#!/bin/sh
# Trains on a Ray cluster, as a Ray job: the files of this directory go along, so that modules of your own are found.
#
#   RAY_ADDRESS=http://HEAD:8265 sh ray_job.sh CartPole-v1 --total-steps 200000
#
# Submitting needs `pip install 'ray[default]'`. The job's driver runs on the head node: rank 0 starts there, and it needs
# a CPU of Ray's (a GPU with --device cuda), and a disk that outlives the job for --runs-dir.
#
# `lockstep train --launcher ray` was run on two local nodes of Ray 2.60.0, started by hand; this script itself was not
# run: there was no job server.
set -eu
: "${RUNS:=$HOME/runs}" "${NAME:=cluster}"

exec ray job submit --working-dir . -- \
    lockstep train "$@" --launcher ray --nproc 1:64 --max-restarts 100 --runs-dir "$RUNS" --name "$NAME" --resume auto
