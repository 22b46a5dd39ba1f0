"""05-multinode/rendezvous.py: functions and commands, on real stores, sockets and processes."""

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta

import psutil
import pytest
from conftest import ROOT, TIMEOUT, environment, finish
from nodes import free_port, wait_until

pytestmark = pytest.mark.law4

STAGE = ROOT / "05-multinode"
SCRIPT = STAGE / "rendezvous.py"


def load_script():
    """rendezvous.py as a module. Its folder is not on the path of the tests."""
    specification = importlib.util.spec_from_file_location("rendezvous", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


rendezvous = load_script()


@pytest.fixture
def start():
    """A function that starts a process. All that it started is ended when the test is over."""
    with contextlib.ExitStack() as stack:

        def start_process(*command):
            process = subprocess.Popen(
                [str(word) for word in command],
                env=environment(TORCH_CPP_LOG_LEVEL="ERROR"),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            stack.callback(end_if_running, process)
            return process

        yield start_process


def end_if_running(process):
    """Ends a process and its children. A process that was waited for has no id any more."""
    if process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.kill()
    process.communicate()


def start_command(start, *words):
    """Starts a command of rendezvous.py."""
    return start(sys.executable, SCRIPT, *words)


def start_store(start, *words):
    """Starts `serve` at a free port. Returns the process and the port, once the store answers."""
    process = start_command(start, "serve", "--port", 0, *words)
    return process, int(process.stdout.readline())


def end_process(process):
    """Ends a process by SIGKILL and takes its exit code, so that its id is free."""
    process.kill()
    process.communicate()


def connect(port):
    """A client of the store at that port of this machine."""
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60))


def assert_ends_well(process):
    result = finish(process)
    assert result.returncode == 0, result.err
    return result


@contextlib.contextmanager
def listening(port=0):
    """A socket that takes connections. Yields its port."""
    with socket.create_server(("127.0.0.1", port)) as server:
        yield server.getsockname()[1]


# serve


def test_a_store_without_a_process_serves_until_a_signal(start):
    process, port = start_store(start)
    connect(port).set("key", "value")
    assert connect(port).get("key") == b"value"

    process.terminate()
    assert process.wait(TIMEOUT) == -signal.SIGTERM
    assert not rendezvous.answers("127.0.0.1", port)


def test_a_store_outlives_its_process_by_ten_seconds(start):
    """SIGTERM and SIGINT, which may reach all processes of a job, do not end it before."""
    agent = start("sleep", TIMEOUT)
    process, port = start_store(start, agent.pid)
    client = connect(port)

    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    time.sleep(3)
    assert process.poll() is None
    assert not client.check([rendezvous.LEAVING_KEY])

    end_process(agent)
    ended = time.monotonic()
    wait_until(lambda: client.check([rendezvous.LEAVING_KEY]), "the note that the store leaves")
    assert_ends_well(process)
    assert time.monotonic() - ended >= rendezvous.LEAVING_SECONDS


def test_a_store_of_a_process_that_has_already_ended_leaves_at_once(start):
    agent = start("true")
    agent.communicate()

    process, port = start_store(start, agent.pid)
    client = connect(port)
    wait_until(lambda: client.check([rendezvous.LEAVING_KEY]), "the note that the store leaves")
    assert_ends_well(process)


def test_a_store_fails_at_a_port_that_is_taken(start):
    with listening() as port:
        result = finish(start_command(start, "serve", "--port", port))
    assert result.returncode != 0
    assert "DistNetworkError" in result.err


@pytest.mark.parametrize("name", ["store", "keeper"])
def test_run_sh_serves_a_store_under_both_names(name, start):
    port = free_port()
    process = start("env", f"MASTER_PORT={port}", "bash", STAGE / "run.sh", name)
    assert process.stdout.readline() == f"{port}\n"

    connect(port).set("key", "value")
    assert connect(port).get("key") == b"value"
    assert psutil.Process(process.pid).name().startswith("python"), "run.sh becomes the store"


def test_is_running_knows_processes_that_have_ended(start):
    process = start("sleep", TIMEOUT)
    assert rendezvous.is_running(process.pid)

    process.kill()
    wait_until(
        lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE,
        "a process that has ended, and whose exit code was not read",
    )
    assert not rendezvous.is_running(process.pid)

    process.wait(TIMEOUT)
    assert not rendezvous.is_running(process.pid)


# find-address


