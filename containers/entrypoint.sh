#!/bin/sh
# Checks the host, then serves. `docker run IMAGE MODEL [OPTIONS]` serves; `docker run IMAGE COMMAND ...` runs a command.
#
# SHARED_MEMORY_MIB   least size of /dev/shm (default 64 for one device; collectives between devices need 1024)
# SKIP_DOCTOR=1       serve although the doctor was not asked
set -eu

case "${1:-}" in
    serve) shift ;;
    explain | probe | doctor | diagnose | kernels | bench | chat | demo | version) exec trimaran "$@" ;;
esac

# Several devices talk through /dev/shm; a container has 64 MiB of it unless told otherwise.
needed=${SHARED_MEMORY_MIB:-64}
previous=""
for word in "$@"; do
    case "$previous $word" in
        "--tensor-parallel 1" | *" --tensor-parallel=1") ;;
        "--tensor-parallel "* | *" --tensor-parallel="*) needed=${SHARED_MEMORY_MIB:-1024} ;;
    esac
    previous=$word
done
directory=${SHARED_MEMORY_DIRECTORY:-/dev/shm}
if [ -d "$directory" ]; then
    found=$(df -Pk "$directory" | awk 'NR == 2 { print int($2 / 1024) }')
else
    found=0
fi
if [ "$found" -lt "$needed" ]; then
    echo "entrypoint: $directory has $found MiB, $needed MiB are needed: start the container with --shm-size=${needed}m" \
        "(compose: shm_size; Kubernetes: an emptyDir of medium Memory on /dev/shm)" >&2
    exit 2
fi

if [ "${SKIP_DOCTOR:-0}" != 1 ]; then
    status=0
    trimaran doctor "$@" >&2 || status=$?
    # 0: well, 1: warnings, 2: it cannot serve.
    if [ "$status" -ge 2 ]; then
        echo "entrypoint: the doctor found what must be cured first; SKIP_DOCTOR=1 serves all the same" >&2
        exit "$status"
    fi
fi

exec trimaran serve "$@"
