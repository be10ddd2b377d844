#!/bin/bash
# Every host-side figure of docs/performance.md on one machine, in one run; results and logs go into a folder.
#   tools/measure_machine.sh OUT [TESTS...]      TESTS: paths for pytest, run last; none by default
# Needs an environment in which `import trimaran` works, with the test extra and the demo model.
set -u
out=$1
shift
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$out"
export OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=0 PYTHONUNBUFFERED=1
{
    date -u
    uname -srm
    nproc
    lscpu | grep -E "Model name|Thread|Core" || true
    python3 -c 'import sys, torch, msgspec, zmq, granian, uvloop; print(sys.version); print("torch", torch.__version__)'
} >"$out/machine.txt" 2>&1
python3 -m trimaran.engine_core.bench >"$out/engine.json" 2>"$out/engine.log"
for frontends in 1 2 4; do
    python3 "$here/bench_host.py" --frontends $frontends >"$out/host_$frontends.json" 2>"$out/host_$frontends.log"
done
python3 "$here/bench_life.py" --idle 60 >"$out/life.json" 2>"$out/life.log"
python3 "$here/bench_cpu.py" --threads "${THREADS:-2}" >"$out/cpu.json" 2>"$out/cpu.log"
if [ $# -gt 0 ]; then
    (cd "$here/.." && python3 -m pytest -q -p no:cacheprovider --timeout 100 -m "not long and not gpu" "$@" >"$out/tests.log" 2>&1)
fi
tail -n 3 "$out"/*