def test_the_address_is_that_of_the_way_to_the_store():
    with listening() as port:
        assert rendezvous.find_address("127.0.0.1", port, 0) == "127.0.0.1"
        assert rendezvous.find_address("localhost", port, 0) == "127.0.0.1"


def test_a_loopback_address_is_replaced_by_one_that_others_reach():
    """As on a machine whose name stands for 127.0.1.1 in its /etc/hosts."""
    try:
        expected = rendezvous.default_address()
    except OSError as error:
        pytest.skip(f"this machine has no network: {error}")
    assert not expected.startswith("127.")
    assert rendezvous.find_interface(expected) in psutil.net_if_addrs()

    with socket.create_server(("127.0.1.1", 0)) as server:
        port = server.getsockname()[1]
        assert rendezvous.find_address("127.0.1.1", port, 0) == expected


def test_the_interface_of_an_address():
    name = rendezvous.find_interface("127.0.0.1")
    assert "127.0.0.1" in [entry.address for entry in psutil.net_if_addrs()[name]]
    assert rendezvous.find_interface("192.0.2.99") is None


def test_the_address_is_found_once_the_store_answers():
    port = free_port()
    opened = threading.Event()
    done = threading.Event()

    def listen_later():
        time.sleep(2)
        with listening(port):
            opened.set()
            done.wait(TIMEOUT)

    thread = threading.Thread(target=listen_later)
    thread.start()
    try:
        assert rendezvous.find_address("127.0.0.1", port, TIMEOUT) == "127.0.0.1"
        assert opened.is_set()
    finally:
        done.set()
        thread.join()


def test_find_address_prints_address_and_interface(start):
    with listening() as port:
        flags = ("--host", "127.0.0.1", "--port", port, "--timeout", 0)
        result = assert_ends_well(start_command(start, "find-address", *flags))
    assert result.out.split() == ["127.0.0.1", rendezvous.find_interface("127.0.0.1")]


@pytest.mark.parametrize("timeout", [0, 3])
def test_find_address_gives_up(timeout, start):
    """With one line, which names what the user has set."""
    port = free_port()
    flags = ("--host", "127.0.0.1", "--port", port, "--timeout", timeout)
    begin = time.monotonic()
    result = finish(start_command(start, "find-address", *flags))

    assert time.monotonic() - begin >= timeout
    assert result.returncode == 1
    assert result.out == ""
    (line,) = result.err.splitlines()
    start_of_line = f"run.sh: error: MASTER_ADDR, MASTER_PORT 127.0.0.1:{port}: no store there: "
    assert line.startswith(start_of_line)


# await-old-store


@pytest.mark.slow
def test_an_old_store_is_awaited_until_it_is_gone(start):
    agent = start("sleep", TIMEOUT)
    store, port = start_store(start, agent.pid)
    client = connect(port)
    end_process(agent)
    wait_until(lambda: client.check([rendezvous.LEAVING_KEY]), "the note that the store leaves")

    flags = ("--host", "127.0.0.1", "--port", port)
    assert_ends_well(start_command(start, "await-old-store", *flags))
    assert not rendezvous.answers("127.0.0.1", port)
    assert_ends_well(store)


def test_a_store_that_stays_is_not_awaited(start):
    store, port = start_store(start)
    rendezvous.await_old_store("127.0.0.1", port)
    assert store.poll() is None


def test_a_store_that_is_not_there_is_not_awaited():
    rendezvous.await_old_store("127.0.0.1", free_port())


# watch


# An agent with a worker in a session of its own, as torchrun starts it. Both write what they get.
AGENT = """
import signal, subprocess, sys, time

def stop(*_):
    print("agent: SIGTERM", flush=True)
    sys.exit(7)

signal.signal(signal.SIGTERM, stop)
worker = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
worker += "; print('ready', flush=True); time.sleep(3600)"
process = subprocess.Popen(
    [sys.executable, "-c", worker], stdout=subprocess.PIPE, start_new_session=True
)
process.stdout.readline()
print(process.pid, flush=True)
time.sleep(3600)
"""


def start_agent(start):
    """Starts an agent. Returns it, and its worker's process, which ignores SIGTERM."""
    agent = start(sys.executable, "-c", AGENT)
    return agent, psutil.Process(int(agent.stdout.readline()))


@contextlib.contextmanager
def ended_at_exit(worker):
    """Ends a worker that its agent has left behind, if the test has not."""
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.kill()


