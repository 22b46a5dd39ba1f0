"""Stage 05: the set of machines may change at any time, and the experiment does not notice."""

import random
import signal
import subprocess
import time
import zipfile
from functools import partial

import pytest
from conftest import FAULTS, end, finish, fork, metrics, mount_small_disk, same_bits, script
from nodes import (
    FLAGS,
    INTERVAL,
    assert_the_curve,
    changes,
    job,
    join,
    last_step,
    named,
    wait_until,
    world_sizes,
)

pytestmark = pytest.mark.law4

# A checkpoint may be in the making when a node dies: then the one before is used.
MOST = 2 * INTERVAL
FIRST = "step-00000005"


def advance(folder, steps, *nodes):
    """Until the run has made some more steps."""
    goal = last_step(folder / "a") + steps
    wait_until(lambda: last_step(folder / "a") >= goal, f"step {goal}", nodes)


def until_world(folder, size, *nodes):
    wait_until(lambda: world_sizes(folder / "a") == size, f"a world of {size}", nodes)


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


def assert_changes(nodes, *expected):
    """Each restart was said in plain words, with as many steps repeated as may be."""
    said = changes(*nodes)
    assert [change[:2] for change in said] == [change[:2] for change in expected]
    for (_, _, at, resumed, again), (_, _, most) in zip(said, expected, strict=True):
        assert again == at - resumed <= most


@pytest.mark.slow
def test_nodes_leave_and_join_and_no_step_is_lost(curve, tmp_path):
    """On SIGTERM all save after the same step, and so they do when a node joins. Then the run is
    finished on one node: torchrun ends with 0."""
    with job(tmp_path) as start:
        one, other = start("A", *named(tmp_path)), start("B", *named(tmp_path))
        until_world(tmp_path, 2, one, other)
        advance(tmp_path, 5, one, other)
        other.signal(signal.SIGTERM)
        assert other.wait() != 0
        until_world(tmp_path, 1, one)
        advance(tmp_path, 5, one)
        new = join(lambda: start("C", *named(tmp_path)), one)
        until_world(tmp_path, 2, one, new)
        advance(tmp_path, 5, one, new)
        steps = stop(tmp_path, curve, one, new)
        assert_changes([one, new], (2, 1, 0), (1, 2, 0))
        # For the store a job whose nodes have all ended is over: what follows is a new one.
        last = start("D", *named(tmp_path)[:-1], steps + 3, RDZV_ID="again")
        assert last.wait() == 0, last.said()
        assert changes(last) == [(2, 1, steps, steps, 0)]
    assert_the_curve(tmp_path, curve)
    line = metrics(tmp_path / "a")[steps + 3]
    assert (line["elastic/restarts"], line["elastic/steps_lost"]) == (3, 0)
    assert line["elastic/world_size"] == 1
    assert (tmp_path / "a" / "final_model" / f"step-{steps + 3:08d}").exists()


@pytest.mark.slow
def test_a_worker_is_killed(curve, tmp_path):
    with job(tmp_path, processes=2) as start:
        node = start("A", *named(tmp_path), "--shard-size", 1)
        until_world(tmp_path, 2, node)
        advance(tmp_path, INTERVAL + 5, node)
        node.workers()[1].kill()
        wait_until(lambda: changes(node), "a restart", [node])
        advance(tmp_path, 5, node)
        stop(tmp_path, curve, node)
        assert_changes([node], (2, 2, MOST))


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_is_killed_inside_a_save(victim, curve, tmp_path):
    """While its files are written beside the steps: that costs this checkpoint, not the job."""
    fault = {"STRIKE": f"once open step-00000040.tmp/__{victim}_0.distcp 1"}
    fault |= {"STRIKE_RANK": str(victim), "GATE": str(tmp_path / "died"), "PYTHONPATH": str(FAULTS)}
    with job(tmp_path, processes=2, **fault) as start:
        node = start("A", *named(tmp_path), "--shard-size", 1)
        wait_until(lambda: changes(node), "a restart", [node])
        advance(tmp_path, INTERVAL + 5, node)
        stop(tmp_path, curve, node)
        assert_changes([node], (2, 2, MOST))
        assert changes(node)[0][3] == INTERVAL


@pytest.mark.slow
def test_a_node_dies_and_is_replaced(curve, tmp_path):
    """Of three: 8 sequences do not divide by them, one has fewer."""
    with job(tmp_path) as start:
        nodes = [start(name, *named(tmp_path)) for name in "ABC"]
        until_world(tmp_path, 3, *nodes)
        advance(tmp_path, INTERVAL + 5, *nodes)
        nodes.pop().kill()
        until_world(tmp_path, 2, *nodes)
        nodes.append(join(lambda: start("D", *named(tmp_path)), *nodes))
        until_world(tmp_path, 3, *nodes)
        advance(tmp_path, 5, *nodes)
        stop(tmp_path, curve, *nodes)
        assert_changes(nodes, (3, 2, MOST), (2, 3, 0))


