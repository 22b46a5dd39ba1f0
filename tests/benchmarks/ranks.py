"""Runs every stage on several ranks and compares it with stage 01.

    python tests/benchmarks/ranks.py 1        NCCL on one GPU, which the ranks share (ranks.sh)
    python tests/benchmarks/ranks.py 2        the rest of it, at most seven minutes like the first
    python tests/benchmarks/ranks.py check    a rank on each GPU of this machine
    python tests/benchmarks/ranks.py 1 int8   the cases of part 1 with int8 in their names

gpu-2.sh and gpu.sh call it. Without a GPU, or with DEVICE=cpu, the ranks use Gloo. A line is
printed for each case as soon as it ends, and the table goes to $MEASURED, by default
outputs/measured. What a case that failed has printed is in failures.log there.
"""

import contextlib
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
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# As in benchmark.py: where conftest.py is, and what is in tests/support.
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
sys.path.insert(2, str(Path(__file__).resolve().parents[1] / "support"))

import nodes
import psutil
import torch
import torch.distributed as dist
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
from conftest import SMALL, end, environment, exact, load, metrics, save_mixture
from stages import script
from torch.distributed.device_mesh import init_device_mesh

DEVICE = os.environ.get("DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE == "cuda"
RANKS_SH = Path(__file__).with_name("ranks.sh")
# How far losses and gradient norms may be from those of stage 01, relative to them.
LOSS_BOUND, NORM_BOUND = (1e-4, 1e-2) if ON_GPU else (1e-5, 1e-4)
# Seconds for a part, and for a case of it. A machine with a GPU is lent for some minutes.
PART_SECONDS, CASE_SECONDS = (400, 120) if ON_GPU else (7200, 600)
AT_ONCE = int(os.environ.get("AT_ONCE", 3 if ON_GPU else 1))  # cases
STEPS = 20
FLAGS = (*SMALL, "-b", 2, "--max-steps", STEPS, "--log-freq", 1, "--device", DEVICE)
FLAGS += ("--lr-scheduler", "constant", "--warmup-steps", 5)
FP32 = ("--dtype", "fp32", "--no-compile")
can_compile = ON_GPU or shutil.which("g++")
BF16 = ("--dtype", "bf16", "--compile" if can_compile else "--no-compile")
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
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        os.environ["COURSE_HF_HOME"] = folder
        cases = check() if own_gpus else PARTS[part]
        cases = [one for one in cases if words in one[0]]
        alone = [one for one in cases if one[2] in ALONE]
        for one in alone:
            attempt(*one)
        list(pool.map(lambda one: attempt(*one), [one for one in cases if one not in alone]))
    print(f"\n{table(HEAD, rows)}")
    sys.exit(any(row[3] == "FAIL" for row in rows))


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
        # By default each rank would have as many processes that compile as there are cores.
        env=environment(PYTHON=sys.executable, TORCHINDUCTOR_COMPILE_THREADS="4", **variables),
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def launch(ranks, path, *flags, watch=lambda process: None, **variables):
    """Runs a script, at most until the time of the case is over. Returns what it has printed.

    `watch` is called with the process while it runs."""
    with tempfile.TemporaryFile("w+") as log:
        process = start(ranks, path, flags, log, variables)
        code = "was ended after its time"
        try:
            while process.poll() is None and time.monotonic() < case.end:
                watch(process)
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


def curve(ranks, stage, *flags, folder=None, **more):
    """The metrics of a run of a stage, by step."""
    with tempfile.TemporaryDirectory() as new_folder:
        named = ("-e", "run", "--save-dir", folder or new_folder)
        ways = exact(stage, ranks or 1)
        launch(ranks, script(stage), *FLAGS, *ways, *flags, *named, **more)
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
            save_mixture(folder, num_experts_per_tok=num_experts_per_tok)
    return ("-m", folder, "--from-scratch")


def in_fp32(ranks, stage, *flags, both=()):
    """Loss and gradient norm of 20 steps: those of stage 01, and in stage 06 those of one rank. In
    stage 10 each token has all experts, so that no route flips."""
    if "--cpu-offload" in flags and not ON_GPU:
        raise NotHere("FSDP moves shards to the CPU from a GPU only")
    if stage == STAGE_10:
        both = mixture(8)
    one = (1, STAGE_06) if stage == STAGE_06 else (None, STAGE_01)
    one = known_curve(*one, *FP32, *both)
    return same_curve(one, curve(ranks, stage, *FP32, *both, *flags), range(1, STEPS + 1))


def in_bf16(ranks, stage):
    """Compiled, if there is a compiler: the first losses are near those of fp32, and they fall."""
    one = (1, STAGE_06) if stage == STAGE_06 else (None, STAGE_01)
    both = mixture(2) if stage == STAGE_10 else ()
    one, other = known_curve(*one, *FP32, *both), curve(ranks, stage, *BF16, *both)
    loss = difference(one, other, "train/loss", range(1, 5))
    first, last = other[1]["train/loss"], other[STEPS]["train/loss"]
    said = f"first losses within {loss:.1e} of fp32, {first:.3f} → {last:.3f} ({BF16[-1]})"
    return expect(loss < 1e-2 and last < first, said)


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
        values = torch.full((1000,), rank + 1.0, device=DEVICE)
        dist.all_reduce(values, group=group)
        expected = sum(other + 1 for other in dist.get_process_group_ranks(group))
        assert (values == expected).all(), f"rank {rank}: {values[0]}, not {expected}"
    values = torch.ones(2**20, device=DEVICE)
    for i in range(12):
        if i == 2:
            values.sum().item()  # waits for the device
            begin = time.perf_counter()
        dist.all_reduce(values)
    values.sum().item()
    if rank == 0:
        ms = 100 * (time.perf_counter() - begin)
        print(f"an all-reduce of 4 MB takes {ms:.1f} ms, {len(groups)} groups add up right")
    leave_group()


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


def processes_of_gpus(ranks):
    """A rank has a CUDA context on its own GPU, and none on another. (This is the first case, since
    this program has no context yet.)"""
    most = Counter()

    def watch(process):
        now = Counter()
        if ON_GPU:
            query = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader"]
            lines = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
            pids = [line.split(", ") for line in lines]
            now = Counter(gpu for gpu, pid in pids if pid != str(os.getpid()))
        else:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children():
                    now["CPU"] += "train-llm.py" in " ".join(child.cmdline())
        most.update({key: max(0, now[key] - most[key]) for key in now})

    curve(ranks, STAGE_03, *FP32, watch=watch)
    counts = sorted(most.values())
    said = f"most processes at once on each device: {counts}"
    return expect(counts == ([1] * ranks if own_gpus and ON_GPU else [ranks]), said)


def replicas(ranks, mode, shard_size):
    """After 20 steps of stage 04 all replicas have the same parameters, to the last bit."""
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
    sys.argv = [str(script(STAGE_04)), *flags]
    module = load(STAGE_04)

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
    """Stage 05 saves beside the steps, and goes on after its tenth one."""
    with tempfile.TemporaryDirectory() as folder:
        flags = (*FP32, "--ckpt-freq", 4)
        curve(ranks, STAGE_05, *flags, "--max-steps", STEPS // 2, folder=folder)
        saved = sorted(path.name for path in Path(folder, "run").glob("step-*"))
        whole = curve(ranks, STAGE_05, *flags, folder=folder)
    said = same_curve(known_curve(None, STAGE_01, *FP32), whole, range(1, STEPS + 1))
    return expect(saved == ["step-00000008", "step-00000010"], f"{said}, {' '.join(saved)}")


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


def fp32_case(ranks, stage, *flags):
    return (" ".join([stage, "in fp32", *map(str, flags)]), ranks, in_fp32, stage, *flags)


ALONE = (all_reduce, processes_of_gpus)  # these take a time, or count processes
LATER = (STAGE_02, STAGE_03, STAGE_04, STAGE_05, STAGE_06, STAGE_07, STAGE_08)
LATER += (STAGE_09, STAGE_10)
SPLIT = (STAGE_04, STAGE_07, STAGE_08, STAGE_09, STAGE_10)  # two ways at once on four ranks
PARTS = {
    "1": [
        ("processes on the GPU", 2, processes_of_gpus),
        ("all-reduce", 2, all_reduce),
        ("all-reduce", 4, all_reduce),
        *[fp32_case(2, stage) for stage in LATER],
        fp32_case(2, STAGE_04, "--shard-size", 2),
        *[fp32_case(4, stage) for stage in SPLIT],
        fp32_case(4, STAGE_09, "--context-size", 4),
        fp32_case(4, STAGE_10, "--expert-size", 4),
        *[(f"04 {mode}: replicas", 2, replicas, mode, 1) for mode in ("none", "dct", "int8")],
        *[(f"04 {mode}: replicas", 4, replicas, mode, 2) for mode in ("dct", "int8")],
    ],
    "2": [
        ("05, a node is killed, one joins", 2, node_leaves_and_joins),
        *[fp32_case(4, stage, "--cpu-offload") for stage in SPLIT],
        ("08, tied weights", 2, tied),
        ("08, tied weights", 4, tied),
        ("05, save beside the steps, resume", 2, resume),
        *[(f"{stage} in bf16", 2, in_bf16, stage) for stage in LATER],
    ],
}


def check():
    """The cases for the GPUs of this machine, or without one for two processes."""
    ranks = torch.cuda.device_count() if ON_GPU else 2
    if ranks < 2:
        sys.exit("ranks.py: error: check needs two GPUs; gpu-2.sh shares one")
    cases = [("processes on GPUs", ranks, processes_of_gpus), ("all-reduce", ranks, all_reduce)]
    cases += [fp32_case(ranks, stage) for stage in LATER]
    cases += [(f"04 {mode}: replicas", ranks, replicas, mode, 1) for mode in ("dct", "int8")]
    cases.append(("05, save beside the steps, resume", ranks, resume))
    return cases + [(f"{stage} in bf16", ranks, in_bf16, stage) for stage in LATER]


if __name__ == "__main__":
    name, *rest = sys.argv[1:] or [""]
    if name == "worker-all-reduce":
        worker_all_reduce()
    elif name == "worker-replicas":
        worker_replicas(*rest)
    elif name in (*PARTS, "check"):
        main(name, *rest)
    else:
        sys.exit(__doc__)
