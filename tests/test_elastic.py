"""Stage 05: the set of machines may change at any time, and the experiment does not notice."""

import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile

import pytest
from bench_common import two_nodes
from conftest import (
    FAULTS,
    end,
    environment,
    finish,
    fork,
    load,
    metrics,
    mount_small_disk,
    mutant,
    same_bits,
    script,
)
from nodes import (
    FLAGS,
    INTERVAL,
    Node,
    assert_the_curve,
    free_port,
    job,
    join,
    last_step,
    named,
    restarts,
    wait_until,
    world_size,
)

import plan

pytestmark = pytest.mark.law4

# A checkpoint may be in the making when a node dies: then the one before is used.
MOST = 2 * INTERVAL
FIRST = "step-00000005"


def advance(folder, steps, *nodes):
    """Until the run has made some more steps."""
    goal = last_step(folder / "a") + steps
    wait_until(lambda: last_step(folder / "a") >= goal, f"step {goal}", nodes)


def until_world(folder, size, *nodes):
    wait_until(lambda: world_size(folder / "a") == size, f"a world of {size}", nodes)


def stop(folder, curve, *nodes):
    """SIGTERM to all nodes: nothing is lost. Then the curve is that of one process."""
    for node in nodes:
        node.signal(signal.SIGTERM)
    assert all(node.wait() != 0 for node in nodes), "0 would say that the training is complete"
    steps = last_step(folder / "a")
    assert (folder / "a" / f"step-{steps:08d}").exists()
    assert list(metrics(folder / "a")) == list(range(1, steps + 1))
    assert_the_curve(folder, curve)
    return steps


def assert_restarts(nodes, *expected):
    """Each restart was said in plain words: the new world size, and at most so many steps again."""
    said = restarts(*nodes)
    assert [change[:2] for change in said] == [
        (number, size) for number, (size, _) in enumerate(expected, 1)
    ]
    for (_, _, repeated), (_, most) in zip(said, expected, strict=True):
        assert repeated <= most


@pytest.mark.slow
def test_nodes_leave_and_join_and_no_step_is_lost(curve, tmp_path):
    """On SIGTERM all save after the same step, and so they do when a node joins. Then the run is
    finished on one node: torchrun ends with 0."""
    with job(tmp_path) as start_node:
        one, other = start_node("A", *named(tmp_path)), start_node("B", *named(tmp_path))
        until_world(tmp_path, 2, one, other)
        advance(tmp_path, 5, one, other)
        other.signal(signal.SIGTERM)
        assert other.wait() != 0
        until_world(tmp_path, 1, one)
        advance(tmp_path, 5, one)
        new = join(lambda: start_node("C", *named(tmp_path)), one)
        until_world(tmp_path, 2, one, new)
        advance(tmp_path, 5, one, new)
        steps = stop(tmp_path, curve, one, new)
        assert_restarts([one, new], (1, 0), (2, 0))
        last = start_node("D", *named(tmp_path, steps + 3), LOCAL_ADDR="127.0.0.1")
        assert last.wait() == 0, last.said()
    assert_the_curve(tmp_path, curve)
    line = metrics(tmp_path / "a")[steps + 3]
    assert (line["elastic/restarts"], line["elastic/steps_lost"]) == (3, 0)
    assert (tmp_path / "a" / "final_model").exists()


@pytest.mark.slow
def test_a_node_dies_and_is_replaced(curve, tmp_path):
    """Agent and worker, by kill -9. Of three: 8 sequences do not divide by them."""
    with job(tmp_path) as start_node:
        nodes = [start_node(name, *named(tmp_path)) for name in "ABC"]
        until_world(tmp_path, 3, *nodes)
        advance(tmp_path, INTERVAL + 5, *nodes)
        nodes.pop().kill()
        until_world(tmp_path, 2, *nodes)
        nodes.append(join(lambda: start_node("D", *named(tmp_path)), *nodes))
        until_world(tmp_path, 3, *nodes)
        advance(tmp_path, 5, *nodes)
        stop(tmp_path, curve, *nodes)
        assert_restarts(nodes, (2, MOST), (3, 0))


# The command of chapter 05.
STORE = (
    "import signal, torch.distributed as dist; "
    'store = dist.TCPStore("0.0.0.0", {port}, is_master=True, wait_for_workers=False); '
    "signal.pause()"
)


@pytest.mark.slow
def test_a_store_outside_of_the_job_outlives_each_of_its_nodes(curve, tmp_path):
    """Also that of rank 0."""
    port = free_port()
    command = [sys.executable, "-c", STORE.format(port=port)]
    store = subprocess.Popen(command, env=environment(), start_new_session=True)
    try:
        with job(tmp_path, store="127.0.0.9", MASTER_PORT=str(port)) as start_node:
            nodes = [start_node(name, *named(tmp_path)) for name in "AB"]
            until_world(tmp_path, 2, *nodes)
            advance(tmp_path, INTERVAL + 5, *nodes)
            first = next(node for node in nodes if "step " in node.said())
            first.kill()
            (other,) = [node for node in nodes if node is not first]
            until_world(tmp_path, 1, other)
            advance(tmp_path, 5, other)
            stop(tmp_path, curve, other)
            assert_restarts([other], (1, MOST))
    finally:
        store.kill()
        store.wait()


