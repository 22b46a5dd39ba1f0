"""Expert parallelism: state, bytes, balance, time by load, and what torch.compile does.

What is counted is counted on CPUs and does not depend on the machine."""

import json
import os
import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import scale
import torch
import torch.distributed as dist
from bench_common import STAGE_01, STAGE_03, STAGE_10, report
from bench_context import on_a_group
from conftest import TINY, data_args, load, metrics, mutant, run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import plan

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CPU = torch.device("cpu")
BATCH = 4  # sequences of a micro-batch, the default


def tiny(**sizes):
    """The config of the tiny model of stage 10, for 03 too."""
    config = load(STAGE_10).load_config(load(STAGE_10).TINY)
    for name, size in sizes.items():
        setattr(config, name, size)
    return config


def shard(stage_name, config, expert_size, dtype="fp32", checkpointing=False, **changes):
    """A stage, its model as it is on a rank when training begins, and the modules of experts.

    `changes` replace functions of the stage."""
    stage = load(stage_name)
    for name, function in changes.items():
        setattr(stage, name, function)
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        model = stage.load_model(config, None, "sdpa", 0)
    weights = model.state_dict()
    blocks, experts = model.model.layers, []
    for block in blocks if checkpointing else ():
        again = {"use_reentrant": False, "preserve_rng_state": False}
        block.forward = partial(checkpoint, block.forward, **again)
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[dtype], reduce_dtype=torch.float32)
    options = {"mp_policy": policy, "offload_policy": OffloadPolicy()}
    if stage_name == STAGE_10:
        own = options | {"mp_policy": replace(policy, cast_forward_inputs=False)}
        shape, names = (ranks // expert_size, expert_size), ("shard", "expert")
        table = init_device_mesh("cpu", shape, mesh_dim_names=names)
        experts = stage.split_experts(model, table, **own)
    for module in [*blocks, model]:
        fully_shard(module, mesh=mesh, **options)
    stage.send_weights(model, weights, CPU, cpu_offload=False)
    return stage, model, experts


def micro_batch(stage):
    """The first micro-batch of this rank in the default run: input_ids and targets."""
    args = data_args("python-docs", 256)
    data, _, _ = stage.load_data(args, tiny(), stage.load_tokenizer(TINY, ""))
    rank = dist.get_rank()
    rows = range(rank * BATCH, (rank + 1) * BATCH)
    [batch], _ = stage.make_micro_batches(data, rows, BATCH, CPU, dist.new_group([rank]))
    return batch


def of_all_ranks(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# State of a rank


def state_of_ranks(stage_name, config, expert_size, dimension=None):
    """Bytes of parameters, gradients and moments on each rank after a step, and of its experts."""
    changes = {}
    if dimension is not None:
        changes["choose_dimension"] = lambda num_ranks, parameter: Shard(dimension)
    stage, model, _ = shard(stage_name, config, expert_size, **changes)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.arange(64)[None]
    stage.sum_cross_entropy(model(input_ids=ids, use_cache=False).logits, ids).backward()
    optimizer.step()
    sizes = [0, 0]
    for name, parameter in model.named_parameters():
        tensors = [parameter, parameter.grad, *optimizer.state[parameter].values()]
        for tensor in tensors:
            nbytes = tensor.to_local().nbytes if isinstance(tensor, DTensor) else tensor.nbytes
            sizes[0] += nbytes if tensor.ndim else 0  # without the numbers of steps
            sizes[1] += nbytes if tensor.ndim and ".experts." in name else 0
    return of_all_ranks(sizes)


def state():
    """State of each rank, counted after a step, against 16 bytes for each parameter, shared out."""
    small = {"num_local_experts": 4}
    cases = [(STAGE_03, {}, ranks, 1, None) for ranks in (1, 2, 4)]
    cases += [(STAGE_10, {}, n, x, None) for n in (1, 2, 4) for x in (1, 2, 4) if x <= n]
    cases += [(STAGE_03, small, 8, 1, None), (STAGE_10, small, 8, 2, 0)]
    cases += [(STAGE_10, small, 8, 2, None), (STAGE_10, small, 8, 4, None)]
    rows = []
    for stage, sizes, ranks, expert_size, dimension in cases:
        config = tiny(**sizes)
        found = on_a_group(ranks, state_of_ranks, stage, config, expert_size, dimension)
        whole, of_experts = zip(*found, strict=True)
        n = plan.sizes_of(config, 256).num_parameters
        row = [f"stage {stage[:2]}" + ("" if dimension is None else ", always dimension 0")]
        row += [config.num_local_experts, ranks, expert_size if stage == STAGE_10 else "–"]
        row += [f"{16 * n / ranks / 1e3:,.1f}"]
        row += [f"{size / 1e3:,.1f}" for size in (max(whole), min(whole))]
        row += [f"{size / 1e3:,.1f}" for size in (max(of_experts), min(of_experts))]
        rows.append(row)
    head = ["", "experts of a block", "ranks", "X", "16 N / ranks, kB", "largest rank, kB"]
    head += ["smallest rank", "experts on the rank with most, kB", "with fewest"]
    report("experts-state", head, rows)


# Bytes


class Sent:
    """Counts the bytes that this rank sends to others by the collectives of FSDP and stage 10.

    In a ring of n ranks each sends (n - 1) / n of what is gathered or scattered."""

    NAMES = ("all_gather_single", "reduce_scatter_single", "all_to_all_single")

    def __init__(self, values_of_experts):
        self.values_of_experts = values_of_experts  # of a block, in an expert group's rank
        self.fsdp = self.fsdp_of_experts = self.rows = self.counts = 0

    def count_fsdp(self, whole, group):
        ranks = dist.get_world_size(group)
        sent = whole.nbytes * (ranks - 1) / ranks
        self.fsdp += sent
        if whole.numel() == self.values_of_experts:
            self.fsdp_of_experts += sent

    def __enter__(self):
        self.real = [getattr(dist, name) for name in self.NAMES]
        gather, scatter, exchange = self.real

        def gather_and_count(output_tensor, input_tensor, group=None, **more):
            self.count_fsdp(output_tensor, group)
            return gather(output_tensor, input_tensor, group=group, **more)

        def scatter_and_count(output, input, group=None, **more):
            self.count_fsdp(input, group)
            return scatter(output, input, group=group, **more)

        def exchange_and_count(output, input, received=None, sent=None, group=None):
            own, ranks = dist.get_rank(group), dist.get_world_size(group)
            if sent is None:
                self.counts += input.nbytes * (ranks - 1) / ranks
            else:
                row = input.shape[1] * input.element_size()
                self.rows += (sum(sent) - sent[own]) * row
            return exchange(output, input, received, sent, group=group)

        functions = (gather_and_count, scatter_and_count, exchange_and_count)
        for name, function in zip(self.NAMES, functions, strict=True):
            setattr(dist, name, function)
        return self

    def __exit__(self, *error):
        for name, function in zip(self.NAMES, self.real, strict=True):
            setattr(dist, name, function)


def balanced(forward, num_experts, hidden_states, top_k_index, top_k_weights):
    """`forward` with routes by which all experts have equally many rows."""
    made = torch.arange(top_k_index.numel()) % num_experts
    return forward(hidden_states, made.view_as(top_k_index), top_k_weights)


def sent_for_a_block(stage_name, expert_size, dtype, checkpointing, is_balanced):
    """Bytes that a rank sends in a micro-batch: FSDP in all, and for a block of it, mean of ranks:
    FSDP for the experts, rows, counts. Forward and backward."""
    config = tiny()
    stage, model, experts = shard(stage_name, config, expert_size, dtype, checkpointing)
    for module in experts if is_balanced else ():
        module.forward = partial(balanced, module.forward, config.num_local_experts)
    values = scale.values_of_experts(config) * config.num_local_experts // expert_size
    ids, targets = micro_batch(stage)
    with Sent(values if stage_name == STAGE_10 else 0) as sent:
        logits = model(input_ids=ids, use_cache=False).logits
        stage.sum_cross_entropy(logits, targets).backward()
    counted = [sent.fsdp_of_experts, sent.rows, sent.counts]
    counted = [count / len(model.model.layers) for count in counted]
    found = of_all_ranks([sent.fsdp, *counted])
    return [statistics.mean(column) for column in zip(*found, strict=True)]


HOW = [("bf16", False), ("bf16", True), ("fp32", False)]


def sent_in_each_case():
    """For each dtype, with checkpointing or not: stage 03, and then X = 1, 2, 4, with balanced
    routes and with those of the router."""
    cases = []
    for how in HOW:
        case = [sent_for_a_block(STAGE_03, 1, *how, False)]
        for expert_size in (1, 2, 4):
            for is_balanced in (True, False):
                case.append(sent_for_a_block(STAGE_10, expert_size, *how, is_balanced))
        cases.append(case)
    return cases


def sent():
    """What a rank sends for the experts of a block of tiny in a micro-batch of 1,024 tokens.

    And the number of tokens below which stage 10 sends less than 03, for published models."""
    ranks, tokens, rows, config = 4, BATCH * 256, [], tiny()
    cases = on_a_group(ranks, sent_in_each_case)
    for (dtype, checkpointing), (in_03, *of_sizes) in zip(HOW, cases, strict=True):
        # In stage 03 FSDP sends for the other parameters what it sends with X = 1.
        whole, experts_alone, *_ = of_sizes[0]
        of_03 = (in_03[0] - whole) / config.num_hidden_layers + experts_alone
        for number, expert_size in enumerate((0, 1, 2, 4)):
            size = max(expert_size, 1)
            case = (config, tokens, ranks, size, DTYPES[dtype].itemsize, checkpointing)
            by_fsdp, by_rows = scale.expert_bytes(*case)
            row = [dtype, "yes" if checkpointing else "no", expert_size or "stage 03"]
            fsdp, even, real, counts = of_03, 0, 0, 0
            if expert_size:
                _, fsdp, even, counts = of_sizes[2 * number - 2]
                _, _, real, _ = of_sizes[2 * number - 1]
            values = (fsdp, by_fsdp, even, by_rows, real)
            row += [f"{value / 1e6:.3f}" for value in values]
            row += [f"{counts:.0f}", f"{(fsdp + even) / 1e6:.3f}", f"{(fsdp + even) / of_03:.2f}"]
            rows.append(row)
    head = ["dtype", "checkpointing", "X", "FSDP, for the experts, MB", "formula"]
    head += ["rows, balanced, MB", "formula", "rows, routes of the first step", "counts, bytes"]
    head += ["FSDP and rows, balanced, MB", "over stage 03"]
    report("experts-bytes", head, rows)
    break_even()


def break_even():
    """Tokens of a rank in a micro-batch below which stage 10 sends less than 03, on paper."""
    rows = []
    for name, config in {"tiny": tiny(), **scale.mixtures()}.items():
        experts, chosen = scale.experts_of(config)
        row = [name, config.hidden_size, experts, chosen]
        row.append(f"{scale.values_of_experts(config) / 1e6:.2f}")
        for c, checkpointing in ((2, False), (2, True), (4, False)):
            tokens = scale.break_even_tokens(config, c, checkpointing)
            row.append(f"{tokens:,.0f}")
        rows.append([*row, f"{scale.break_even_tokens(config, 2, True) / 4096:.1f}"])
    head = ["model", "hidden size", "experts of a block, E", "of a token, K"]
    head += ["parameters of an expert, million", "bf16, tokens", "bf16, checkpointing, tokens"]
    head += ["fp32, tokens", "bf16, checkpointing, sequences of 4,096"]
    report("experts-break-even", head, rows)


# Load


def time_of_loads(loads, rounds):
    """Seconds of a forward and backward pass of the experts of a block, for each load of rank 0."""
    hidden, tokens, num_experts = 256, 2048, 8
    sizes = {"hidden_size": hidden, "intermediate_size": 512, "vocab_size": 1024}
    config = tiny(**sizes, num_hidden_layers=1, head_dim=64)
    _, _, [experts] = shard(STAGE_10, config, dist.get_world_size())
    seconds = [[] for _ in loads]
    pairs = tokens * 2
    for _ in range(rounds + 1):  # the first one is slower
        for number, load_of_rank in enumerate(loads):
            first = round(pairs * load_of_rank / 2)  # so many pairs go to rank 0
            own = num_experts // 2
            routes = torch.arange(pairs) % own
            routes[first:] += own
            routes = routes[torch.randperm(pairs)].view(tokens, 2)
            states = torch.randn(tokens, hidden, requires_grad=True)
            dist.barrier()
            begin = time.perf_counter()
            experts(states, routes, torch.full((tokens, 2), 0.5)).sum().backward()
            dist.barrier()  # until both ranks are done
            seconds[number].append(time.perf_counter() - begin)
    return [[of_round[i] for of_round in seconds] for i in range(1, rounds + 1)]


RECEIVED = (
    "    num_sent, num_received = torch.stack([counts, counts_received]).sum(dim=2).tolist()\n"
)
MEAN = "sum(num_received) / top_k_index.numel()"
WATCHED = [
    (RECEIVED, RECEIVED + f"    experts.most = max(getattr(experts, 'most', 0), {MEAN})\n"),
    (
        "            load = load / load.float()",
        "            most = torch.tensor([module.most for module in experts]).max()\n"
        "            dist.all_reduce(most, dist.ReduceOp.MAX)\n"
        "            load = load / load.float()",
    ),
    (
        '                "train/max_load_of_rank":',
        '                "most": most.item(),\n                "train/max_load_of_rank":',
    ),
]


def load_of_ranks():
    """Time by load of the busiest rank, two ranks; and its load in the default run."""
    loads, rounds = [1.0, 1.25, 1.5, 1.75, 2.0], 21
    found = on_a_group(2, time_of_loads, loads, rounds)
    rows = []
    for number, load_of_rank in enumerate(loads):
        ratios = [of_round[number] / of_round[0] for of_round in found]
        row = [f"{load_of_rank:.2f}", f"{statistics.median(ratios):.2f}"]
        quarters = statistics.quantiles(ratios, n=4)
        rows.append([*row, f"{quarters[0]:.2f} to {quarters[2]:.2f}"])
    head = ["rows of the busiest rank, over the mean", "time against balanced routes, median"]
    report("experts-time", [*head, "middle half of the rounds"], rows)

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("COURSE_HF_HOME", folder)
        for expert_size in (2, 4):
            place = Path(folder, str(expert_size))
            path = mutant(place, STAGE_10, *WATCHED)
            flags = ("--max-steps", 300, "--log-freq", 10, "--expert-size", expert_size)
            flags += ("-e", "a", "--save-dir", place)
            run(STAGE_10, expert_size, *flags, path=path, cwd=folder)
            lines = metrics(place / "a")
            busiest = {s: x["train/max_load_of_rank"] for s, x in lines.items() if "most" in x}
            row = [expert_size, f"{lines[1]['most']:.2f}", f"{lines[60]['most']:.2f}"]
            row += [f"{lines[300]['most']:.2f}", f"{max(busiest.values()):.2f}"]
            rows.append([*row, f"{busiest[300]:.2f}"])
    head = ["X", "most rows that a rank received in a pass, over the mean: step 1"]
    head += ["steps 1 to 60", "steps 1 to 300", "busiest rank, largest mean of ten steps"]
    report("experts-rows", [*head, "of the last ten steps"], rows)


# Balance


def with_auxiliary_loss(kind, coefficient):
    """Edits that add an auxiliary loss of this kind, which the log does not count as loss."""
    router = "load_balancing_loss_func(router_logits, num_experts, num_chosen)"
    losses = {
        "transformers": f"    return {router} * (targets != -100).sum()\n",
        "sequences": "    loss = torch.zeros(())\n"
        "    num_targets = (targets != -100).sum(dim=1)\n"
        "    for logits in router_logits:\n"
        "        shares = logits.view(*targets.shape, -1).float().softmax(dim=-1)\n"
        "        chosen = F.one_hot(shares.topk(num_chosen).indices, num_experts).sum(dim=2)\n"
        "        of_sequence = (chosen.float().mean(dim=1) * shares.mean(dim=1)).sum(dim=1)\n"
        "        loss = loss + num_experts * (of_sequence * num_targets).sum()\n"
        "    return loss / len(router_logits)\n",
    }
    function = (
        "def auxiliary_loss(router_logits, targets, num_experts, num_chosen):\n"
        "    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func\n\n"
        f"{losses[kind]}\n\n"
    )
    call = (
        "            out = model(input_ids=input_ids, use_cache=False, output_router_logits=True)\n"
        "            loss = loss_fn(out.logits, targets)\n"
        "            step_loss += loss.detach()\n"
        "            numbers = model.config.num_local_experts, model.config.num_experts_per_tok\n"
        "            more = auxiliary_loss(out.router_logits, targets, *numbers)\n"
        "            auxiliary = auxiliary + more.detach()\n"
        f"            loss = loss + {coefficient} * more\n"
    )
    return [
        (
            "            loss = loss_fn(forward(input_ids), targets)\n"
            "            step_loss += loss.detach()\n",
            call,
        ),
        (
            "        step_loss = torch.zeros((), device=device)\n",
            "        step_loss = torch.zeros((), device=device)\n"
            "        auxiliary = torch.zeros((), device=device)\n",
        ),
        ("def share_of_rank(", f"{function}def share_of_rank("),
        (
            "            dist.all_reduce(step_loss, group=data_group)\n",
            "            dist.all_reduce(step_loss, group=data_group)\n"
            "            dist.all_reduce(auxiliary, group=data_group)\n",
        ),
        (
            '                "train/max_load_of_rank":',
            '                "auxiliary": auxiliary.item() / num_targets.item(),\n'
            '                "train/max_load_of_rank":',
        ),
    ]


BY_BLOCK = (
    '                "train/max_load_of_expert":',
    '                **{f"largest/{i}": x.max().item() for i, x in enumerate(load)},\n'
    '                **{f"smallest/{i}": x.min().item() for i, x in enumerate(load)},\n'
    '                "train/max_load_of_expert":',
)
BALANCES = {
    "stage 10, no auxiliary loss": [],
    "transformers' loss, 0.001": with_auxiliary_loss("transformers", 0.001),
    "transformers' loss, 0.02": with_auxiliary_loss("transformers", 0.02),
    "a loss for each sequence, 0.02": with_auxiliary_loss("sequences", 0.02),
}


def run_balance(place, edits, *flags):
    path = mutant(place, STAGE_10, *edits)
    flags = (*flags, "-e", "a", "--save-dir", place)
    run(STAGE_10, 2, *flags, path=path, cwd=place)
    return metrics(place / "a")


def balance():
    """Loads of experts and losses after 300 steps of the default run, and what a split changes."""
    rows, rows_of_splits = [], []
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("COURSE_HF_HOME", folder)
        for name, edits in BALANCES.items():
            for seed in (0, 1):
                place = Path(folder, f"{len(rows)}")
                flags = ("--max-steps", 300, "--log-freq", 100, "--seed", seed)
                last = run_balance(place, [BY_BLOCK, *edits], *flags)[300]
                row = [name, seed]
                for i in range(3):
                    row.append(f"{last[f'largest/{i}']:.2f} / {last[f'smallest/{i}']:.2f}")
                row += [f"{last['train/loss']:.4f}", f"{last['eval/loss']:.4f}"]
                rows.append(row)
                print(row, flush=True)
        for seed in (0, 1):
            flags = ("--max-steps", 300, "--log-freq", 100, "--seed", seed)
            run(STAGE_03, 2, *flags, "-e", f"dense-{seed}", "--save-dir", folder, cwd=folder)
            last = metrics(Path(folder, f"dense-{seed}"))[300]
            row = ["stage 03, its tiny", seed, "–", "–", "–"]
            rows.append([*row, f"{last['train/loss']:.4f}", f"{last['eval/loss']:.4f}"])
        head = ["", "seed", *(f"block {i}, largest / smallest load of an expert" for i in range(3))]
        report("experts-balance", [*head, "loss, step 300", "eval/loss"], rows)

        trained = Path(folder, "0", "a", "final_model")  # of stage 10 as it is, seed 0
        for name, edits in BALANCES.items():
            found = []
            for size in (4, 2, 1):
                place = Path(folder, f"split-{len(rows_of_splits)}-{size}")
                flags = ("-m", trained, "--max-steps", 1, "--lr", 1e-30, "-b", size)
                found.append(run_balance(place, edits, *flags)[1])
            row = [name]
            for metric in ("train/loss", "auxiliary", "train/grad_norm"):
                values = [line.get(metric) for line in found]
                if values[0] is None:
                    row += ["–", "–"]
                    continue
                row.append(f"{values[0]:.4f}")
                difference = max(abs(value / values[0] - 1) for value in values[1:])
                row.append(f"{difference:.1e}" if difference > 1e-6 else "< 1e-6")  # rounding
            rows_of_splits.append(row)
        head = ["", "loss, `-b 4`", "largest difference with `-b 2` and `-b 1`"]
        head += ["auxiliary loss, `-b 4`", "difference", "gradient norm, `-b 4`", "difference"]
        report("experts-splits", head, rows_of_splits)


# One curve, until a route flips


def curve():
    """Losses of stage 10 and of stage 01, which trains the same model with several batch sizes."""
    rows, steps = [], (1, 20, 30, 40, 60)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("COURSE_HF_HOME", folder)
        tiny().save_pretrained(Path(folder, "mixture"))
        model = ("-m", Path(folder, "mixture"), "--from-scratch")
        cases = [(STAGE_10, 2, 4), (STAGE_01, 1, 4), (STAGE_01, 1, 8), (STAGE_01, 1, 2)]
        for stage, processes, size in cases:
            place = Path(folder, str(len(rows)))
            flags = ("--max-steps", 60, "-b", size, "-e", "a", "--save-dir", place)
            run(stage, processes, *model, *flags, cwd=folder)
            found = metrics(place / "a")
            row = [f"stage {stage[:2]}", processes, size]
            rows.append(row + [f"{found[step]['train/loss']:.4f}" for step in steps])
            rows[-1].append(f"{found[60]['eval/loss']:.4f}")
    head = ["", "processes", "`-b`", *(f"loss, step {step}" for step in steps), "eval/loss"]
    report("experts-curve", head, rows)


# torch.compile


# Keeps which functions each graph calls that dynamo gives the compiler, and how many graphs it
# had compiled after each step.
KEEPS_GRAPHS = """
graphs, after_steps = [], []


def keep_graph(graph, inputs):
    from torch._inductor.compile_fx import compile_fx

    calls = [node for node in graph.graph.nodes if node.op.startswith("call_")]
    graphs.append([getattr(node.target, "__name__", str(node.target)) for node in calls])
    return compile_fx(graph, inputs)


"""
BEGIN, UPDATED = "@record  # torchrun", '        log.lap("update")\n'
LAST_LINE = '    say(f"what the model writes'
KEPT = "[graphs, after_steps, dict(torch._dynamo.utils.counters['graph_break'])]"
GRAPH_EDITS = [
    (BEGIN, KEEPS_GRAPHS + BEGIN),
    (UPDATED, f"{UPDATED}        after_steps.append(len(graphs))\n"),
    (
        LAST_LINE,
        "    if is_rank_0:\n"
        f'        (run_dir / "graphs.json").write_text(json.dumps({KEPT}))\n{LAST_LINE}',
    ),
    (
        "compiled_forward = torch.compile(forward,",
        "compiled_forward = torch.compile(forward, backend=keep_graph,",
    ),
    (
        "loss_fn = torch.compile(sum_cross_entropy,",
        "loss_fn = torch.compile(sum_cross_entropy, backend=keep_graph,",
    ),
]
# What tells the parts of a model apart, by a function that only this part calls.
PARTS = {
    "attention": "scaled_dot_product_attention",
    "router": "topk",
    "experts": "grouped",
    "loss": "cross_entropy",
}


def parts_of(graph):
    found = [part for part, name in PARTS.items() if any(name in call for call in graph)]
    return ", ".join(found) or "none of these"


def run_compiled(folder, stage, *flags):
    """Milliseconds of a step, the median of the last 20, and what was compiled."""
    place = Path(tempfile.mkdtemp(dir=folder))
    path = mutant(place, stage, *GRAPH_EDITS)
    flags = (*flags, "--max-steps", 30, "--log-freq", 1, "-e", "a", "--save-dir", place)
    run(stage, 2, *flags, path=path, cwd=place)
    lines = metrics(place / "a")
    milliseconds = statistics.median(lines[step]["time/total_ms"] for step in range(11, 31))
    return milliseconds, json.loads((place / "a" / "graphs.json").read_text())


def compiled():
    """What is compiled of a block in stages 03 and 10, and time of a step with and without it.

    Two ranks, 30 steps of the default run."""
    rounds, rows, of_graphs = 3, [], []
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("COURSE_HF_HOME", folder)
        for stage in (STAGE_03, STAGE_10):
            times = []
            for _ in range(rounds):
                eager, _ = run_compiled(folder, stage)
                fast, kept = run_compiled(folder, stage, "--compile")
                times.append((eager, fast, fast / eager))
            graphs, after_steps, breaks = kept
            of_eager, of_fast, ratios = zip(*times, strict=True)
            medians = [statistics.median(of_eager), statistics.median(of_fast)]
            row = [f"stage {stage[:2]}", *(f"{milliseconds:.0f}" for milliseconds in medians)]
            row += [f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"]
            rows.append([*row, after_steps[0], after_steps[-1], sum(breaks.values())])
            print(row, breaks, flush=True)
            # After them, evaluation adds graphs of the loss.
            for number, graph in enumerate(graphs[: after_steps[-1]], 1):
                of_graphs.append([f"stage {stage[:2]}", number, len(graph), parts_of(graph)])
    head = ["", "step, eager, ms", "compiled, ms", "ratio, median", "range"]
    head += ["graphs after step 1", "after step 30", "graph breaks"]
    report("experts-compile", head, rows)
    head = ["", "graph", "calls", "parts of the model that it has"]
    report("experts-graphs", head, of_graphs)