@pytest.mark.slow
def test_the_node_of_rank_0_dies(curve, tmp_path):
    """The store is kept outside of the job: the others go on."""
    with job(tmp_path) as start:
        nodes = [start(name, *named(tmp_path)) for name in "AB"]
        until_world(tmp_path, 2, *nodes)
        advance(tmp_path, INTERVAL + 5, *nodes)
        first = next(node for node in nodes if "step " in node.said())
        first.kill()
        (other,) = [node for node in nodes if node is not first]
        until_world(tmp_path, 1, other)
        advance(tmp_path, 5, other)
        stop(tmp_path, curve, other)
        assert_changes([other], (2, 1, MOST))


@pytest.mark.slow
def test_the_node_that_keeps_the_store_dies(curve, tmp_path):
    """The other ends with an error, in a bounded time. The job is started again, and goes on."""
    with job(tmp_path, keep=False) as start:
        first, other = start("A", *named(tmp_path), rank=0), start("B", *named(tmp_path))
        until_world(tmp_path, 2, first, other)
        advance(tmp_path, INTERVAL + 5, first, other)
        first.kill()
        assert other.wait() != 0
        nodes = start("C", *named(tmp_path), rank=0), start("D", *named(tmp_path))
        until_world(tmp_path, 2, *nodes)
        wait_until(lambda: changes(*nodes), "a restart", nodes)
        advance(tmp_path, 5, *nodes)
        stop(tmp_path, curve, *nodes)


@pytest.mark.slow
def test_a_job_is_started_again_while_its_old_store_is_still_there(curve, tmp_path):
    """For ten seconds, for the last nodes that end. The new job does not settle on it."""
    with job(tmp_path, keep=False) as start:
        node = start("A", *named(tmp_path), rank=0)
        advance(tmp_path, 5, node)
        node.signal(signal.SIGTERM)
        assert node.wait() != 0
        node = start("B", *named(tmp_path), rank=0)
        wait_until(lambda: changes(node), "a restart", [node])
        time.sleep(15)
        advance(tmp_path, 5, node)
        stop(tmp_path, curve, node)
        assert_changes([node], (1, 1, 0))


@pytest.mark.slow
def test_an_error_that_comes_again_ends_the_job(tmp_path):
    """After ten starts without a new step, here the last two of them. Each is killed in a save."""
    (tmp_path / "a").mkdir()
    numbers = {"step": 0, "world": 1, "restarts": 8, "lost": 0, "furthest": 50, "starts": 8}
    (tmp_path / "a" / "progress").write_text("".join(f"{n:12}" for n in numbers.values()))
    strike = {"PYTHONPATH": str(FAULTS), "STRIKE": "kill open step-00000005.tmp/__0_0.distcp 1"}
    with job(tmp_path, NNODES="1", **strike) as start:
        node = start("A", *named(tmp_path), "--ckpt-freq", "5", "--max-steps", "99")
        assert node.wait() != 0
    line = f"{tmp_path}/a: 10 starts, none beyond step 50, see their errors"
    assert node.said().count(f"train-llm.py: error: {line}") in (1, 2)
    assert node.said().count("resumed from step 0") == 2


@pytest.mark.slow
def test_a_mistake_in_the_data_ends_the_job_at_once(tmp_path):
    """Stage 06 meets it during the run, and a restart would meet it again. File 3 is broken."""
    (tmp_path / "data").mkdir()
    good = '{"text": "A document."}'
    for name, line in (("1", good), ("2", good), ("3", "{broken")):
        (tmp_path / "data" / f"{name}.jsonl").write_text(f"{line}\n" * 300)
    flags = ("-d", tmp_path / "data", "--data-held-out", "9", "--max-steps", "99")
    with job(tmp_path, NNODES="1", SCRIPT=str(script("06-streaming"))) as start:
        node = start("A", *named(tmp_path), *flags)
        assert node.wait() != 0
    line = f"train-llm.py: error: --dataset-name {tmp_path}/data: ArrowInvalid: JSON parse error"
    assert node.said().count(line) in (1, 2)
    assert node.said().count("resumed from step") == 0


