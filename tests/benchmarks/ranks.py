"""Runs every stage on several ranks and compares it with stage 01.

    python tests/benchmarks/ranks.py 1        NCCL on one GPU, which the ranks share (ranks.sh)
    python tests/benchmarks/ranks.py 2        the rest of it, at most seven minutes like the first
    python tests/benchmarks/ranks.py check    a rank on each GPU of this machine
    python tests/benchmarks/ranks.py 1 int8   the cases of part 1 with int8 in their names

gpu-2.sh and gpu.sh call it. Without a GPU, or with DEVICE=cpu, the ranks use Gloo. A line is
printed for each case as soon as it ends, and the table goes to $MEASURED, by default
outputs/measured. What a case that failed has printed is in failures.log there.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

# As in benchmark.py: where conftest.py is, and what is in tests/support.
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
sys.path.insert(2, str(Path(__file__).resolve().parents[1] / "support"))

import nodes
import torch
import torch.distributed as dist
import transformers
from bench_common import (
    MEASURED,
    STAGE_01,
    STAGE_02,
    STAGE_03,
    STAGE_04,
    STAGE_05,
    STAGE_06,
    STAGE_07,
    STAGE_08,
    STAGE_09,
    STAGE_10,
    machine,
    table,
    write_model,
)
from conftest import (
    SMALL,
    end,
    environment,
    exact,
    load,
    metrics,
    mutant,
    save_config,
    save_one_sided,
)
from forked import SAMPLE
from stages import script
from torch.distributed.device_mesh import init_device_mesh

DEVICE = os.environ.get("DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE == "cuda"
RANKS_SH = Path(__file__).with_name("ranks.sh")
# How far losses and gradient norms may be from those of stage 01, relative to them.
LOSS_BOUND, NORM_BOUND = (1e-4, 1e-2) if ON_GPU else (1e-5, 1e-4)
# Seconds for a part, and for a case of it. A machine with a GPU is lent for some minutes.
PART_SECONDS, CASE_SECONDS = (400, 120) if ON_GPU else (7200, 600)
# Cases of two ranks that run at once. Those of four ranks run one at a time.
AT_ONCE = int(os.environ.get("AT_ONCE", 2 if ON_GPU else 1))
STEPS = 8
FLAGS = (*SMALL, "-b", 2, "--max-steps", STEPS, "--log-freq", 1, "--device", DEVICE)
FLAGS += ("--lr-scheduler", "constant", "--warmup-steps", 5)
FP32 = ("--dtype", "fp32", "--no-compile")
can_compile = ON_GPU or shutil.which("g++")
BF16 = ("--dtype", "bf16", "--compile" if can_compile else "--no-compile")
# How far the first gradient norm in bf16 may be from that of another stage, relative to it. On CPUs
# the stages differ by up to 5e-5. With `rows[order]` stage 10 has one that differs by 6e-3.
BF16_BOUND = 3e-3
# By default each rank would have as many processes that compile as there are cores.
COMPILE_THREADS = os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", "4")
HEAD = ["part", "case", "ranks", "result", "measured", "s"]

own_gpus = False  # whether each rank has a GPU of its own
case = threading.local()  # `case.end`: when the time of the case that this thread runs is over


def main(part, words=""):
    global own_gpus
    own_gpus = part == "check"
    end_of_part = time.monotonic() + (86400 if own_gpus else PART_SECONDS)
    rows = []
    lock = threading.Lock()

    def attempt(name, ranks, function, *args):
        begin = time.monotonic()
        seconds = CASE_SECONDS * (2 if function is node_leaves_and_joins else 1)
        case.end = min(begin + seconds, end_of_part)
        result, said = "FAIL", "no time was left"
        try:
            if end_of_part - begin > 20:
                said = function(ranks, *args)
                result = "PASS"
        except NotHere as reason:
            result, said = "SKIP", str(reason)
        except Exception as error:
            said = str(error) or repr(error)
        said = " ".join(said.split())[:300].replace("|", "/")
        seconds = f"{time.monotonic() - begin:.0f}"
        print(f"{result} {name}, {ranks} ranks: {said}, in {seconds} s", flush=True)
        with lock:
            rows.append([part, name, ranks, result, said, seconds])
            write(rows)

    os.environ["OMP_NUM_THREADS"] = "1"
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["COURSE_HF_HOME"] = folder
        cases = check() if own_gpus else PARTS[part]
        cases = [one for one in cases if words in one[0]]
        for at_once, group in groupby(cases, number_at_once):
            with ThreadPoolExecutor(at_once) as pool:
                list(pool.map(lambda one: attempt(*one), group))
    print(f"\n{table(HEAD, rows)}")
    sys.exit(any(row[3] == "FAIL" for row in rows))


def number_at_once(one):
    """How many cases run together. An all-reduce is timed, so it runs alone."""
    _, ranks, function, *_ = one
    return AT_ONCE if ranks == 2 and function is not all_reduce else 1


def write(rows):
    """Writes the table. Rows that an earlier call has written for other cases are kept."""
    name = "gpu-check.md" if own_gpus else "gpu-2-ranks.md" if ON_GPU else "gpu-2-dry.md"
    path = MEASURED / name
    by_case = {}
    for line in path.read_text().splitlines()[4:] if path.exists() else []:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        by_case[tuple(cells[:3])] = cells
    by_case |= {tuple(map(str, row[:3])): row for row in rows}
    rows = [by_case[key] for key in sorted(by_case, key=lambda key: key[0])]
    parts = dict.fromkeys(row[0] for row in rows)
    commands = ", ".join(f"`python tests/benchmarks/ranks.py {part}`" for part in parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{commands}, {machine()}\n\n{table(HEAD, rows)}")


# Runs.


def start(ranks, path, flags, log, variables):
    """Starts a script on ranks, or with `ranks` None in one process without torchrun."""
    command = [sys.executable, "-u"]
    if ranks and own_gpus:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", ranks]
    elif ranks:
        command = ["bash", RANKS_SH, ranks]
    return subprocess.Popen(
        [str(word) for word in [*command, path, *flags]],
        env=environment(
            PYTHON=sys.executable, TORCHINDUCTOR_COMPILE_THREADS=COMPILE_THREADS, **variables
        ),
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def launch(ranks, path, *flags, **variables):
    """Runs a script, at most until the time of the case is over. Returns what it has printed."""
    with tempfile.TemporaryFile("w+") as log:
        process = start(ranks, path, flags, log, variables)
        code = "was ended after its time"
        try:
            while process.poll() is None and time.monotonic() < case.end:
                time.sleep(0.2)
            if process.poll() is not None:
                code = f"ended with {process.returncode}"
        finally:
            end(process)  # and all that it has started
        log.seek(0)
        text = log.read()
    if code != "ended with 0":
        words = shlex.join(map(str, [path, *flags]))
        with (MEASURED / "failures.log").open("a") as file:
            file.write(f"\n{ranks} ranks: {words} {code}:\n{text[-20000:]}\n")
        error = re.search(r"\w*[Ee]rror: .*", text)
        raise RuntimeError(f"{code}: {error[0] if error else text[-200:]}")
    return text


def curve(ranks, stage, *flags, folder=None):
    """The metrics of a run of a stage, by step. Its text at the end is one token long."""
    path = Path(os.environ["COURSE_HF_HOME"], stage, "train-llm.py")
    with locks["copies"]:
        if not path.exists():
            mutant(path.parents[1], stage)
            path.write_text(SAMPLE.sub("1", path.read_text()))
    with tempfile.TemporaryDirectory() as new_folder:
        named = ("-e", "run", "--save-dir", folder or new_folder)
        launch(ranks, path, *FLAGS, *exact(stage, ranks or 1), *flags, *named)
        return metrics(Path(folder or new_folder, "run"))


known = {}  # curves that several cases are compared with
locks = defaultdict(threading.Lock)


def known_curve(*args):
    with locks[args]:
        if args not in known:
            known[args] = curve(*args)
        return known[args]


# Cases. Each returns what it has measured, and raises an error if that is not as it should be.


class NotHere(Exception):
    """This machine cannot run the case."""


def expect(is_true, said):
    if not is_true:
        raise AssertionError(said)
    return said


def difference(one, other, name, steps):
    """The largest difference of a metric, relative to that of the first curve."""
    return max(abs(other[step][name] / one[step][name] - 1) for step in steps)


def same_curve(one, other, steps, factor=1):
    loss = difference(one, other, "train/loss", steps)
    norm = difference(one, other, "train/grad_norm", steps)
    said = f"largest difference of the loss {loss:.1e}, of the gradient norm {norm:.1e}"
    return expect(loss <= factor * LOSS_BOUND and norm <= factor * NORM_BOUND, said)


def mixture(num_experts_per_tok):
    """Flags of the tiny model of stage 10, which has 8 experts, for any stage."""
    folder = Path(os.environ["COURSE_HF_HOME"], f"mixture-{num_experts_per_tok}")
    with locks[folder]:
        if not folder.exists():
            save_config(folder, "mixture", num_experts_per_tok=num_experts_per_tok)
    return ("-m", folder, "--from-scratch")


def one_sided():
    """Flags of a model of 8 experts whose routers choose the last two of them for each token."""
    folder = Path(os.environ["COURSE_HF_HOME"], "one-sided")
    with locks[folder]:
        if not folder.exists():
            save_one_sided(folder)
    return ("-m", folder)


def in_fp32(ranks, stage, *flags, both=()):
    """Loss and gradient norm of each step: those of stage 01, and in stage 06 those of one rank."""
    if "--cpu-offload" in flags and not ON_GPU:
        raise NotHere("FSDP moves shards to the CPU from a GPU only")
    one = (1, STAGE_06) if stage == STAGE_06 else (None, STAGE_01)
    one = known_curve(*one, *FP32, *both)
    return same_curve(one, curve(ranks, stage, *FP32, *both, *flags), one)


def experts(ranks, *flags):
    """Stage 10 where each token has 2 of 8 experts, so that ranks send each other different numbers
    of rows. After a few steps rounding may change the experts of a token."""
    return in_fp32(ranks, STAGE_10, *flags, both=(*mixture(2), "--max-steps", 5))


def all_experts(ranks):
    """Stage 10 where each token has all experts, so that many steps can be compared."""
    return in_fp32(ranks, STAGE_10, both=(*mixture(8), "--max-steps", 20))


def experts_of_one_rank(ranks, expert_size):
    """Stage 10 where all tokens choose experts of the last rank in an expert group, so that the
    other ranks of the group receive none."""
    flags = (*FP32, *one_sided())
    one = known_curve(None, STAGE_01, *flags)
    split = curve(ranks, STAGE_10, *flags, "--expert-size", expert_size)
    for step, line in split.items():
        load = line["train/max_load_of_rank"]
        expect(load == expert_size, f"step {step}: the load of the last rank is {load}")
    return same_curve(one, split, one)


def in_bf16(ranks, stage):
    """Compiled, if there is a compiler: the first gradient norm and the last loss of stage 03 in
    bf16 on as many ranks. A gradient that is wrong by a factor would show in the norm only. Stage
    03 is compared with stage 01, and stage 06, which takes its data in another order, with one
    rank."""
    others = {STAGE_03: (None, STAGE_01), STAGE_06: (1, STAGE_06)}
    both = (*BF16, *mixture(2)) if stage == STAGE_10 else BF16
    one = known_curve(*others.get(stage, (ranks, STAGE_03)), *both)
    other = curve(ranks, stage, *both)
    norm = difference(one, other, "train/grad_norm", [1])
    loss = difference(one, other, "train/loss", [STEPS])
    first, last = other[1]["train/loss"], other[STEPS]["train/loss"]
    said = f"difference of the first gradient norm {norm:.1e}, of the last loss {loss:.1e}, "
    said += f"{first:.3f} → {last:.3f} ({BF16[-1]})"
    return expect(norm <= BF16_BOUND and loss <= 1e-2 and last < first, said)


def all_reduce(ranks):
    """Two ranks and the groups of all their meshes. NCCL says how it sends."""
    out = launch(ranks, Path(__file__), "worker-all-reduce", NCCL_DEBUG="INFO")
    if ON_GPU and not own_gpus:
        expect("via NET/Socket" in out, "NCCL does not say: via NET/Socket")
    version = next((line for line in out.splitlines() if "NCCL version" in line), "Gloo")
    said = next(line for line in out.splitlines() if line.startswith("an all-reduce"))
    return f"{said}, {version[version.find('NCCL version') :] if ON_GPU else version}"


def worker_all_reduce():
    join_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.group.WORLD]
    for shape in sorted({(size, 1), (1, size), (2, size // 2)}):
        groups += init_device_mesh(DEVICE, shape).get_all_groups()
    for group in groups:
        check_collectives(group)
    values = torch.ones(2**20, device=DEVICE)
    for i in range(12):
        if i == 2:
            values.sum().item()  # waits for the device
            begin = time.perf_counter()
        dist.all_reduce(values)
    values.sum().item()
    if rank == 0:
        ms = 100 * (time.perf_counter() - begin)
        print(f"an all-reduce of 4 MB takes {ms:.1f} ms, {len(groups)} groups send right")
    leave_group()


def check_collectives(group):
    """Each collective that the stages use, in one group. All values are small integers."""
    members = dist.get_process_group_ranks(group)
    size, rank = len(members), dist.get_rank()
    own = members.index(rank)

    def check(name, values, expected):
        expected = torch.tensor(expected, dtype=values.dtype, device=DEVICE)
        assert torch.equal(values, expected), f"{name}, rank {rank} of {members}: {values}"

    values = torch.full((1000,), rank + 1.0, device=DEVICE)
    dist.all_reduce(values, group=group)
    total = sum(members) + size
    check("all-reduce", values, [total] * 1000)

    values = torch.empty(2 * size, device=DEVICE)
    dist.all_gather_into_tensor(values, torch.full((2,), float(rank), device=DEVICE), group)
    check("all-gather", values, [member for member in members for _ in range(2)])

    # A rank multiplies what it sends to a member by the position of that member.
    values = (rank + 1.0) * torch.arange(size, device=DEVICE).repeat_interleave(2)
    part = torch.empty(2, device=DEVICE)
    dist.reduce_scatter_tensor(part, values, group=group)
    check("reduce-scatter", part, [total * own] * 2)

    # Uneven: position i sends position j so many values, of some it sends none.
    counts = [[(i + 2 * j) % 3 for j in range(size)] for i in range(size)]
    num_sent = counts[own]
    num_received = [row[own] for row in counts]
    values = torch.arange(size, device=DEVICE).repeat_interleave(
        torch.tensor(num_sent, device=DEVICE)
    )
    received = torch.empty(sum(num_received), device=DEVICE)
    dist.all_to_all_single(received, 100.0 * rank + values, num_received, num_sent, group=group)
    pairs = zip(members, num_received, strict=True)
    expected = [100 * member + own for member, number in pairs for _ in range(number)]
    check("all-to-all", received, expected)


def join_group():
    if ON_GPU:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")


def leave_group():
    dist.barrier()
    time.sleep(0.2)  # as at the end of the stages
    dist.destroy_process_group()


def contexts(ranks):
    """After a run of stage 03 a rank has a CUDA context on its own GPU, and on no other."""
    if not ON_GPU:
        raise NotHere("there is no GPU here")
    with tempfile.TemporaryDirectory() as folder:
        named = ("-e", "run", "--save-dir", folder)
        launch(ranks, Path(__file__), "worker-contexts", *FLAGS, *FP32, *named)
    return "each rank has a context on its own GPU only"


def worker_contexts(*flags):
    module = stage_in_this_process(STAGE_03, flags)
    module.main(module.parse_args())
    rank, own = dist.get_rank(), torch.cuda.current_device()
    assert own == int(os.environ["LOCAL_RANK"]), f"rank {rank} is on GPU {own}"
    for gpu in range(torch.cuda.device_count()):
        has_context = torch._C._cuda_hasPrimaryContext(gpu)
        assert has_context == (gpu == own), f"rank {rank}: a context on GPU {gpu}: {has_context}"
    leave_group()


def stage_in_this_process(stage, flags):
    """A stage as a module, which reads `flags` and writes no text at its end."""
    sys.argv = [str(script(stage)), *flags]
    module = load(stage)
    module.sample = lambda *_: ("", "")
    return module


def replicas(ranks, mode, shard_size):
    """After some steps of stage 04 all replicas have the same parameters, to the last bit."""
    flags = (*FLAGS, *FP32, "--shard-size", shard_size, "--compression", mode)
    with tempfile.TemporaryDirectory() as folder:
        named = ("-e", "run", "--save-dir", folder)
        out = launch(ranks, Path(__file__), "worker-replicas", shard_size, *flags, *named)
        lines = metrics(Path(folder, "run"))
    said = next(line for line in out.splitlines() if line.startswith("replicas"))
    first, last = lines[1]["train/loss"], lines[STEPS]["train/loss"]
    sent = lines[STEPS]["comm/bytes_per_step"] / 1e6
    said += f", loss {first:.3f} → {last:.3f}, {sent:.2f} MB sent per step"
    return expect(said.startswith("replicas are equal") and last < first, said)


def worker_replicas(shard_size, *flags):
    """Stage 04, which compares its parameters with those of other replicas at its end."""
    module = stage_in_this_process(STAGE_04, flags)

    def compare(run_dir, model, *_):
        shards = [p.detach().to_local().cpu().numpy().tobytes() for p in model.parameters()]
        of_ranks = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, shards)
        size = int(shard_size)
        equal = all(of_rank == of_ranks[i % size] for i, of_rank in enumerate(of_ranks))
        number = len(of_ranks) // size
        said = "replicas are equal" if equal else "replicas differ"
        module.say(f"{said}, {number} with {len(shards)} tensors")

    module.save_final_model = compare
    module.main(module.parse_args())
    leave_group()


def tied(ranks):
    """Stage 08 with one weight for the embeddings and the output layer, on two pipeline stages."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
        model = write_model(Path(folder), vocab_size=1024, tie_word_embeddings=True, **sizes)
        return in_fp32(ranks, STAGE_08, both=("-m", model, "--from-scratch"))


