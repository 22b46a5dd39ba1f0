#!/usr/bin/env bash
# Starts a script on several ranks that share one GPU, and communicate through NCCL:
#
#   bash tests/benchmarks/ranks.sh 2 03-fsdp/train-llm.py --max-steps 20
#
# NCCL refuses two ranks on one GPU. Up to 2.29 it compares the names of their hosts, so each rank
# says that it is on a host of its own. NCCL 2.30, which comes with PyTorch 2.14, has a switch. Each
# rank takes GPU 0, because it has the local rank 0. They send through sockets, and share the GPU by
# turns, so their speed says nothing about several GPUs. Without a GPU the script uses Gloo.
# `source ranks.sh` sets the variables only.
export NCCL_NET=Socket NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1
export NCCL_MNNVL_ENABLE=0 NCCL_NVLS_ENABLE=0 NCCL_MAX_CTAS=4 GLOO_SOCKET_IFNAME=lo
python=${PYTHON:-python3}
as_own_host='NCCL_HOSTID=host$RANK'
version=$("$python" -c 'from importlib.metadata import version; print(version("torch"))')
if [ "$(printf '%s\n' 2.14 "$version" | sort -V | head -n 1)" = 2.14 ]; then
  export NCCL_MULTI_RANK_GPU_ENABLE=1
  as_own_host=
fi

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  set -euo pipefail
  ranks=$1
  shift
  exec "$python" -m torch.distributed.run --standalone --local-addr 127.0.0.1 \
    --nproc-per-node "$ranks" --no-python \
    bash -c "$as_own_host LOCAL_RANK=0 exec \"\$@\"" bash "$python" -u "$@"
fi
