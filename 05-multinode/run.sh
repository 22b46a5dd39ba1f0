#!/usr/bin/env bash
# Starts this stage with torchrun, on one machine or on each of several. Flags go to train-llm.py.
#
#   bash run.sh -e notes -d notes.txt                                   # one machine, all its GPUs
#   NNODES=1:4 MASTER_ADDR=10.0.0.1 bash run.sh -e notes -d notes.txt   # on 10.0.0.1, then on others
#
# On each node (machine) torchrun becomes the agent. It starts the workers, the processes that
# train, and starts them again when one fails, or when nodes leave or join. The agents agree on who
# takes part through a key-value store, which the agent at the IP address MASTER_ADDR serves. When
# that node is lost the job ends, and the same command resumes the run.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
script=${SCRIPT:-$here/train-llm.py}
python=$(command -v python || command -v python3)
workers=${NPROC_PER_NODE:-gpu}
if [[ $workers == *[!0-9]* ]]; then  # one of the words that torchrun knows
  workers=$("$python" - "$workers" <<'END'
import os, sys, torch
gpus, cpus = torch.cuda.device_count(), os.cpu_count()
number = {"gpu": gpus or 1, "cpu": cpus, "auto": gpus or cpus}.get(sys.argv[1])
print(number or sys.exit(f"run.sh: NPROC_PER_NODE={sys.argv[1]}: a number, gpu, cpu or auto"))
END
  )
fi
flags=(--standalone)

if [ "${NNODES:-1}" != 1 ]; then
  export MASTER_ADDR=${MASTER_ADDR:?the address of the node that serves the store}
  export MASTER_PORT=${MASTER_PORT:-29500}
  # The address and the interface by which this node reaches the store. By default torchrun and
  # Gloo take the address of the host's name, which is often 127.0.1.1.
  found=$("$python" - <<'END'
import os, psutil, socket, sys
name, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
try:
    store = socket.gethostbyname(name)
    if store.startswith("127.") and not name.startswith(("127.", "localhost")):
        sys.exit(f"run.sh: MASTER_ADDR={name} is {store} on this machine, where other machines do "
                 "not reach it. Set MASTER_ADDR to an IP address that they reach.")
    connection = socket.socket(type=socket.SOCK_DGRAM)
    connection.connect((store, 1))  # sends nothing, but chooses a route
    route = connection.getsockname()[0]
    address = os.environ.get("LOCAL_ADDR") or route
    if address == store:  # This node serves the store. Is the port free?
        server = socket.socket()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the store sets it
        server.bind(("", int(port)))
except OSError as error:
    sys.exit(f"run.sh: MASTER_ADDR={name}, MASTER_PORT={port}: {error.strerror}")
interfaces = {a.address: name for name, nic in psutil.net_if_addrs().items() for a in nic}
print(store, address, interfaces[route])
END
  )
  read -r store address interface <<< "$found"
  is_host=$([ "$address" = "$store" ] && echo true || echo false)
  export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}
  # NCCL tries InfiniBand and then others, VPNs among them. = means this name, not its beginning.
  export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-=$interface}
  flags=(
    --nnodes="$NNODES" --local-addr="$address" --rdzv-id="${RDZV_ID:-train-llm}"
    --rdzv-backend=c10d --rdzv-endpoint="$store:$MASTER_PORT"
    --rdzv-conf="is_host=$is_host,last_call_timeout=${LAST_CALL:-30}"  # s to wait for more nodes
  )
fi

# Threads of a worker, for what it computes on the CPU. With several workers torchrun sets 1, but
# the optimizer of --cpu-offload can use all cores.
cores=$(nproc 2> /dev/null || echo 1)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > workers ? cores / workers : 1))}
# If workers share the agents' store, a node that joins waits for an address that nobody publishes
# again, and about half of the restarts read addresses of the round before (pytorch#135712).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# Seconds that workers have to end a step and save, when the agent gets SIGTERM. The default is 30,
# which they have in any case when a node joins.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-240}
# torchrun, but Ctrl-C acts as SIGTERM does: the workers save. Of an error of the agent itself only
# the message is shown.
agent='
import signal, sys
signal.signal(signal.SIGINT, lambda number, frame: signal.raise_signal(signal.SIGTERM))
sys.tracebacklimit = 0
from torch.distributed.run import main
main()'
# An error and the loss of a node count as restarts. A mistake is met again at each of them.
exec "$python" -c "$agent" "${flags[@]}" --signals-to-handle=SIGTERM,SIGHUP,SIGQUIT \
  --nproc-per-node="$workers" --max-restarts="${MAX_RESTARTS:-3}" "$script" "$@"