def resume(ranks):
    """Stage 05 saves beside the steps, and goes on after its fifth one."""
    with tempfile.TemporaryDirectory() as folder:
        flags = (*FP32, "--ckpt-freq", 2)
        curve(ranks, STAGE_05, *flags, "--max-steps", 5, folder=folder)
        saved = sorted(path.name for path in Path(folder, "run").glob("step-*"))
        whole = curve(ranks, STAGE_05, *flags, folder=folder)
    one = known_curve(None, STAGE_01, *FP32)
    said = same_curve(one, whole, one)
    return expect(saved == ["step-00000004", "step-00000005"], f"{said}, {' '.join(saved)}")


def node_leaves_and_joins(ranks):
    """Two nodes of one rank each, of which one is killed, and then a new one joins."""
    command = f'source "{RANKS_SH}" && env | grep -E "^(NCCL|GLOO)_"'
    environ = environment(PYTHON=sys.executable)
    lines = subprocess.check_output(["bash", "-c", command], env=environ, text=True).splitlines()
    variables = dict(line.split("=", 1) for line in lines)

    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder, "a")
        options = ("--device", DEVICE, "--no-compile", "--shard-size", 1)

        def until(world, steps, *those):
            nodes.TIMEOUT = max(1, case.end - time.monotonic())
            goal = nodes.last_step(run_dir) + steps

            def there():
                return nodes.world_size(run_dir) == world and nodes.last_step(run_dir) >= goal

            nodes.wait_until(there, f"{world} nodes and step {goal}", those)

        with nodes.job(Path(folder), NNODES="1:2", **variables) as start_node:

            def node(name):
                return start_node(name, *nodes.named(folder), *options, NCCL_HOSTID=name)

            first, other = node("A"), node("B")
            until(2, nodes.INTERVAL + 5, first, other)
            other.kill()
            killed = time.monotonic()
            until(1, 0, first)
            seconds = time.monotonic() - killed
            until(1, 5, first)
            new = nodes.join(lambda: node("C"), first)
            until(2, 5, first, new)
            for one in (first, new):
                one.signal(signal.SIGTERM)
            codes = [one.wait(max(1, case.end - time.monotonic())) for one in (first, new)]
            expect(0 not in codes, f"a node that was stopped ended with {codes}")
        seen = metrics(run_dir)

    steps = range(1, len(seen) + 1)
    expect(list(seen) == list(steps), f"not each step is logged once: {list(seen)}")
    schedule = ("--dtype", "fp32", "--no-compile", "-b", 4, "--seed", 3, "--max-steps", 50)
    one = known_curve(None, STAGE_01, *schedule)
    said = same_curve(one, seen, steps[:50], factor=10)
    return f"{said}, {len(seen)} steps, the first one {seconds:.0f} s after the kill"