@pytest.mark.slow
def test_a_run_without_a_name_is_not_restarted(tmp_path):
    with job(tmp_path, NNODES="1") as start:
        node = start("A", *FLAGS, "--max-steps", "100000")
        wait_until(lambda: "step  " in node.said(), "a step", [node])
        node.workers()[0].kill()
        assert node.wait() != 0
    line = "train-llm.py: error: --experiment-name: a run without a name"
    assert node.said().count(line) in (1, 2)


@pytest.mark.slow
def test_three_of_these_at_random_times(curve, tmp_path):
    draw = random.Random()
    seed = draw.randrange(10**6)
    draw.seed(seed)
    print("seed", seed)
    with job(tmp_path) as start:
        nodes = [start(name, *named(tmp_path)) for name in "AB"]
        until_world(tmp_path, 2, *nodes)
        for number, event in enumerate(draw.sample(["kill", "leave", "join"], 3)):
            advance(tmp_path, draw.randrange(1, 30), *nodes)
            if event == "join" or len(nodes) == 1:
                name = f"N{number}"
                nodes.append(join(partial(start, name, *named(tmp_path)), *nodes))
            else:
                gone = nodes.pop(draw.randrange(len(nodes)))
                gone.kill() if event == "kill" else gone.signal(signal.SIGTERM)
            until_world(tmp_path, len(nodes), *nodes)
        stop(tmp_path, curve, *nodes)


SAVING = ("-e", "a", *FLAGS[:-2], "--max-steps", "20", "--ckpt-freq", "5")


def started(folder, **variables):
    flags = (*SAVING, "--save-dir", folder)
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
    assert whole[11]["checkpoint/stall_ms"] < whole[11]["checkpoint/save_ms"]
    assert whole[11]["checkpoint/save_ms"] > 2000

    again = tmp_path / "again"
    held["STRIKE"] = "kill open step-00000010.tmp/__0_0.distcp 1"
    assert finish(started(again, **held)).returncode != 0
    assert [folder.name for folder in sorted((again / "a").glob("step-????????"))] == [FIRST]
    assert "resumed from step 5, " in finish(started(again)).out
    assert_the_curve(again, curve)
    assert same_bits(whole, metrics(again / "a"), range(1, 21))


def test_bad_input_ends_an_elastic_job(tmp_path):
    """It would fail as often as it may be restarted."""
    with job(tmp_path) as start:
        node = start("A", *named(tmp_path), "--lr", "-1")
        assert node.wait() != 0
        # Once more, when torchrun has ended.
        line = "train-llm.py: error: argument --lr: -1: must be above 0"
        assert node.said().count(line) in (1, 2)


@pytest.mark.slow
def test_a_folder_that_nodes_do_not_share(tmp_path):
    """Else each would write its part of a checkpoint that nobody can put together."""
    with job(tmp_path, NNODES="2") as start:
        nodes = [start(name, *named(tmp_path / name)) for name in "AB"]
        assert all(node.wait() != 0 for node in nodes)
    for node, name in zip(nodes, "AB", strict=True):
        line = f"--save-dir {tmp_path}/{name}/a: must be one folder that all nodes share"
        assert node.said().count(f"train-llm.py: error: {line}") in (1, 2)
        assert not list((tmp_path / name / "a").glob("step-*"))


@pytest.mark.slow
def test_a_full_disk_beside_the_steps(curve, tmp_path):
    """The thread meets it. One line, the checkpoint before is intact, no restart tries again."""
    mount_small_disk(tmp_path / "disk", 20)
    try:
        with job(tmp_path, processes=2) as start:
            flags = (*named(tmp_path / "disk"), "--keep-checkpoints", "5", "--shard-size", "1")
            node = start("A", *flags)
            assert node.wait() != 0
            assert node.said().count("train-llm.py: error: ") in (1, 2)
            assert f"step-{3 * INTERVAL:08d} not saved" in node.said()
            again = start("B", *flags, "--keep-checkpoints", "1")
            wait_until(lambda: f"resumed from step {2 * INTERVAL}," in again.said(), "a resume")
            again.signal(signal.SIGTERM)
            again.wait()
        assert_the_curve(tmp_path / "disk", curve)
    finally:
        subprocess.run(["umount", str(tmp_path / "disk")], check=True)


@pytest.mark.slow
def test_a_clean_stop_ends_the_experiment(tmp_path):
    """Comet's archive is complete: a zip that opens and holds the metrics."""
    with job(tmp_path) as start:
        node = start("A", *named(tmp_path), "--comet-offline")
        advance(tmp_path, 10, node)
        node.signal(signal.SIGTERM)
        node.wait()
    archives = list((tmp_path / "a" / "comet").glob("*.zip"))
    assert archives
    for archive in archives:
        assert zipfile.ZipFile(archive).testzip() is None
