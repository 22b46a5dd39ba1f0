"""Context parallelism: what a rank keeps and receives, and how the work of attention grows.

What is counted is counted on CPUs, with small Llama models, and does not depend on the machine."""

import contextlib
import json
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import scale
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from bench_common import STAGE_03, STAGE_07, STAGE_09, report
from conftest import load
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.checkpoint import checkpoint
from traps import CONTEXT_WRONGLY, exported_loss, run_context_wrongly

import plan

LENGTH = 1024  # tokens of the one sequence on which is counted
FEW, MANY = 2, 4  # blocks of two models: what one block needs is their difference, halved
KEY_VALUE_HEADS = (8, 2)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def llama(key_value_heads, layers, length=LENGTH):
    return transformers.LlamaConfig(
        vocab_size=384,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=key_value_heads,
        max_position_embeddings=length,
    )


def one_of_a_group(rank, ranks, function, arguments, folder):
    torch.set_num_threads(1)
    meeting = {"init_method": f"file://{folder}/meeting", "rank": rank, "world_size": ranks}
    dist.init_process_group("gloo", **meeting)
    result = function(*arguments)
    if rank == 0:
        Path(folder, "result").write_text(json.dumps(result))
    dist.barrier()
    time.sleep(0.2)  # Gloo: no rank leaves while another one still reads from it
    dist.destroy_process_group()


def on_a_group(ranks, function, *arguments):
    """Calls a function in so many processes, a process group, and returns what rank 0 has."""
    with tempfile.TemporaryDirectory() as folder:
        how = (ranks, function, arguments, folder)
        torch.multiprocessing.spawn(one_of_a_group, how, nprocs=ranks)
        return json.loads(Path(folder, "result").read_text())


def split_model(stage_name, config, dtype, checkpointing, compiled=False):
    """A model, split as a stage splits it over all processes, and a function: tokens to loss."""
    stage = load(stage_name)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = stage.load_model(config, None, "sdpa", 0).to(dtype)
    if stage_name == STAGE_09:
        stage.split_attention(model, mesh)
    if stage_name == STAGE_07:
        weights = model.state_dict()
        stage.split_layers(model, mesh)
        stage.send_weights(model, weights, torch.device("cpu"), cpu_offload=False)
    for block in model.model.layers if checkpointing else ():
        again = {"use_reentrant": False, "preserve_rng_state": False}
        block.forward = partial(checkpoint, block.forward, **again)
    for block in model.model.layers if compiled else ():
        block.forward = torch.compile(block.forward, dynamic=False)

    def loss(ids):
        own = stage.own_positions(ids.shape[1], mesh) if stage_name == STAGE_09 else slice(None)
        more = {"position_ids": own[None]} if stage_name == STAGE_09 else {}
        logits = model(input_ids=ids[:, own], use_cache=False, **more).logits
        return stage.sum_cross_entropy(logits, ids[:, own])

    return stage, model, loss


def random_tokens():
    draw = torch.Generator().manual_seed(0)
    return torch.randint(384, (1, LENGTH), generator=draw)


# What a rank keeps


def is_mask(tensor, ranks):
    """Whether a saved tensor is a mask. The kernels of a GPU make none."""
    length = LENGTH // (2 * ranks)
    shapes = [(length, (chunk + 1) * length) for chunk in range(2 * ranks)]
    of_one_head = tensor.ndim == 2 or tensor.ndim == 4 and tensor.shape[1] == 1
    return tensor.ndim >= 2 and tuple(tensor.shape[-2:]) in shapes and of_one_head


def kept(key_value_heads, layers, dtype, checkpointing, compiled):
    """Bytes that autograd keeps of a forward pass on this rank, without parameters and masks."""
    ranks = dist.get_world_size()
    config = llama(key_value_heads, layers)
    stage = STAGE_09 if ranks > 1 else STAGE_03
    _, model, loss = split_model(stage, config, DTYPES[dtype], checkpointing, compiled)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters and not is_mask(tensor, ranks):
            saved[storage.data_ptr()] = storage  # held, so that no other takes its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _output = loss(random_tokens())
    return sum(storage.nbytes() for storage in saved.values())


def kept_of_a_block(key_value_heads, dtype, checkpointing, compiled=False):
    how = (dtype, checkpointing, compiled)
    more, less = (kept(key_value_heads, layers, *how) for layers in (MANY, FEW))
    return (more - less) / (MANY - FEW)


def kept_in_each_case():
    """For a process group: bytes by dtype, heads of keys and values, and checkpointing."""
    cases = {}
    for dtype in DTYPES:
        for heads in KEY_VALUE_HEADS:
            for checkpointing in (False, True):
                case = kept_of_a_block(heads, dtype, checkpointing)
                cases[f"{dtype} {heads} {checkpointing}"] = case
    return cases


