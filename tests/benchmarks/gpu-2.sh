#!/usr/bin/env bash
# What several ranks can tell. On a machine with one GPU, which they share, each call takes at most
# seven minutes, and the first one has what matters most:
#
#   bash tests/benchmarks/gpu-2.sh 1          NCCL, its groups, every stage in fp32 against stage 01
#                                             (10, 09, 08, 07, 04, the rest), compressed replicas
#   bash tests/benchmarks/gpu-2.sh 2          a node is killed and one joins, --cpu-offload, tied
#                                             weights, an async save and a resume, bf16 compiled
#   bash tests/benchmarks/gpu-2.sh 3          the tests for two GPUs, on one
#
# With DEVICE=cpu, or without a GPU, the same runs on CPUs with Gloo. On a machine with two or more
# GPUs:
#
#   bash tests/benchmarks/gpu-2.sh test       what no test on CPUs reaches
#   bash tests/benchmarks/gpu-2.sh measure    speed, MFU and peak memory of 02 to 09 against 01,
#                                             and of 10 against 03 on a mixture of experts
#
# Each ends with a file in $OUT, by default outputs/measured: gpu-2-ranks.md (on CPUs gpu-2-dry.md),
# gpu-2-ranks-test.txt, gpu-2-test.txt, gpu-2.md.
case ${1:-} in
  [123]) exec bash "$(dirname "$0")/gpu.sh" "ranks-$1" ;;
  test | measure) exec bash "$(dirname "$0")/gpu.sh" "$1-2" ;;
  *) sed -n '2,20s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
