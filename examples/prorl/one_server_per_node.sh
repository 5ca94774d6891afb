#!/usr/bin/env bash
# One ProRL server on each node of a Slurm allocation. Waits until all of them listen, and prints
# PRORL_SERVER_URLS=<url>+<url>…; the servers run until the allocation ends or this script is stopped.
#
#   one_server_per_node.sh <directory that all nodes see> [settings of ng_prorl_server]
#
#   PRORL_SERVER_TOKEN   what callers must give; made here where it is not set, and kept in <directory>/token
#   PRORL_NODES          how many nodes (default: $SLURM_JOB_NUM_NODES)
#   PRORL_HOST           the address on which each of them listens (default: 0.0.0.0, all)
#   PRORL_PORT           on each of them (default: 8006)
#   PRORL_WAIT_S         how long they may take to listen (default: 300)
set -euo pipefail
directory=${1:?usage: one_server_per_node.sh <directory> [settings of ng_prorl_server]}
shift
nodes=${PRORL_NODES:-${SLURM_JOB_NUM_NODES:?run this in a Slurm allocation, or set PRORL_NODES}}
wait_s=${PRORL_WAIT_S:-300}

mkdir -p "$directory/urls" "$directory/logs"
rm -f "$directory"/urls/*
if [ -z "${PRORL_SERVER_TOKEN:-}" ]; then
    PRORL_SERVER_TOKEN=$(head -c 24 /dev/urandom | base64 | tr -d '+/=')
fi
export PRORL_SERVER_TOKEN
(umask 077 && printf '%s' "$PRORL_SERVER_TOKEN" > "$directory/token")

# shellcheck disable=SC2016 # SLURM_NODEID is each task's own
srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --overlap --output="$directory/logs/server-%t.log" \
    bash -c 'exec ng_prorl_server host="${PRORL_HOST:-0.0.0.0}" port="${PRORL_PORT:-8006}" url_file="$0/urls/$SLURM_NODEID" "$@"' \
    "$directory" "$@" &
servers=$!
trap 'kill "$servers" 2>/dev/null || true; wait "$servers" 2>/dev/null || true' EXIT

deadline=$((SECONDS + wait_s))
until [ "$(find "$directory/urls" -type f ! -name '.*' | wc -l)" -eq "$nodes" ]; do
    if ! kill -0 "$servers" 2>/dev/null || [ "$SECONDS" -ge "$deadline" ]; then
        echo "one_server_per_node: not all of $nodes servers listen; see $directory/logs" >&2
        exit 1
    fi
    sleep 0.2
done
echo "PRORL_SERVER_URLS=$(sort -V "$directory"/urls/* | paste -sd+)"
wait "$servers"
