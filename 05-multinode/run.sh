#!/usr/bin/env bash
# Starts this stage with torchrun, on one machine or on each of several. Flags go to train-llm.py.
#
#   bash run.sh -e notes -d notes.txt                                   # one machine, all its GPUs
#   NNODES=1:4 MASTER_ADDR=10.0.0.1 bash run.sh -e notes -d notes.txt   # on each machine, any time
#
# On each node (machine) torchrun becomes the agent. It starts the workers, the processes that
# train, and starts them again when one fails, or when nodes leave or join. The agents agree on who
# takes part through a key-value store, which the agent at the IP address MASTER_ADDR serves. When
# that node is lost the job ends, and the same command resumes the run.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
script=${SCRIPT:-$here/train-llm.py}
workers=${NPROC_PER_NODE:-$(python -c 'import torch; print(max(1, torch.cuda.device_count()))')}
flags=(--standalone)

if [ "${NNODES:-1}" != 1 ]; then
  # The address and the interface by which this node reaches the store. By default torchrun and
  # Gloo take the address of the host's name, which is often 127.0.1.1.
  found=$(python - "${MASTER_ADDR:?the address of the node that serves the store}" <<'END'
import psutil, socket, sys
store = socket.gethostbyname(sys.argv[1])
connection = socket.socket(type=socket.SOCK_DGRAM)
connection.connect((store, 1))  # sends nothing, but chooses a route
address = connection.getsockname()[0]
addresses = {a.address: name for name, nic in psutil.net_if_addrs().items() for a in nic}
print(store, address, addresses[address])
END
  )
  read -r store address interface <<< "$found"
  address=${LOCAL_ADDR:-$address}
  is_host=$([ "$address" = "$store" ] && echo true || echo false)
  export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}
  flags=(
    --nnodes="$NNODES" --local-addr="$address" --rdzv-id="${RDZV_ID:-train-llm}"
    --rdzv-backend=c10d --rdzv-endpoint="$store:${MASTER_PORT:-29500}"
    --rdzv-conf="is_host=$is_host,last_call_timeout=${LAST_CALL:-30}"  # s to wait for more nodes
  )
fi

# If workers share the agents' store, a node that joins waits for an address that nobody publishes
# again, and about half of the restarts read addresses of the round before (pytorch#135712).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# Seconds that workers have to end a step and save, when the agent gets SIGTERM. The default is 30,
# which they have in any case when a node joins.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-240}
# An error and the loss of a node count as restarts. A mistake is met again at each of them.
exec torchrun "${flags[@]}" --nproc-per-node="$workers" --max-restarts="${MAX_RESTARTS:-3}" \
  "$script" "$@"
