#!/usr/bin/env bash
# What a machine with two or more GPUs can tell, in calls of at most ten minutes each:
#
#   bash tests/benchmarks/gpu-2.sh test       what no test on CPUs reaches: a 2-D mesh, the hook, sends
#                                             between pipeline stages, an async save, a restart
#   bash tests/benchmarks/gpu-2.sh measure    speed, MFU and peak memory of 02 to 08 against 01
#
# Each ends with a file in $OUT, by default outputs/measured: gpu-2-test.txt, gpu-2.md.
exec bash "$(dirname "$0")/gpu.sh" "${1:?is test or measure}-2"
