"""What `--compile` compiles, and what makes Python wait for the device."""

import pytest
from conftest import STAGES, UNWATCHED, exact, mutant, run, save_tokenizer
from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig, Qwen3Config

SIZES = {
    "vocab_size": 1024,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "gemma3": Gemma3TextConfig(**SIZES, sliding_window=16),
    "gpt2": GPT2Config(vocab_size=1024, n_embd=16, n_layer=6, n_head=2, n_positions=64),
    "gpt2 with a scale by depth": GPT2Config(
        vocab_size=1024,
        n_embd=16,
        n_layer=10,
        n_head=2,
        n_positions=64,
        scale_attn_by_inverse_layer_idx=True,
    ),
}
# The kinds of blocks: in Gemma 3 five of six layers have sliding-window attention.
KINDS = {"llama": 1, "qwen3": 1, "gemma3": 2, "gpt2": 1, "gpt2 with a scale by depth": 10}
# Micro-batches of 3, 3 and 2 sequences, and evaluation between the steps.
UNEVEN = ("-s", "32", "--global-batch-size", "8", "-b", "3", "--max-steps", "4", "--eval-freq", "2")
UNEVEN += ("--eval-sequences", "8")
# PyTorch hands the compiler one graph after the other. This one counts them and compiles nothing,
# which takes seconds.
COMPILER = """
compiled = []


def count_graph(graph, inputs):
    compiled.append(graph)
    return graph.forward


"""
BEGIN = "@record  # torchrun"
LAST_LINE = '    say(f"what the model writes'


def counting(folder, stage, *edits):
    """A copy of a stage that counts what is compiled, and says it behind its sample."""
    begin = "def main(args):\n" if stage == "01-single-gpu" else BEGIN
    edits = [(begin, COMPILER + begin), *edits]
    path = mutant(
        folder, stage, *edits, (LAST_LINE, f'    say(f"graphs {{len(compiled)}}")\n{LAST_LINE}')
    )
    text = path.read_text()
    assert "dynamic=False)" in text
    path.write_text(text.replace("dynamic=False)", "dynamic=False, backend=count_graph)"))
    return path


def graphs(stage, path, *flags):
    """How many graphs a run compiles, its evaluations and its sample included."""
    processes = 1 if stage == "01-single-gpu" else 2
    flags = (*flags, "--compile", *exact(stage, processes))
    out = run(stage, processes, *flags, path=path, sampled=True).out
    return int(out.split("graphs ")[1].split()[0])


# Each architecture on stage 01, and each stage with one or two of them.
CASES = [("01-single-gpu", name) for name in CONFIGS]
CASES += [("02-ddp", "llama"), ("03-fsdp", "gemma3")]
# Every second one checkpoints activations too, and the first one does both.
AGAIN = ("--activation-checkpointing",)
CASES = [(*case, AGAIN if i % 2 else ()) for i, case in enumerate(CASES)]
QUICK = [("01-single-gpu", "llama", ()), ("01-single-gpu", "llama", AGAIN)]
CASES = [
    *QUICK,
    *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES if case != QUICK[0]),
]


@pytest.mark.parametrize(("stage", "name", "more"), CASES)
def test_a_block_is_compiled_once_per_batch_size(stage, name, more, tmp_path):
    """Not once per layer, and in stage 02 not in pieces for DDP. A short micro-batch has code of
    its own, and the full ones keep theirs. Without gradients, in the evaluation, each is compiled
    once more. A block whose activations are checkpointed is compiled, too."""
    CONFIGS[name].save_pretrained(tmp_path / name)
    save_tokenizer(tmp_path / name)
    path = counting(tmp_path, stage)
    number = graphs(stage, path, *UNEVEN, *more, "-m", tmp_path / name, "--from-scratch")
    batch_sizes = 2  # of 3 and 2 sequences, on two processes 3 and 1
    of_the_sample = KINDS[name] if stage == "01-single-gpu" else 0  # one sequence
    assert number == batch_sizes * 2 * (KINDS[name] + 1) + of_the_sample  # 1 for the loss


@pytest.mark.slow
def test_stage_10_compiles_what_is_around_the_experts(tmp_path):
    """A block is cut at its experts, which are not compiled. Two functions are left at that place,
    the one of the mixture and the one of the block, so each is two graphs: to the experts and from
    there. Other numbers of rows need no other code."""
    pieces, losses, batch_sizes = 2 * 4, 2, 2  # with gradients and without
    path = counting(tmp_path, "10-expert-parallel")
    assert graphs("10-expert-parallel", path, *UNEVEN) == batch_sizes * (pieces + losses)


WHOLE = "    torch._dynamo.config.optimize_ddp = False\n"


@pytest.mark.slow
def test_ddp_does_not_cut_a_block_into_pieces(tmp_path):
    """PyTorch would cut it where a bucket of gradients is full, here of 1 MB."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 2}
    LlamaConfig(**{**SIZES, **sizes}).save_pretrained(tmp_path / "m")
    save_tokenizer(tmp_path / "m")
    small = ("gradient_as_bucket_view=True)", "gradient_as_bucket_view=True, bucket_cap_mb=1)")
    few = ("-s", "16", "--global-batch-size", "4", "--max-steps", "2", "--eval-sequences", "2")
    numbers = []
    for name, edits in (("ours", [small]), ("cut", [small, (WHOLE, "")])):
        path = counting(tmp_path / name, "02-ddp", *edits)
        numbers.append(graphs("02-ddp", path, *few, "-m", tmp_path / "m", "--from-scratch"))
    assert numbers[0] == 4  # a block and the loss, with gradients and without
    assert numbers[1] > 4


MODE = """
from torch.utils._python_dispatch import TorchDispatchMode