def has_ended(worker):
    """Whether a process that is no child of this one has ended."""
    return not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


def test_the_end_of_an_agent_is_also_that_of_its_workers(start):
    """The agent ends itself after SIGTERM. A worker that does not is killed after the timeout."""
    agent, worker = start_agent(start)
    with ended_at_exit(worker):
        rendezvous.end_agent(agent.pid, timeout=3)
        # The exit code is lost: psutil has read it, for the agent is a child of this process.
        agent.wait(TIMEOUT)
        assert agent.stdout.readline() == "agent: SIGTERM\n"
        wait_until(lambda: has_ended(worker), "the end of the worker")


def test_an_agent_that_has_ended_needs_no_end(start):
    agent = start("true")
    agent.communicate()
    rendezvous.end_agent(agent.pid)


@pytest.mark.slow
def test_the_watcher_ends_the_agent_when_the_store_is_gone(start):
    agent, worker = start_agent(start)
    store, port = start_store(start)
    flags = ("--host", "127.0.0.1", "--port", port, "--timeout", 2, "--agent", agent.pid)
    with ended_at_exit(worker):
        watcher = start_command(start, "watch", *flags)
        time.sleep(8)
        assert agent.poll() is None
        assert watcher.poll() is None

        end_process(store)
        assert agent.wait(TIMEOUT) == 7
        result = assert_ends_well(watcher)
        line = f"no answer from the store at 127.0.0.1:{port} for 2 s, this node leaves"
        assert result.err == f"run.sh: error: {line}\n"
        wait_until(lambda: has_ended(worker), "the end of the worker")


def test_a_watcher_that_is_the_child_of_its_agent_does_not_end_itself(start):
    """As in run.sh, which starts the watcher and then becomes the agent."""
    flags = f"--host 127.0.0.1 --port {free_port()} --timeout 0"
    command = f"'{sys.executable}' '{SCRIPT}' watch {flags} --agent $$ & exec sleep {TIMEOUT}"
    agent = start("bash", "-c", command)
    assert agent.wait(TIMEOUT) == -signal.SIGTERM
    ended = time.monotonic()
    # Reads to the end, which is there once the watcher has ended too.
    result = finish(agent)
    assert time.monotonic() - ended < rendezvous.TERMINATE_TIMEOUT / 2, "it has waited for itself"
    assert result.err.count("run.sh: error: no answer from the store") == 1
    assert "Traceback" not in result.err


@pytest.mark.slow
def test_the_watcher_bears_an_absence_shorter_than_the_timeout(start):
    """The timeout counts from the last answer, not from the start of the watcher."""
    timeout = 30
    agent = start("sleep", TIMEOUT)
    port = free_port()
    flags = ("--host", "127.0.0.1", "--port", port, "--timeout", timeout, "--agent", agent.pid)
    with listening(port):
        watcher = start_command(start, "watch", *flags)
        time.sleep(timeout + 2)

    # At least one connection fails in this time.
    time.sleep(rendezvous.WATCH_INTERVAL + 3)

    with listening(port):
        time.sleep(rendezvous.WATCH_INTERVAL + 3)
        assert agent.poll() is None
        assert watcher.poll() is None

        end_process(agent)
        assert assert_ends_well(watcher).err == ""


def test_the_watcher_ends_with_the_agent(start):
    """Also if the exit code of the agent was not read yet."""
    agent = start("sleep", TIMEOUT)
    with listening() as port:
        flags = ("--host", "127.0.0.1", "--port", port, "--timeout", 60, "--agent", agent.pid)
        watcher = start_command(start, "watch", *flags)
        time.sleep(2)
        os.kill(agent.pid, signal.SIGKILL)
        assert assert_ends_well(watcher).err == ""


# The command line.


@pytest.mark.parametrize(
    "words", [[], ["serve"], ["watch", "--host", "a"], ["serve", "--port", "x"], ["no-such"]]
)
def test_a_wrong_command_line_is_refused(words, start):
    result = finish(start_command(start, *words))
    assert result.returncode == 2
    assert "rendezvous.py" in result.err


def test_more_than_one_node_needs_an_address(start):
    result = finish(start("env", "NNODES=2", "NPROC_PER_NODE=1", "bash", STAGE / "run.sh"))
    assert result.returncode != 0
    assert "run.sh: error: more than one node needs MASTER_ADDR" in result.err
