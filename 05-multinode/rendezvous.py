"""The rendezvous store of a job on several nodes. run.sh calls the commands of this file.

The nodes of a job meet in a rendezvous: the agents (one torchrun on each node) agree on which nodes
take part, and on the rank of each worker (a process that trains). They do so through a rendezvous
store, a key-value server (`torch.distributed.TCPStore`) at an address that all nodes know.

    python rendezvous.py serve --port 29500
    python rendezvous.py find-address --host 10.0.0.1 --port 29500 --timeout 600
    python rendezvous.py await-old-store --host 10.0.0.1 --port 29500
    python rendezvous.py watch --host 10.0.0.1 --port 29500 --timeout 60 --agent 1234

An error is one line that begins with `run.sh: error:`, because run.sh is what its reader started.
"""

import argparse
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta

import psutil

# torch is imported in the two functions that use it. Its import takes seconds.

LEAVING_KEY = "leaving"  # a store that has this key ends within LEAVING_SECONDS
LEAVING_SECONDS = 10
CONNECT_TIMEOUT = 5  # seconds
WATCH_INTERVAL = 5  # seconds
TERMINATE_TIMEOUT = 30  # seconds between SIGTERM and SIGKILL


def main():
    args = parse_args()

    if args.command == "serve":
        serve(args.port, args.pid)

    elif args.command == "find-address":
        print_address(args.host, args.port, args.timeout)

    elif args.command == "await-old-store":
        await_old_store(args.host, args.port)

    elif args.command == "watch":
        watch(args.host, args.port, args.timeout, args.agent)


def parse_args():
    """Parses the command and its flags. Wrong ones end the process with exit code 2."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)

    command = commands.add_parser("serve", help="serve a store and print its port")
    command.add_argument("--port", type=int, required=True, help="0 takes a free port")
    command.add_argument(
        "pid", type=int, nargs="?", help="serve until 10 s after the end of this process"
    )

    command = commands.add_parser(
        "find-address", help="print the address of this node and its network interface"
    )
    add_store_flags(command)
    command.add_argument(
        "--timeout", type=int, required=True, help="seconds to wait for the store; 0 tries once"
    )

    command = commands.add_parser(
        "await-old-store", help="wait for the end of a store that an earlier start has left"
    )
    add_store_flags(command)

    command = commands.add_parser("watch", help="end the agent when the store stops answering")
    add_store_flags(command)
    command.add_argument(
        "--timeout", type=int, required=True, help="seconds without an answer from the store"
    )
    command.add_argument("--agent", type=int, required=True, help="the process id of torchrun")

    return parser.parse_args()


def add_store_flags(command):
    """Adds the flags that say where the store is."""
    command.add_argument("--host", required=True, help="the store's machine, MASTER_ADDR")
    command.add_argument("--port", type=int, required=True, help="the store's port, MASTER_PORT")


# serve


def serve(port, pid=None):
    """Serves a rendezvous store at a port of this machine, and prints that port.

    Without `pid` it serves until a signal ends it. With `pid`, the id of a process, it serves until
    `LEAVING_SECONDS` after the end of that process: the agents of other nodes may still need it.
    Raises `torch.distributed.DistNetworkError` if the port is taken.
    """
    if pid is not None:
        # Ctrl-C and `kill` may reach all processes of the job. To stop, the agents need the store.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    from torch.distributed import TCPStore

    store = TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    print(store.port, flush=True)

    while pid is None or is_running(pid):
        time.sleep(1)

    store.set(LEAVING_KEY, "")
    time.sleep(LEAVING_SECONDS)


def is_running(pid):
    """Returns whether a process has this id, and has not ended.

    A process that has ended keeps its id as a zombie, until its parent has read its exit code.
    """
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# find-address


def print_address(host, port, timeout):
    """Prints the address of this node and the name of its network interface, if it has one.

    Waits up to `timeout` seconds for the store, then ends the process with an error line.
    """
    try:
        address = find_address(host, port, timeout)
    except OSError as error:
        sys.exit(f"run.sh: error: MASTER_ADDR, MASTER_PORT {host}:{port}: no store there: {error}")

    print(address, find_interface(address) or "")


def find_address(host, port, timeout):
    """Returns the address of this node as the other nodes reach it, once the store answers.

    Tries once a second for `timeout` seconds, then raises the `OSError` of the last try.
    """
    deadline = time.monotonic() + timeout

    while True:
        try:
            return address_towards(host, port)
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(1)


def address_towards(host, port):
    """Returns the address from which this node reaches the store.

    Raises `OSError` if the store does not answer.
    """
    with socket.create_connection((host, port), timeout=CONNECT_TIMEOUT) as connection:
        address = connection.getsockname()[0]

    # Many machines resolve their own name to 127.0.1.1, an address that no other machine can use.
    is_loopback = address.startswith("127.")
    if is_loopback and host not in ("localhost", "127.0.0.1"):
        return default_address()

    return address


def default_address():
    """Returns the address from which this node reaches the rest of the network.

    Raises `OSError` if there is no route.
    """
    with socket.socket(type=socket.SOCK_DGRAM) as connection:
        # Connecting a UDP socket sends nothing. The system only chooses the route.
        connection.connect(("192.0.2.1", 9))
        return connection.getsockname()[0]


def find_interface(address):
    """Returns the name of the network interface that has this address, or None."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in [entry.address for entry in addresses]:
            return name
    return None