def memory():
    """What a block keeps for the backward pass on a rank, counted, and by the formula.

    The formula takes what is counted on one rank, M. In values it is M / C for the block, keys and
    values of the other ranks' tokens, and the output of attention once more."""
    counted = {ranks: on_a_group(ranks, kept_in_each_case) for ranks in (1, 2, 4)}
    rows = []
    for case, whole in counted[1].items():
        dtype, heads, checkpointing = case.split()
        config, size = llama(int(heads), 1), DTYPES[dtype].itemsize
        name = "yes" if checkpointing == "True" else "no"
        row = [dtype, heads, name, f"{whole / 1e6:.3f}"]
        for ranks in (2, 4):
            formula = whole / ranks
            if checkpointing == "False":
                output = config.num_attention_heads * config.head_dim
                keys_and_values = 2 * config.num_key_value_heads * config.head_dim
                more = keys_and_values * (1 - 1 / ranks) + output / ranks
                formula += LENGTH * size * more
            row += [f"{counted[ranks][case] / 1e6:.3f}", f"{formula / 1e6:.3f}"]
        rows.append(row)
    head = ["dtype", "heads of keys and values, of 8", "checkpointing", "stage 03, MB"]
    head += ["C = 2, MB", "formula", "C = 4, MB", "formula"]
    report("context-memory", head, rows)


# The longest sequence


def parts_of_a_peak(model, length, ranks, recompute):
    """Bytes on each of 8 GPUs, with one sequence of `length` tokens in a context group."""
    split = plan.Split(STAGE_09, shards=8, context_size=ranks)
    return scale.memory(model, length, recompute, split)


def longest(name, ranks, recompute):
    """The longest sequence that fits in 80 GB, a multiple of 256, and its parts in bytes."""
    limit, step = 80e9, 256
    model = scale.model_of(name, step)

    def total(length):
        return sum(parts_of_a_peak(model, length, ranks, recompute).values())

    low, high = 0, 1
    while total(high * step) < limit:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if total(middle * step) < limit else (low, middle)
    return low * step, parts_of_a_peak(model, low * step, ranks, recompute)


def sequences():
    """The longest sequence in the memory of 8 GPUs of 80 GB, on paper."""
    rows = []
    for name, label in (("Llama-3.2-1B", "Llama-3.2-1B"), ("Llama-3-8B", "Llama-3.1-8B")):
        model = scale.model_of(name, 256)
        for recompute in (False, True):
            for ranks in (1, 2, 4, 8):
                length, parts = longest(name, ranks, recompute)
                row = [label, "yes" if recompute else "no", ranks, f"{length:,}"]
                state = parts["parameters"] + parts["gradients"] + parts["moments"]
                sizes = [state, parts["copies"], parts["activations"], parts["logits"]]
                row += [f"{size / 1e9:.1f}" for size in (*sizes, sum(parts.values()))]
                at_128k = sum(parts_of_a_peak(model, 131072, ranks, recompute).values())
                rows.append([*row, f"{at_128k / 1e9:.1f}"])
    head = ["8 GPUs of 80 GB", "checkpointing", "C", "longest sequence, tokens"]
    head += ["at the peak: state, GB", "gathered parameters and their gradients", "activations"]
    report("context-longest", [*head, "logits", "all", "all with 131,072 tokens"], rows)


# What a rank receives


# In an all-gather and in a reduce-scatter over C ranks, each of them receives (C - 1) / C of all
# bytes. In an all-reduce it receives twice that.
TIMES = {
    "_c10d_functional.all_gather_into_tensor": 1,
    "_c10d_functional.reduce_scatter_tensor": 1,
    "_c10d_functional.all_reduce": 2,
}


class Count(TorchDispatchMode):
    """Counts the bytes that this rank receives by collectives."""

    def __init__(self, ranks):
        super().__init__()
        self.share = (ranks - 1) / ranks
        self.received = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(t, (DTensor, AsyncCollectiveTensor)) for t in types):
            return NotImplemented  # its parts come here one by one
        result = function(*args, **(kwargs or {}))
        times = TIMES.get(str(function).removesuffix(".default"), 0)
        if times and not isinstance(result, FakeTensor):
            self.received += times * self.share * max(args[0].nbytes, result.nbytes)
        return result


def mask_without_modes(length, end):
    """The mask of stage 09, which cannot be made while a TorchDispatchMode is active."""
    with _disable_current_modes():
        return causal_lower_right(length, end)


