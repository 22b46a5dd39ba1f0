#!/usr/bin/env bash
# Starts this rung with torchrun, here or on each of several machines. All flags go to train-llm.py.
#
#   bash run.sh -e notes -d notes.txt                                      # one machine, all its GPUs
#   MASTER_ADDR=10.0.0.1 NNODES=1:4 NODE_RANK=0 bash run.sh -e notes       # on 10.0.0.1
#   MASTER_ADDR=10.0.0.1 NNODES=1:4 NODE_RANK=1 bash run.sh -e notes       # on others, at any time
#
# Nodes meet at a store. Node 0 keeps it, and when node 0 dies the job has to be started again.
# Kept on a machine outside of the job, MASTER_ADDR for all nodes, it outlives each of them:
#
#   bash run.sh keeper
#
# NPROC_PER_NODE  processes on this node; default: its GPUs, or 1
# NNODES          how many nodes, or from:to; default: 1
# NODE_RANK       0 keeps the store if nobody else does; default: 0
# MASTER_ADDR     the address of the store's machine as others reach it
# MASTER_PORT     its port; default: 29500
# RDZV_ID         the name of the job, the same on all nodes; a keeper needs a new one for each start
#                 after all nodes have ended (else RendezvousClosedError)
# LOCAL_ADDR      the address of this node as others reach it; default: the one that reaches the store
# LAST_CALL       seconds in which more nodes are awaited once enough are there; default: 30
# STORE_TIMEOUT   seconds after which a node leaves that cannot reach the store; default: 60
# TORCH_ELASTIC_SHUTDOWN_TIMEOUT  seconds after SIGTERM to end a step and save; default: 240
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
: "${NNODES:=1}" "${NODE_RANK:=0}" "${MASTER_PORT:=29500}" "${RDZV_ID:=train-llm}" "${LAST_CALL:=30}"
: "${STORE_TIMEOUT:=60}"

if [ "${1:-}" = keeper ]; then  # with a process id behind it: until ten seconds after that one's end
  exec python -c '
import signal, sys, time
import psutil
from torch.distributed import TCPStore
if len(sys.argv) > 2:  # who stops the job stops this too early: agents still need it
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
store = TCPStore("localhost", int(sys.argv[1]), is_master=True, wait_for_workers=False)
print(store.port, flush=True)
while len(sys.argv) < 3 or psutil.pid_exists(int(sys.argv[2])):
    time.sleep(1)
store.set("leaving", "")
time.sleep(10)' "$MASTER_PORT" "${@:2}"
fi

: "${NPROC_PER_NODE:=$(python -c 'import torch; print(max(1, torch.cuda.device_count()))')}"
if [ "$NNODES" = 1 ]; then
  meet=(--standalone)
else
  : "${MASTER_ADDR:?run.sh: error: more than one node needs MASTER_ADDR}"
  # The address of this node and its network interface, once the store answers.
  find='
import socket, sys, time
import psutil
host, port, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
end = time.monotonic() + seconds
while True:
    try:
        with socket.create_connection((host, port), timeout=5) as connection:
            address = connection.getsockname()[0]
        # Many machines know themselves by their name as 127.0.1.1, where others do not find them.
        if address.startswith("127.") and host not in ("localhost", "127.0.0.1"):
            with socket.socket(type=socket.SOCK_DGRAM) as connection:
                connection.connect(("192.0.2.1", 9))  # sends nothing, but asks for the way out
                address = connection.getsockname()[0]
        break
    except OSError as error:
        if time.monotonic() > end:
            sys.exit(f"run.sh: error: MASTER_ADDR, MASTER_PORT {host}:{port}: no store there: {error}")
        time.sleep(1)
names = [n for n, all in psutil.net_if_addrs().items() if address in [a.address for a in all]]
print(address, *names[:1])'
  # The store of the start before may still be there for the last of its nodes.
  old='
import contextlib, sys, time
from datetime import timedelta
from torch.distributed import TCPStore
with contextlib.suppress(Exception):
    while TCPStore(sys.argv[1], int(sys.argv[2]), timeout=timedelta(seconds=5)).check(["leaving"]):
        time.sleep(1)'
  answers() { python -c "$find" "$MASTER_ADDR" "$MASTER_PORT" 0 > /dev/null 2>&1; }
  if [ "$NODE_RANK" = 0 ] && answers; then
    python -c "$old" "$MASTER_ADDR" "$MASTER_PORT" 2> /dev/null
  fi
  if [ "$NODE_RANK" = 0 ] && ! answers; then
    # exec keeps the process id, so the store ends with torchrun.
    bash "$here/run.sh" keeper $$ > /dev/null &
  fi
  found=$(python -c "$find" "$MASTER_ADDR" "$MASTER_PORT" 600)
  read -r address interface <<< "$found"
  # Where a cable is cut torchrun waits for the store for as long as TCP does: a quarter of an hour.
  watch='
import os, socket, sys, time
import psutil
host, port, patience, agent = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
answered = time.monotonic()
while psutil.pid_exists(agent) and psutil.Process(agent).status() != psutil.STATUS_ZOMBIE:
    try:
        socket.create_connection((host, port), timeout=5).close()
        answered = time.monotonic()
    except OSError as error:
        if time.monotonic() > answered + patience:
            break
    time.sleep(5)
else:
    sys.exit()
print(f"run.sh: error: no answer from the store at {host}:{port} for {patience} s, this node leaves",
      file=sys.stderr)
family = [psutil.Process(agent), *psutil.Process(agent).children(recursive=True)]
family = [process for process in family if process.pid != os.getpid()]
family[0].terminate()
for process in psutil.wait_procs(family, timeout=30)[1]:
    process.kill()'
  python -c "$watch" "$MASTER_ADDR" "$MASTER_PORT" "$STORE_TIMEOUT" $$ &
  # torchrun takes the host's name for its address, which on many machines means 127.0.1.1 or nothing.
  : "${LOCAL_ADDR:=$address}"
  # gloo does the same.
  export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}
  meet=(--local-addr="$LOCAL_ADDR" --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT")
  # Else the first agent makes itself the store's host, and the store dies with it.
  meet+=(--rdzv-id="$RDZV_ID" --rdzv-conf="is_host=false,last_call_timeout=$LAST_CALL")
fi

# With the agents' store shared, workers read the addresses of the round before: a node that joins
# hangs, and so do half of the restarts (pytorch#135712).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# 30 s are the default, and before torch 2.13 the only choice.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-240}
# A restart is counted each time that a node of the job dies or leaves.
exec torchrun "${meet[@]}" --nnodes="$NNODES" --nproc-per-node="$NPROC_PER_NODE" \
  --max-restarts=100 "$here/train-llm.py" "$@"