# await-old-store


def await_old_store(host, port):
    """Waits for the end of the store of an earlier start of the job.

    Such a store is there for up to `LEAVING_SECONDS` and says that it is leaving. If the store does
    not say so, it may be used. Then, or if there is no store, this returns at once. Raises nothing.
    """
    from torch.distributed import TCPStore

    timeout = timedelta(seconds=CONNECT_TIMEOUT)

    # Errors of torch.distributed are RuntimeErrors. TCPStore raises one when the store is gone.
    with suppress(RuntimeError):
        while TCPStore(host, port, timeout=timeout).check([LEAVING_KEY]):
            time.sleep(1)


# watch


def watch(host, port, timeout, agent):
    """Ends the agent, a process id, when the store has not answered for `timeout` seconds.

    Where a network cable is cut, torchrun itself waits for the store for as long as TCP does, which
    is a quarter of an hour. Returns when the agent has ended, for whatever reason.
    """
    last_answer = time.monotonic()

    while is_running(agent):
        if answers(host, port):
            last_answer = time.monotonic()

        elif time.monotonic() > last_answer + timeout:
            print(
                f"run.sh: error: no answer from the store at {host}:{port} for {timeout} s, "
                "this node leaves",
                file=sys.stderr,
                flush=True,
            )
            end_agent(agent)
            return

        time.sleep(WATCH_INTERVAL)


def answers(host, port):
    """Returns whether something listens there. Takes at most `CONNECT_TIMEOUT` seconds."""
    try:
        socket.create_connection((host, port), timeout=CONNECT_TIMEOUT).close()
        return True
    except OSError:
        return False


def end_agent(pid, timeout=TERMINATE_TIMEOUT):
    """Sends SIGTERM to the agent, then SIGKILL to what is left after `timeout` seconds.

    The agent passes SIGTERM on to its workers, which save a checkpoint. The workers are listed
    first, because they cannot be found any more once the agent has ended.
    """
    try:
        agent = psutil.Process(pid)
        family = [agent, *agent.children(recursive=True)]
        agent.terminate()
    except psutil.NoSuchProcess:
        return

    # run.sh starts this process before it becomes the agent, so this is a child of the agent too.
    others = [process for process in family if process.pid != os.getpid()]

    _, alive = psutil.wait_procs(others, timeout=timeout)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()


if __name__ == "__main__":
    main()
