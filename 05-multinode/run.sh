#!/usr/bin/env bash
# Starts this stage with torchrun, on one machine or on each of several. Flags go to train-llm.py.
#
#   bash run.sh -e notes -d notes.txt                                  # one machine, all its GPUs
#   MASTER_ADDR=10.0.0.1 NNODES=1:4 NODE_RANK=0 bash run.sh -e notes   # on 10.0.0.1
#   MASTER_ADDR=10.0.0.1 NNODES=1:4 NODE_RANK=1 bash run.sh -e notes   # on the others, at any time
#
# A node is a machine of the job. On each node run.sh becomes the agent, which is torchrun, and the
# agent starts the workers, the processes that train. The nodes meet in a rendezvous: the agents
# agree on which nodes take part. They do so through the rendezvous store, a key-value server.
#
#          +----------------------------------------------------------+
#          |       rendezvous store, at MASTER_ADDR:MASTER_PORT       |
#          +----------------------------------------------------------+
#              ^             ^                    ^             ^
#            1 |           2 |                  1 |           2 |
#   node 0     |             |         node 1     |             |
#   +----------|-------------|---+     +----------|-------------|---+
#   |          v             |   |     |          v             |   |
#   |        agent <---3-- watch |     |        agent <---3-- watch |
#   |          ^                 |     |          ^                 |
#   |        4 |                 |     |        4 |                 |
#   |          v                 |     |          v                 |
#   |       workers <------------|--5--|----> workers               |
#   +----------------------------+     +----------------------------+
#
#   1  which nodes take part and are alive, the ranks of their workers, the address of worker 0
#   2  a connection every 5 seconds, which tests whether the store still answers
#   3  SIGTERM, once the store has not answered for STORE_TIMEOUT seconds
#   4  down: start with rank and world size, SIGTERM when nodes join or leave; up: the exit code
#   5  weights, gradients, target counts and stop flags, by NCCL or gloo
#
# Node 0 serves the store if no other machine does. The job then ends when node 0 is lost, and has
# to be started again. A store on a machine outside of the job outlives any node. Its address is the
# MASTER_ADDR of all nodes:
#
#   bash run.sh store
#
# SCRIPT          the script to start, such as ../06-streaming/train-llm.py; default: this stage's
# NPROC_PER_NODE  workers on this node; default: its number of GPUs, or 1
# NNODES          number of nodes, or from:to; default: 1
# NODE_RANK       0 on the node that serves the store if no other machine does; default: 0
# MASTER_ADDR     the address of the store's machine as the nodes reach it
# MASTER_PORT     the port of the store; default: 29500
# RDZV_ID         the name of the job, the same on all nodes. A store outside of the job needs a new
#                 name after all nodes have ended (else RendezvousClosedError); default: train-llm
# LOCAL_ADDR      the address of this node as others reach it; default: that of its way to the store
# LAST_CALL       seconds to wait for more nodes once there are enough; default: 30
# STORE_TIMEOUT   seconds after which a node that cannot reach the store leaves; default: 60
# TORCH_ELASTIC_SHUTDOWN_TIMEOUT  seconds after SIGTERM to end a step and save; default: 240
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
rendezvous=(python "$here/rendezvous.py")

SCRIPT=${SCRIPT:-$here/train-llm.py}
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
MASTER_PORT=${MASTER_PORT:-29500}
RDZV_ID=${RDZV_ID:-train-llm}
LAST_CALL=${LAST_CALL:-30}
STORE_TIMEOUT=${STORE_TIMEOUT:-60}

# `keeper` is an earlier name of `store`. A process id may follow: see `rendezvous.py serve --help`.
if [[ ${1:-} == store || ${1:-} == keeper ]]; then
  exec "${rendezvous[@]}" serve --port "$MASTER_PORT" "${@:2}"
fi

if [ -z "${NPROC_PER_NODE:-}" ]; then
  NPROC_PER_NODE=$(python -c 'import torch; print(max(1, torch.cuda.device_count()))')
fi

if [ "$NNODES" = 1 ]; then
  rendezvous_flags=(--standalone)
else
  : "${MASTER_ADDR:?run.sh: error: more than one node needs MASTER_ADDR}"
  store=(--host "$MASTER_ADDR" --port "$MASTER_PORT")
  store_answers() { "${rendezvous[@]}" find-address "${store[@]}" --timeout 0 > /dev/null 2>&1; }

  # The store of an earlier start may still be there, for the last of its nodes. When it ends,
  # TCPStore prints a stack trace that tells the user nothing.
  if [ "$NODE_RANK" = 0 ] && store_answers; then
    "${rendezvous[@]}" await-old-store "${store[@]}" 2> /dev/null
  fi

  # `exec` below keeps the process id $$ for torchrun, so the store ends after torchrun.
  if [ "$NODE_RANK" = 0 ] && ! store_answers; then
    "${rendezvous[@]}" serve --port "$MASTER_PORT" $$ > /dev/null &
  fi

  found=$("${rendezvous[@]}" find-address "${store[@]}" --timeout 600)
  read -r address interface <<< "$found"

  "${rendezvous[@]}" watch "${store[@]}" --timeout "$STORE_TIMEOUT" --agent $$ &

  # torchrun and gloo use the address of this host's name, which is often 127.0.1.1 or unknown.
  LOCAL_ADDR=${LOCAL_ADDR:-$address}
  export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}

  rendezvous_flags=(
    --rdzv-backend=c10d
    --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT"
    --rdzv-id="$RDZV_ID"
    --local-addr="$LOCAL_ADDR"
    # is_host=false: else the first agent serves a store itself, which ends with that agent.
    --rdzv-conf="is_host=false,last_call_timeout=$LAST_CALL"
  )
fi

# If workers share the agents' store, a node that joins waits for an address that nobody publishes
# again, and about half of the restarts read addresses of the round before (pytorch#135712).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# The default is 30 s. Before torch 2.13 it could not be changed.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-240}

# Each time that a node dies or leaves counts as a restart.
exec torchrun "${rendezvous_flags[@]}" \
  --nnodes="$NNODES" \
  --nproc-per-node="$NPROC_PER_NODE" \
  --max-restarts=100 \
  "$SCRIPT" "$@"