@pytest.mark.slow
def test_the_node_that_serves_the_store_dies(curve, tmp_path):
    """The other ends with an error. The same commands resume the run."""
    with job(tmp_path) as start_node:
        first, other = start_node("A", *named(tmp_path)), start_node("B", *named(tmp_path))
        until_world(tmp_path, 2, first, other)
        advance(tmp_path, INTERVAL + 5, first, other)
        first.kill()
        assert other.wait() != 0
        new = start_node("C", *named(tmp_path), LOCAL_ADDR="127.0.0.1")
        nodes = new, start_node("D", *named(tmp_path))
        until_world(tmp_path, 2, *nodes)
        wait_until(lambda: restarts(*nodes), "a restart", nodes)
        advance(tmp_path, 5, *nodes)
        stop(tmp_path, curve, *nodes)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["in a step", "at the start"])
def test_a_node_that_vanishes(curve, tmp_path, when):
    """Its cable is cut, so that nobody closes its connections. In a step the other one waits for
    --timeout, at the start for as long as loading may take, and then goes on alone."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("network namespaces need root and iproute2")
    loading = ("timeout = timedelta(hours=12)", "timeout = timedelta(seconds=30)")
    stage = mutant(
        tmp_path / "copy", "05-multinode", *([loading] if when == "at the start" else [])
    )
    with two_nodes() as names:
        variables = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500", "NNODES": "1:2"}
        variables |= {"NPROC_PER_NODE": "1", "LAST_CALL": "3", "SCRIPT": str(stage)}
        flags = (*named(tmp_path), "--timeout", "20")
        nodes = []
        try:
            for name in names:
                prefix = ["ip", "netns", "exec", name]
                if when == "at the start" and nodes:
                    held = {"STRIKE": "wait open config.json 1", "STRIKE_RANK": "1"}
                    held["GATE"] = str(tmp_path / "gate")
                    variables |= held | {"PYTHONPATH": str(FAULTS)}
                nodes.append(Node(tmp_path / f"{name}.log", variables, flags, prefix))
            if when == "in a step":
                until_world(tmp_path, 2, *nodes)
                advance(tmp_path, INTERVAL + 5, *nodes)
            else:
                wait_until(lambda: (tmp_path / "a" / "lock").exists(), "the start", nodes)
                time.sleep(20)
            subprocess.run(["ip", "-n", names[1], "link", "set", "wire", "down"], check=True)
            until_world(tmp_path, 1, nodes[0])
            advance(tmp_path, 5, nodes[0])
            stop(tmp_path, curve, nodes[0])
        finally:
            for node in nodes:
                print(node.said()[-3000:])  # shown if the test fails
                node.kill()


@pytest.mark.slow
def test_a_worker_is_killed_and_later_one_is_asked_to_stop(curve, tmp_path):
    """The first costs the steps since the last checkpoint. The second, by SIGTERM, none: the other
    worker knows nothing of it but the count, and both leave the process group in order."""
    with job(tmp_path, processes=2, NNODES="1", MAX_RESTARTS="1") as start_node:
        node = start_node("A", *named(tmp_path), "--shard-size", 1)
        until_world(tmp_path, 2, node)
        advance(tmp_path, INTERVAL + 5, node)
        node.workers()[1].kill()
        wait_until(lambda: restarts(node), "a restart", [node])
        advance(tmp_path, 5, node)
        [worker] = [w for w in node.workers() if w.environ().get("RANK") == "1"]
        worker.send_signal(signal.SIGTERM)
        assert node.wait() != 0, "0 would say that the training is complete"
        assert_restarts([node], (2, MOST))
        steps = last_step(tmp_path / "a")
        assert f"stopped by SIGTERM after step {steps}\n" in node.said()
        assert (tmp_path / "a" / f"step-{steps:08d}").exists()
        # An error would have a traceback, a peer that has aborted an exit code of SIGABRT.
        behind = node.said().split("resumed from")[-1]
        assert 'train-llm.py", line' not in behind, behind
        assert "(SIGABRT)" not in behind, behind
    assert_the_curve(tmp_path, curve)


@pytest.mark.slow
def test_a_worker_is_killed_inside_a_save(curve, tmp_path):
    """While its files are written beside the steps: that costs this checkpoint, not the job."""
    fault = {"STRIKE": "once open step-00000040.tmp/__1_0.distcp 1"}
    fault |= {"STRIKE_RANK": "1", "GATE": str(tmp_path / "died"), "PYTHONPATH": str(FAULTS)}
    with job(tmp_path, processes=2, NNODES="1", **fault) as start_node:
        node = start_node("A", *named(tmp_path), "--shard-size", 1)
        wait_until(lambda: restarts(node), "a restart", [node])
        assert f"resumed from {tmp_path}/a/step-{INTERVAL:08d}" in node.said()
        advance(tmp_path, INTERVAL + 5, node)
        stop(tmp_path, curve, node)
        assert_restarts([node], (2, MOST))


SAVING = ("-e", "a", *FLAGS[:-2], "--max-steps", "20", "--ckpt-freq", "5")


def started(folder, *more, **variables):
    flags = (*SAVING, "--save-dir", folder, *more)
    return fork(script("05-multinode"), 1, *flags, PYTHONPATH=str(FAULTS), **variables)


def test_a_checkpoint_is_written_beside_the_next_steps(tmp_path, curve):
    """The files of step 5 are held up. The run goes on to step 10, whose checkpoint waits, and no
    further. What is written is the state of step 5: a resume from it repeats the curve."""
    held = {"STRIKE": "wait open step-00000005.tmp/__0_0.distcp 1", "GATE": str(tmp_path / "gate")}
    process = started(tmp_path, **held)
    try:
        wait_until(lambda: last_step(tmp_path / "a") == 10, "step 10")
        time.sleep(2)
        assert last_step(tmp_path / "a") == 10
        assert not list((tmp_path / "a").glob("step-????????"))
        (tmp_path / "gate").touch()
        assert finish(process).returncode == 0
    finally:
        end(process)
    assert_the_curve(tmp_path, curve)
    whole = metrics(tmp_path / "a")

    again = tmp_path / "again"
    held["STRIKE"] = "kill open step-00000010.tmp/__0_0.distcp 1"
    assert finish(started(again, **held)).returncode != 0
    assert [folder.name for folder in sorted((again / "a").glob("step-????????"))] == [FIRST]
    assert f"resumed from {again}/a/{FIRST}" in finish(started(again)).out
    assert_the_curve(again, curve)
    assert same_bits(whole, metrics(again / "a"), range(1, 21))


@pytest.mark.slow
def test_a_folder_that_nodes_do_not_share(tmp_path):
    """Else each would write its part of a checkpoint that nobody can put together."""
    with job(tmp_path, NNODES="2", MAX_RESTARTS="0") as start_node:
        nodes = [start_node(name, *named(tmp_path / name)) for name in "AB"]
        # Only rank 0 makes the folder. To the other it looks as if it were on a disk of its own.
        assert all(node.wait() != 0 for node in nodes)
    said = "".join(node.said() for node in nodes)
    assert "train-llm.py: error: --save-dir " in said
    assert "all nodes must share this folder" in said
    assert not list(tmp_path.glob("*/a/step-*"))


@pytest.mark.slow
def test_a_full_disk_beside_the_steps(curve, tmp_path):
    """It has room for two checkpoints and a half. The thread meets that, or what writes the log.
    The second one is intact."""
    config = load("05-multinode").load_config(load("05-multinode").TINY)
    checkpoint = 12 * plan.sizes_of(config, 256).num_parameters / 2**20  # fp32, with two moments
    mount_small_disk(tmp_path / "disk", round(2.5 * checkpoint))
    try:
        with job(tmp_path, processes=2, NNODES="1", MAX_RESTARTS="0") as start_node:
            flags = (*named(tmp_path / "disk"), "--keep-checkpoints", "5", "--shard-size", "1")
            node = start_node("A", *flags)
            assert node.wait() != 0
            assert "No space left on device" in node.said()
            again = start_node("B", *flags, "--keep-checkpoints", "1")
            # The steps in the log's file do not tell: those after the checkpoint stand in it until
            # the resumed run removes them.
            step = 2 * INTERVAL + 2
            wait_until(lambda: f"step{step:6}/" in again.said(), f"step {step}", [again])
            assert f"resumed from {tmp_path}/disk/a/step-{2 * INTERVAL:08d}" in again.said()
        assert_the_curve(tmp_path / "disk", curve)
    finally:
        subprocess.run(["umount", str(tmp_path / "disk")], check=True)


@pytest.mark.slow
def test_a_clean_stop_ends_the_experiment(tmp_path):
    """Comet's archive is complete: a zip that opens and holds the metrics."""
    process = started(tmp_path, "--max-steps", 100000, "--comet-offline")
    wait_until(lambda: last_step(tmp_path / "a") >= 7, "some steps")
    process.send_signal(signal.SIGTERM)
    finish(process)
    [archive] = (tmp_path / "a" / "comet").glob("*.zip")
    assert zipfile.ZipFile(archive).testzip() is None
