#!/usr/bin/env bash
# What several ranks can tell. On a machine with one GPU, which they share, each of the first two
# calls takes at most seven minutes, and the first one has what matters most:
#
#   bash tests/benchmarks/gpu-2.sh 1          NCCL, its groups, every stage in fp32 against stage 01,
#                                             compressed replicas
#   bash tests/benchmarks/gpu-2.sh 2          a node is killed and one joins, --cpu-offload, tied
#                                             weights, an async save and a resume, bf16 compiled
#
# With DEVICE=cpu, or without a GPU, the same runs on CPUs with Gloo. On a machine with two or more
# GPUs:
#
#   bash tests/benchmarks/gpu-2.sh check      every stage against stage 01, no limit of time
#   bash tests/benchmarks/gpu-2.sh measure    speed, MFU and peak memory of 02 to 09 against 01,
#                                             and of 10 against 03 on a mixture of experts
#
# The first two end with a file in $OUT, by default outputs/measured: gpu-2-ranks.md, on CPUs
# gpu-2-dry.md; measure with gpu-2.md there; check with outputs/gpu-check.md.
case ${1:-} in
  [12]) exec bash "$(dirname "$0")/gpu.sh" "ranks-$1" ;;
  check) exec bash "$(dirname "$0")/gpu.sh" check ;;
  measure) exec bash "$(dirname "$0")/gpu.sh" measure-2 ;;
  *) sed -n '2,19s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