def received_of_a_block(stage_name, key_value_heads, checkpointing):
    """Bytes that a rank receives for a block and a sequence in fp32: forward and backward."""
    counts = []
    for layers in (MANY, FEW):
        config = llama(key_value_heads, layers)
        stage, _, loss = split_model(stage_name, config, torch.float32, checkpointing)
        stage.causal_lower_right = mask_without_modes
        forward, backward = Count(dist.get_world_size()), Count(dist.get_world_size())
        # Stage 07 computes its loss from logits that are split over the ranks.
        parallel = stage.loss_parallel if stage_name == STAGE_07 else contextlib.nullcontext
        with parallel():
            with forward:
                value = loss(random_tokens())
            with backward:
                value.backward()
        counts.append((forward.received, backward.received))
    return [(more - less) / (MANY - FEW) for more, less in zip(*counts, strict=True)]


def received_in_each_case():
    cases = []
    for stage in (STAGE_09, STAGE_07):
        for heads in KEY_VALUE_HEADS:
            if stage == STAGE_07 and heads % dist.get_world_size() > 0:
                continue  # stage 07 splits heads
            for checkpointing in (False, True):
                both = received_of_a_block(stage, heads, checkpointing)
                cases.append((stage, heads, checkpointing, *both))
    return cases


def received_by_formula(stage, config, ranks, checkpointing):
    """Bytes in fp32, forward and backward. `ring` is the least that a ring of attention needs."""
    share = 4 * LENGTH * (ranks - 1) / ranks
    keys_and_values = 2 * share * config.num_key_value_heads * config.head_dim
    hidden_states = share * config.hidden_size
    if stage == STAGE_09:
        return keys_and_values, keys_and_values * (2 if checkpointing else 1)
    if stage == "ring":  # keys and values once more, and their gradients
        return keys_and_values, keys_and_values * (3 if checkpointing else 2)
    return 4 * hidden_states, hidden_states * (7 if checkpointing else 4)


def received():
    """What a rank receives for a block and a sequence, counted: stage 09, 07, and a ring."""
    rows = []
    for ranks in (2, 4):
        cases = on_a_group(ranks, received_in_each_case)
        for heads in KEY_VALUE_HEADS:
            cases += [("ring", heads, checkpointing, None, None) for checkpointing in (False, True)]
        for stage, heads, checkpointing, *counted in cases:
            name = "a ring, at least" if stage == "ring" else f"stage {stage[:2]}"
            row = [ranks, name, heads, "yes" if checkpointing else "no"]
            formulas = received_by_formula(stage, llama(heads, 1), ranks, checkpointing)
            for value, formula in zip(counted, formulas, strict=True):
                row.append("–" if value is None else f"{value / 1e6:.3f}")
                row.append(f"{formula / 1e6:.3f}")
            rows.append(row)
    head = ["ranks of a group", "", "heads of keys and values, of 8", "checkpointing"]
    head += ["forward, MB", "formula", "backward, MB", "formula"]
    report("context-bytes", head, rows)


# The share of attention


def matrix_values(config):
    """Parameters of a block that are in matrices."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return sum(p.numel() for p in model.model.layers[0].parameters() if p.ndim == 2)


def attention_share(config, length):
    """The share of two products, queries with keys and weights with values, of a block's FLOPs.

    For each token the other products have 6 FLOPs for each parameter, forward and backward. These
    two have 12 for each token that it sees, half of all on average, and value of its queries."""
    width = config.num_attention_heads * config.head_dim
    attention = 12 * (length + 1) / 2 * width
    return attention / (attention + 6 * matrix_values(config))


def flops():
    """The share of attention in the FLOPs of a block by length, on paper."""
    configs = [scale.config_of(name) for name in ("Llama-3.2-1B", "Llama-3-8B")]
    rows = []
    for exponent in range(10, 18):
        shares = [f"{100 * attention_share(config, 2**exponent):.0f} %" for config in configs]
        rows.append([f"{2**exponent:,}", *shares])
    report("context-flops", ["tokens of a sequence", "Llama-3.2-1B", "Llama-3.1-8B"], rows)


def time_of_attention(length, rounds=7):
    """The share of attention in the time of a block's forward pass: median of the rounds."""
    config = llama(8, 1, length)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    attention = transformers.AttentionInterface()["sdpa"]
    spent = []

    def timed(*arguments, **options):
        begin = time.perf_counter()
        result = attention(*arguments, **options)
        spent.append(time.perf_counter() - begin)
        return result

    transformers.AttentionInterface.register("timed", timed)
    masks = transformers.AttentionMaskInterface()["sdpa"]
    transformers.AttentionMaskInterface.register("timed", masks)
    model.set_attn_implementation("timed")
    block = model.model.layers[0]
    hidden = torch.randn(1, length, config.hidden_size)
    positions = model.model.rotary_emb(hidden, torch.arange(length)[None])
    shares = []
    for _ in range(rounds + 1):  # the first one is slower
        begin = time.perf_counter()
        with torch.no_grad():
            block(hidden, position_embeddings=positions, attention_mask=None)
        shares.append(spent[-1] / (time.perf_counter() - begin))
    return statistics.median(shares[1:])


