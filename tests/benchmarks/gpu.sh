#!/usr/bin/env bash
# What a machine with a GPU can tell, in calls of at most ten minutes each:
#
#   bash tests/benchmarks/gpu.sh test       pytest -m gpu
#   bash tests/benchmarks/gpu.sh measure    speed, MFU and peak memory of the stages
#   bash tests/benchmarks/gpu.sh peers      stage 01 against a bare loop and transformers.Trainer
#   bash tests/benchmarks/gpu.sh check      with several GPUs: every stage against stage 01, no limit
#
# Each ends with a file in $OUT, by default outputs/measured: gpu-test.txt, gpu.md, gpu-peers.md;
# check with outputs/gpu-check.md. gpu-2.sh has the calls for several ranks.
# On a machine without a network, the packages that are missing there go as wheels into .wheels.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OUT=${OUT:-outputs/measured} PYTHONUNBUFFERED=1
export MEASURED=$OUT
if [ -d .wheels ]; then
  python3 -m pip install -q --no-index --no-deps --upgrade --target /tmp/wheels .wheels/*.whl
  export PYTHONPATH=/tmp/wheels${PYTHONPATH:+:$PYTHONPATH}
fi

case ${1:-} in
  test)  # several at once: none needs more than a tenth of the GPU's memory
    python3 -m pytest -m gpu -n 12 --durations=10 | tee "$OUT/gpu-test.txt"
    ;;
  measure)
    python3 tests/benchmarks/benchmark.py gpu
    ;;
  peers)
    python3 tests/benchmarks/benchmark.py gpu-peers
    ;;
  check)
    MEASURED=outputs python3 tests/benchmarks/ranks.py check
    ;;
  ranks-1 | ranks-2)
    python3 tests/benchmarks/ranks.py "${1#ranks-}"
    ;;
  measure-2)
    python3 tests/benchmarks/benchmark.py gpu-2
    ;;
  *)
    sed -n '2,10s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