def worker_is_killed(ranks):
    """Stage 05 goes on from a checkpoint that was written beside the steps."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder, "a")

        def until(steps):
            nodes.TIMEOUT = max(1, case.end - time.monotonic())
            nodes.wait_until(lambda: nodes.last_step(run_dir) > steps, f"step {steps}", [node])

        with nodes.job(Path(folder), processes=ranks, NNODES="1", MAX_RESTARTS="1") as start_node:
            node = start_node("A", *nodes.named(folder), "--device", DEVICE, "--shard-size", 1)
            until(nodes.INTERVAL + 5)
            node.workers()[1].kill()
            nodes.wait_until(lambda: nodes.restarts(node), "a restart", [node])
            until(2 * nodes.INTERVAL + 5)
            node.signal(signal.SIGTERM)
            expect(node.wait() != 0, "a node that was stopped ended with 0")
        seen = metrics(run_dir)
    expect(list(seen) == list(range(1, len(seen) + 1)), f"not each step once: {list(seen)}")
    flags = nodes.FLAGS[: nodes.FLAGS.index("--compression")]  # those of stage 01
    one = known_curve(None, STAGE_01, *flags, "--max-steps", 2 * nodes.INTERVAL)
    return same_curve(one, seen, one, factor=10)


def fp32_case(ranks, stage, *flags):
    name = " ".join([stage, "in fp32", *map(str, flags)])
    if stage == STAGE_10:
        return (name, ranks, experts, *flags)
    return (name, ranks, in_fp32, stage, *flags)


def replicas_case(ranks, mode, shard_size):
    return (f"04 {mode}: replicas", ranks, replicas, mode, shard_size)


LATER = (STAGE_02, STAGE_03, STAGE_04, STAGE_05, STAGE_06, STAGE_07, STAGE_08)
LATER += (STAGE_09, STAGE_10)
SPLIT = (STAGE_04, STAGE_07, STAGE_08, STAGE_09, STAGE_10)  # two ways at once on four ranks
ONE_RANK = "10-expert-parallel in fp32, experts of one rank"
PARTS = {
    # What has never run on a GPU comes first. Cases of two ranks that are neighbours run together.
    "1": [
        ("all-reduce", 2, all_reduce),
        ("all-reduce", 4, all_reduce),
        fp32_case(2, STAGE_10),
        (ONE_RANK, 2, experts_of_one_rank, 2),
        fp32_case(4, STAGE_10),
        fp32_case(4, STAGE_10, "--expert-size", 4),
        (ONE_RANK, 4, experts_of_one_rank, 4),
        fp32_case(4, STAGE_09),
        fp32_case(4, STAGE_09, "--context-size", 4),
        fp32_case(2, STAGE_09),
        fp32_case(2, STAGE_08),
        fp32_case(4, STAGE_08),
        fp32_case(4, STAGE_07),
        fp32_case(2, STAGE_07),
        fp32_case(2, STAGE_04),
        fp32_case(2, STAGE_04, "--shard-size", 2),
        *[replicas_case(2, mode, 1) for mode in ("none", "dct", "int8")],
        fp32_case(4, STAGE_04),
        *[replicas_case(4, mode, 2) for mode in ("dct", "int8")],
        *[fp32_case(2, stage) for stage in (STAGE_02, STAGE_03, STAGE_05, STAGE_06)],
    ],
    "2": [
        ("05, a node is killed, one joins", 2, node_leaves_and_joins),
        *[fp32_case(4, stage, "--cpu-offload") for stage in SPLIT],
        ("08, tied weights", 2, tied),
        ("08, tied weights", 4, tied),
        ("05, save beside the steps, resume", 2, resume),
        *[(f"{stage} in bf16", 2, in_bf16, stage) for stage in LATER],
        ("10-expert-parallel in fp32, all experts for each token", 2, all_experts),
    ],
}


def check():
    """The cases for the GPUs of this machine, or without one for two processes."""
    ranks = torch.cuda.device_count() if ON_GPU else 2
    if ranks < 2:
        sys.exit("ranks.py: error: check needs two GPUs; gpu-2.sh shares one")
    cases = [("a rank is on its own GPU only", ranks, contexts), ("all-reduce", ranks, all_reduce)]
    cases += [fp32_case(ranks, stage) for stage in LATER]
    if ranks % 2 == 0:
        cases.append((ONE_RANK, ranks, experts_of_one_rank, 2))
    cases += [replicas_case(ranks, mode, 1) for mode in ("dct", "int8")]
    cases.append(("05, save beside the steps, resume", ranks, resume))
    cases.append(("05, a worker is killed", ranks, worker_is_killed))
    return cases + [(f"{stage} in bf16", ranks, in_bf16, stage) for stage in LATER]


WORKERS = {
    "worker-all-reduce": worker_all_reduce,
    "worker-contexts": worker_contexts,
    "worker-replicas": worker_replicas,
}

if __name__ == "__main__":
    name, *rest = sys.argv[1:] or [""]
    if name in WORKERS:
        WORKERS[name](*rest)
    elif name in (*PARTS, "check"):
        main(name, *rest)
    else:
        sys.exit(__doc__)