def attention_time():
    """The share of attention in the time of a block on this CPU, one thread, forward pass."""
    rows = []
    for length in (256, 512, 1024, 2048, 4096):
        by_flops = attention_share(llama(8, 1), length)
        share = time_of_attention(length)
        rows.append([f"{length:,}", f"{100 * by_flops:.0f} %", f"{100 * share:.0f} %"])
    head = ["tokens of a sequence", "share of attention in the FLOPs of a block", "in its time"]
    report("context-attention", head, rows)


# Balance


def chunks_of(rank, ranks, zigzag):
    return (rank, 2 * ranks - 1 - rank) if zigzag else (2 * rank, 2 * rank + 1)


def pairs(rank, ranks, zigzag, length):
    """Pairs of a query of a rank and a key that it sees."""
    size = length // (2 * ranks)
    count = 0
    for chunk in chunks_of(rank, ranks, zigzag):
        count += sum(range(chunk * size + 1, (chunk + 1) * size + 1))
    return count


def seconds_of_attention(rank, ranks, zigzag, length):
    """Forward and backward of a rank's attention, as `attend` computes it, keys being there."""
    heads, head_size, size = 8, 32, length // (2 * ranks)
    key, value = torch.randn(2, 1, heads, length, head_size, requires_grad=True)
    queries = torch.randn(2, 1, heads, size, head_size, requires_grad=True)
    begin = time.perf_counter()
    for query, chunk in zip(queries, chunks_of(rank, ranks, zigzag), strict=True):
        end = (chunk + 1) * size
        mask = causal_lower_right(size, end)
        k, v = key[:, :, :end], value[:, :, :end]
        F.scaled_dot_product_attention(query, k, v, mask).sum().backward()
    return time.perf_counter() - begin


def balance():
    """The work of attention on the ranks: pairs of tokens, counted, and time, on this CPU."""
    length, rounds = 4096, 5
    rows = []
    for ranks in (2, 4, 8):
        for zigzag in (True, False):
            work = [pairs(rank, ranks, zigzag, length) for rank in range(ranks)]
            row = [ranks, "stage 09" if zigzag else "two chunks that follow one another"]
            row.append(f"{max(work) / statistics.mean(work):.3f}")
            row.append(f"{max(work) / min(work):.3f}")
            if ranks == 2:
                times = [[], []]
                for _ in range(rounds + 1):  # the first one is slower
                    for rank in (0, 1):
                        seconds = seconds_of_attention(rank, ranks, zigzag, length)
                        times[rank].append(seconds)
                medians = [statistics.median(of_rank[1:]) for of_rank in times]
                row.append(f"{max(medians) / min(medians):.2f}")
            else:
                row.append("–")
            rows.append(row)
    head = ["C", "chunks of a rank", "pairs of the rank with most, over the mean"]
    head += ["over the rank with fewest", "time of the slowest rank, over the fastest"]
    report("context-balance", head, rows)


def context():
    """All tables of stage 09 but `traps`."""
    torch.set_num_threads(1)
    for table in (memory, sequences, received, flops, attention_time, balance):
        table()


def traps():
    """The mistakes of traps.py in a run of 400 steps, and in a step of the model that this made."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("COURSE_HF_HOME", folder)
        trained = Path(folder, "0", "a", "final_model")  # of stage 09 as it is, which is first
        for number, (name, (edits, _)) in enumerate(CONTEXT_WRONGLY.items()):
            place = Path(folder, str(number))
            found = run_context_wrongly(place, edits, "--max-steps", 400)
            row = [name, f"{found[400]['train/loss']:.4f}", f"{found[400]['eval/loss']:.4f}"]
            row.append(f"{exported_loss(place):.4f}")
            further = ("-m", trained, "--max-steps", 1, "--lr", 1e-30)
            again = run_context_wrongly(place / "again", edits, *further)[1]
            row += [f"{again['train/loss']:.4f}", f"{again['train/grad_norm']:.3f}"]
            row.append(f"{again['eval/loss']:.4f}")
            rows.append(row)
            print(row, flush=True)
    head = ["mistake", "loss, step 400", "eval/loss", "of the exported model, by stage 01"]
    head += ["loss of a trained model, step 1", "gradient norm, step 1", "eval/loss"]
    report("context-traps", head, rows)