class Waits(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            sys.stdout.write("Python waits\\n")
        return function(*args, **(kwargs or {}))

def watched_tolist(tensor):
    if isinstance(torch.utils._python_dispatch._get_current_dispatch_mode(), Waits):
        sys.stdout.write("Python waits\\n")
    return tolist(tensor)

tolist, torch.Tensor.tolist = torch.Tensor.tolist, watched_tolist
"""
PATCH = "transformers.masking_utils.find_packed_sequence_indices = lambda position_ids: None\n"
# From the first forward pass of a step to the end of its update.
FORWARD = "        step_loss = torch.zeros((), device=device)\n"
END = '        log.lap("update")\n'
WATCHED = [
    (PATCH, PATCH + MODE),
    (FORWARD, FORWARD + "        waits = Waits()\n        waits.__enter__()\n"),
    (END, END + "        waits.__exit__(None, None, None)\n"),
]


def number_of_waits(stage, processes, path, *more):
    few = ("-s", "32", "--global-batch-size", "4", "-b", "1", "--max-steps", "1")
    flags = (*few, "--eval-sequences", "1", *exact(stage, processes), *more)
    return run(stage, processes, *flags, path=path).out.count("Python waits")


FOUR = ("01-single-gpu", "03-fsdp", "07-tensor-parallel", "08-pipeline-parallel")


@pytest.mark.parametrize(
    "stage",
    [
        x if x in FOUR else pytest.param(x, marks=pytest.mark.slow)
        for x in STAGES
        if x != "10-expert-parallel"
    ],
)
def test_no_step_waits_for_the_device(stage, tmp_path):
    """Reading a number of a tensor waits until the device has computed it. Training does so in the
    steps that are logged, after the update."""
    edits = [UNWATCHED] if stage == "09-context-parallel" else []
    path = mutant(tmp_path, stage, *WATCHED, *edits)
    assert number_of_waits(stage, 1 if stage == "01-single-gpu" else 2, path) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("more", "times"), [((), 1), (("--activation-checkpointing",), 2)])
def test_stage_10_waits_once_for_each_block(tmp_path, more, times):
    """In the forward pass, for the numbers of rows that ranks send to each other. A block that
    repeats its forward pass waits again."""
    layers, micro_batches, processes = 3, 2, 2
    path = mutant(tmp_path, "10-expert-parallel", *WATCHED)
    number = number_of_waits("10-expert-parallel", processes, path, *more)
    assert number == times * layers * micro_batches * processes


def test_the_count_sees_what_transformers_does_by_default(tmp_path):
    edits = [(PATCH, MODE), *WATCHED[1:]]
    assert number_of_waits("01-single-gpu", 1, mutant(tmp_path, "01-single-gpu", *edits)) > 0


def test_transformers_asks_the_function_that_the_scripts_replace(tmp_path):
    """Under another name, the scripts would replace nothing, and the steps would wait again."""
    name = PATCH.split(" = ")[0]  # a line of its own: an error if there is none
    edits = [(PATCH, f'{name}\n{name} = lambda position_ids: print("asked")\n')]
    few = ("-s", "32", "--global-batch-size", "4", "--max-steps", "1", "--eval-sequences", "1")
    path = mutant(tmp_path, "01-single-gpu", *edits)
    assert "asked\n" in run("01-single-gpu", 1, *few, path=path).out


PEAK = "resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024"


@pytest.mark.slow
def test_an_evaluation_is_not_the_peak_of_memory(tmp_path):
    """Its logits take 4 bytes a token and entry of the vocabulary, as in training, and not the 10
    that a loss takes that is not compiled. Measured in MiB, with 32,768 entries."""
    sizes = {"vocab_size": 32768, "num_hidden_layers": 2, "max_position_embeddings": 256}
    LlamaConfig(**SIZES | sizes).save_pretrained(tmp_path / "m")
    save_tokenizer(tmp_path / "m")
    flags = ("-m", tmp_path / "m", "--from-scratch", "-s", 256, "-b", 8, "--dtype", "bf16")
    flags += ("--global-batch-size", 8, "--max-steps", 3, "--eval-sequences", 8, "--compile")
    place = "    # Evaluate the trained model"
    edits = [
        (place, f"    import resource\n    before = {PEAK}\n{place}"),
        (LAST_LINE, f'    say(f"peak grew by {{{PEAK} - before:.0f}} MiB")\n{LAST_LINE}'),
    ]
    path = mutant(tmp_path, "01-single-gpu", *edits)
    out = run("01-single-gpu", 1, *flags, path=path, launched=True).out
    one_byte_each = 8 * 256 * 32768 / 2**20
    assert float(out.split("peak grew by ")[1].split()[0]) < one_byte_each
