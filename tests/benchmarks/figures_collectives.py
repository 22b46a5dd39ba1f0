"""Pictures of what the ranks hold and of what they send to each other, for `figures.py`.

Each function draws one picture. `PICTURES` at the end says which."""

from canvas import Canvas

RANKS = range(4)
RANK_COLORS = ["rank0", "rank1", "rank2", "rank3"]
# The numbers that the ranks hold before a collective. In a sum each digit shows which rank has
# added to it: 1010 contains what ranks 1 and 3 had in the first place.
VALUES = [[factor * number for number in (1, 2, 3, 4)] for factor in (1, 10, 100, 1000)]
SUMS = [sum(column) for column in zip(*VALUES, strict=True)]


class Drawing(Canvas):
    """A Canvas with dashed and hatched boxes, brackets, and texts of several lines."""

    def dashed_box(self, x, y, width, height, color):
        """A rectangle with a dashed outline and nothing in it."""
        size = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        look = 'fill="none" stroke-width="1.4" stroke-dasharray="4 3" rx="2"'
        self.parts.append(f'<rect class="{color}-line" {look} {size}/>')

    def hatched_box(self, x, y, width, height, color, gap=6):
        """An outlined box with diagonal lines in it, which are `gap` pixels apart."""
        for start in range(gap, int(width + height), gap):
            # The line goes from the lower left to the upper right: x + y is the same on all of it.
            x1, y1 = max(0, start - height), min(start, height)
            x2, y2 = min(start, width), max(0, start - width)
            self.line(x + x1, y + y1, x + x2, y + y2, color)
        self.box(x, y, width, height, color, outline=True, radius=0)

    def bracket(self, x, y, width, text):
        """A line below some columns, with ends that point up, and a text below it."""
        self.line(x, y, x + width, y)
        self.line(x, y, x, y - 4)
        self.line(x + width, y, x + width, y - 4)
        self.text(x + width / 2, y + 15, text, "muted small", "middle")

    def lines(self, x, y, texts, style="muted small", spacing=17):
        """Lines of text below each other."""
        for number, text in enumerate(texts):
            self.text(x, y + number * spacing, text, style)


# What the ranks hold -----------------------------------------------------------------------------

# The part of a model that a rank holds: from left to right the parts of each layer, from top to
# bottom the layers, both as fractions (left, right, top, bottom).
WHOLE = [(0, 1, 0, 1)] * 4
QUARTERS = [(rank / 4, (rank + 1) / 4, 0, 1) for rank in RANKS]
HALVES = [(0, 0.5, 0, 1), (0.5, 1, 0, 1)] * 2
CORNERS = [(0, 0.5, 0, 0.5), (0.5, 1, 0, 0.5), (0, 0.5, 0.5, 1), (0.5, 1, 0.5, 1)]
# The activations of the layers of a pipeline stage: a rank has its own micro-batches, so they are
# not cut.
BANDS = [(0, 1, 0, 0.5)] * 2 + [(0, 1, 0.5, 1)] * 2
# Name, its color, and its bytes for each parameter. The activations are as large by assumption.
KINDS = [("parameters", 4), ("gradients", 4), ("moments", 8), ("activations", 4)]


def kind_tops(unit):
    """Where each kind of memory begins in a column, in pixels, and the height of the column."""
    tops, y = [], 0
    for kind, size in KINDS:
        if kind == "activations":
            y += 5  # they are not part of the state
        tops.append(y)
        y += size / 4 * unit + 3
    return tops, y - 3


def memory_column(canvas, x, y, width, unit, held, held_activations, gathered=False):
    """The memory of one rank. `unit` is the height of 4 bytes for each parameter.

    Grey is all that there is, and colored is what the rank holds of it. If `gathered`, one block
    of its parameters is complete for the moment."""
    for (kind, size), top in zip(KINDS, kind_tops(unit)[0], strict=True):
        height = size / 4 * unit
        canvas.box(x, y + top, width, height, "idle", radius=0)
        part = held_activations if kind == "activations" else held
        left, right, upper, lower = part
        box = (x + left * width, y + top + upper * height)
        canvas.box(*box, (right - left) * width, (lower - upper) * height, kind, radius=0)
    if gathered:
        # The model has four blocks. This is the second one of those that the rank has a part of.
        canvas.hatched_box(x, y + (held[2] + 0.25) * unit, width, unit / 4, "parameters")


# For each stage: name, what is new, bytes of state for each parameter, the parts of the state and
# of the activations that the ranks hold, whether blocks are gathered, and groups of ranks: the
# first rank of a group, the number of its ranks, and its name.
REPLICAS = [(0, 2, "replica 0"), (2, 2, "replica 1")]
TENSOR = [(0, 4, "one tensor group")]
PIPELINES = [(0, 2, "stage 0"), (2, 2, "stage 1")]
STAGES = [
    ("01-single-gpu", "one process", 16, WHOLE[:1], WHOLE, False, []),
    ("02-ddp", "a whole copy on each rank", 16, WHOLE, WHOLE, False, [(0, 4, "four replicas")]),
    ("03-fsdp", "a quarter of each layer", 4, QUARTERS, WHOLE, True, [(0, 4, "four shards")]),
    ("04-compression", "two copies, each in halves", 8, HALVES, WHOLE, True, REPLICAS),
    ("05-multinode", "like 04, replicas come and go", 8, HALVES, WHOLE, True, REPLICAS),
    ("06-streaming", "like 05, reads as it trains", 8, HALVES, WHOLE, True, REPLICAS),
    ("07-tensor-parallel", "layers computed together", 4, QUARTERS, QUARTERS, False, TENSOR),
    ("08-pipeline-parallel", "pipeline stages, in halves", 4, CORNERS, BANDS, True, PIPELINES),
]


def memory():
    """What each rank holds in each stage of the course."""
    unit, width, pitch, panel, row, margin = 28, 40, 48, 210, 280, 3
    tops, column_height = kind_tops(unit)
    canvas = Drawing(2 * row + 110, label="What each rank holds in each stage of the course")
    for number, (name, caption, size, held, activations, gathers, groups) in enumerate(STAGES):
        x, y = margin + number % 4 * panel, number // 4 * row
        canvas.text(x, y + 14, name, "text title")
        canvas.text(x, y + 32, caption, "muted small")
        top = y + 44
        below = top + column_height
        for rank, part in enumerate(held):
            left = x + rank * pitch
            memory_column(canvas, left, top, width, unit, part, activations[rank], gathers)
            label = "rank 0" if rank == 0 else rank
            canvas.text(left + width / 2, below + 15, label, "muted small", "middle")
            if activations is BANDS and rank < 2:
                middle = left + width / 2
                canvas.text(middle, top + tops[-1] + 11, "2 ×", "on-color small", "middle")
        for first, count, text in groups:
            canvas.bracket(x + first * pitch, below + 26, (count - 1) * pitch + width, text)
        canvas.text(x, below + 62, f"{size} bytes per parameter", "text title")
    # In the first panel there is one column only. Next to it are the names of its parts.
    names = [["parameters, 4 bytes"], ["gradients, 4 bytes"], ["Adam’s moments,", "8 bytes"]]
    names.append(["activations"])
    for (_, size), top, texts in zip(KINDS, tops, names, strict=True):
        y = 48 + top + size / 8 * unit - 8 * (len(texts) - 1)
        canvas.lines(margin + width + 8, y, texts, "text small", spacing=16)
    y = 2 * row + 14
    memory_legend(canvas, margin, y, "not on this rank")
    notes = [
        "Bytes per parameter of the model: what parameters, gradients and moments take on a rank.",
        "In a box, layers are from top to bottom, and the parts of each layer from left to right.",
        "Activations depend on the batch: here a micro-batch has as many bytes as the parameters. "
        "2 ×: two micro-batches.",
        "In 07 some activations are whole on each rank, so it has a little more than a quarter.",
    ]
    canvas.lines(margin, y + 27, notes)
    return canvas


def memory_legend(canvas, x, y, grey):
    """What hatched and grey boxes mean."""
    canvas.hatched_box(x, y - 11, 28, 14, "parameters")
    canvas.text(x + 36, y, "one block, gathered for the moment", "text small")
    canvas.box(x + 300, y - 11, 28, 14, "idle", radius=0)
    canvas.text(x + 336, y, grey, "text small")


def memory_ddp_fsdp():
    """What four ranks hold with data parallelism, and what they hold if they shard the model."""
    unit, width, pitch, labels, margin = 50, 66, 80, 134, 3
    tops, column_height = kind_tops(unit)
    panel = 4 * pitch + 44
    canvas = Drawing(int(column_height) + 212, label="Memory of four ranks: DDP and FSDP")
    top = 62
    names = [
        ("parameters", "4 bytes"),
        ("gradients", "4 bytes"),
        ("Adam’s moments", "8 bytes"),
        ("activations", "of a micro-batch"),
    ]
    for (_, size), start, (name, bytes_text) in zip(KINDS, tops, names, strict=True):
        middle = top + start + size / 8 * unit
        canvas.text(margin, middle - 3, name)
        canvas.text(margin, middle + 14, bytes_text, "muted small")
    panels = [
        ("02-ddp", "each rank: the whole model", WHOLE, False, 16),
        ("03-fsdp", "each rank: a quarter of each parameter", QUARTERS, True, 4),
    ]
    for number, (name, caption, held, gathers, size) in enumerate(panels):
        x = labels + number * panel
        canvas.text(x, 16, name, "text title")
        canvas.text(x, 36, caption, "muted")
        for rank, part in enumerate(held):
            left = x + rank * pitch
            memory_column(canvas, left, top, width, unit, part, WHOLE[0], gathers)
            below = top + column_height + 18
            canvas.text(left + width / 2, below, f"rank {rank}", "muted small", "middle")
        state = f"{size} bytes per parameter on each rank"
        canvas.text(x, top + column_height + 44, state, "text title")
    y = top + column_height + 80
    memory_legend(canvas, margin, y, "held by the other ranks")
    notes = [
        "In a box, layers are from top to bottom, and the parts of each layer from left to right.",
        "In the backward pass the gradients of a block are complete for a moment, too.",
        "Each rank computes all layers, on its own micro-batch: FSDP does not divide activations. "
        "Their size depends on the batch.",
    ]
    canvas.lines(margin, y + 27, notes)
    return canvas


# Collectives -------------------------------------------------------------------------------------

CELL, CELL_HEIGHT = 48, 28


def cell(canvas, x, y, value, color):
    """A number in memory. No color: memory whose values do not matter, or that is not there."""
    if color is None:
        canvas.dashed_box(x + 1, y + 1, CELL - 4, CELL_HEIGHT - 2, "line")
    else:
        canvas.box(x, y, CELL - 2, CELL_HEIGHT, color, value)


def collective(call, before, after, notes):
    """A picture with the memory of each rank before and after a call.

    `before` and `after` have for each rank four cells, each a pair of value and color, or None."""
    left, middle, row, top = 60, 180, 42, 32
    columns = 4 * CELL
    width = left + 2 * columns + middle
    canvas = Drawing(top + len(before) * row + 32 + 17 * len(notes), width, label=call)
    right = left + columns + middle
    canvas.text(left, 16, "before", "text title")
    canvas.text(right, 16, "after", "text title")
    for rank, cells in enumerate(zip(before, after, strict=True)):
        y = top + rank * row
        canvas.text(2, y + 19, f"rank {rank}")
        for x, side in zip((left, right), cells, strict=True):
            for column, content in enumerate(side):
                value, color = content or ("", None)
                cell(canvas, x + column * CELL, y, value, color)
    center = left + columns + middle / 2
    height = top + (len(before) * row - (row - CELL_HEIGHT)) / 2
    canvas.arrow(left + columns + 16, height, right - 18, height, "text", head=9)
    canvas.text(center - 1, height - 12, call, "text title", "middle")
    y = top + len(before) * row + 14
    x = left
    shown = [color for side in before + after for _, color in filter(None, side)]
    for rank, color in enumerate(RANK_COLORS):
        if color in shown:
            canvas.box(x, y - 10, 14, 12, color, radius=2)
            canvas.text(x + 20, y, f"from rank {rank}", "muted small")
            x += 104
    if "idle" in shown:
        canvas.box(x, y - 10, 14, 12, "idle", radius=2)
        canvas.text(x + 20, y, "sum", "muted small")
        x += 62
    if None in sum(before + after, []):
        canvas.dashed_box(x, y - 10, 14, 12, "line")
        canvas.text(x + 20, y, "empty", "muted small")
    canvas.lines(left, y + 26, notes, "text small")
    return canvas


def colored(values, rank):
    """Cells with the values of a rank, in its color."""
    return [(value, RANK_COLORS[rank]) for value in values]


def only(column, content):
    """Cells of which only one is there."""
    return [content if number == column else None for number in range(4)]


def broadcast():
    """Rank 0 gives its values to all."""
    before = [colored(VALUES[0], 0)] + [[None] * 4] * 3
    notes = ["All ranks get what one of them has.", "DDP: the weights, before the first step."]
    return collective("broadcast", before, [colored(VALUES[0], 0)] * 4, notes)


def all_reduce():
    """All ranks get the sums."""
    before = [colored(VALUES[rank], rank) for rank in RANKS]
    after = [[(value, "idle") for value in SUMS]] * 4
    notes = [
        "All ranks get the sums over all ranks.",
        "DDP: the gradients, in each step. A quarter of the sum is their mean.",
    ]
    return collective("all-reduce", before, after, notes)


def all_gather():
    """All ranks get the parts of all."""
    parts = [(10**rank * (rank + 1), RANK_COLORS[rank]) for rank in RANKS]
    before = [only(rank, parts[rank]) for rank in RANKS]
    notes = [
        "All ranks get the parts of all ranks.",
        "FSDP: the parameters of a block, before it computes.",
    ]
    return collective("all-gather", before, [parts] * 4, notes)


def reduce_scatter():
    """Each rank gets a part of the sums."""
    before = [colored(VALUES[rank], rank) for rank in RANKS]
    after = [only(rank, (SUMS[rank], "idle")) for rank in RANKS]
    notes = [
        "Each rank gets a part of the sums.",
        "FSDP: the gradients of a block, in the backward pass.",
    ]
    return collective("reduce-scatter", before, after, notes)


def all_to_all():
    """Each rank sends another part to each rank."""
    before = [colored(VALUES[rank], rank) for rank in RANKS]
    after = [[before[sender][rank] for sender in RANKS] for rank in RANKS]
    notes = [
        "Rank r gets part r of all ranks. Nothing is added up.",
        "Compression: encoded gradients, which the receiver decodes and averages.",
    ]
    return collective("all-to-all", before, after, notes)


def send_receive():
    """Rank 0 sends its values to rank 1, and no other rank takes part."""
    before = [colored(VALUES[0], 0), [None] * 4]
    notes = [
        "One rank sends, one receives; no other rank takes part.",
        "Pipeline: the output of a pipeline stage, to the next one.",
    ]
    return collective("send → receive", before, [colored(VALUES[0], 0)] * 2, notes)


# The ring ----------------------------------------------------------------------------------------

RING_CELL, RING_ROW = 43, 46


def ring_states():
    """The sets of ranks whose values each cell holds: states[step][rank][part], steps 0 to 6.

    In each step rank r sends one part to rank r + 1, and rank 3 sends to rank 0. Also returns for
    each step which part each rank receives."""
    state = [[{rank} for _ in RANKS] for rank in RANKS]
    states, received = [state], [None]
    for step in range(1, 7):
        # In the first three steps a rank adds what it receives. Then it has one complete part, and
        # in the other three steps it receives the complete parts of the others.
        first = 1 if step <= 3 else 0
        parts = [(rank - first - (step if step <= 3 else step - 3)) % 4 for rank in RANKS]
        new = [list(row) for row in state]
        for rank, part in enumerate(parts):
            new[rank][part] = state[rank][part] | state[rank - 1][part]
        state = new
        states.append(state)
        received.append(parts)
    return states, received


def ring_cell(canvas, x, y, ranks, part):
    """A cell with the sum over some ranks. If they are not all, a bar shows which they are."""
    width, height, bar = RING_CELL - 3, CELL_HEIGHT, 8
    value = sum(VALUES[rank][part] for rank in ranks)
    if len(ranks) == 1:
        canvas.box(x, y, width, height, RANK_COLORS[min(ranks)], value, radius=0)
    elif len(ranks) < 4:
        canvas.box(x, y, width, height, "idle", radius=0)
        canvas.text(x + width / 2, y + 15, value, "text", "middle")
        # In the order of the digits: the last digit is that of rank 0.
        stripe = width / len(ranks)
        for number, rank in enumerate(sorted(ranks, reverse=True)):
            color = RANK_COLORS[rank]
            canvas.box(x + number * stripe, y + height - bar, stripe, bar, color, radius=0)
    else:
        canvas.box(x, y, width, height, "idle", value, radius=0)
        canvas.box(x, y, width, height, "text", outline=True, radius=0)


def ring_all_reduce():
    """The algorithm by which ranks in a ring add up their values, step by step."""
    left, grid, top = 54, 197, 76
    block = 4 * RING_ROW + 96
    states, received = ring_states()
    canvas = Drawing(2 * block + 26, label="Ring all-reduce with four ranks")
    for step, state in enumerate(states):
        column, line = (step, 0) if step <= 3 else (step - 3, 1)
        x, y = left + column * grid, top + line * block
        title = "before" if step == 0 else f"step {step}"
        canvas.text(x, y - 28, title, "text title" if step == 0 else "text")
        for rank, row in enumerate(state):
            row_y = y + rank * RING_ROW
            if column == 0 or (line == 1 and column == 1):
                canvas.text(x - 52, row_y + 19, f"rank {rank}")
            for part, ranks in enumerate(row):
                ring_cell(canvas, x + part * RING_CELL, row_y, ranks, part)
            if step > 0:
                middle = x + received[step][rank] * RING_CELL + (RING_CELL - 3) / 2
                canvas.arrow(middle, row_y - 16, middle, row_y - 1, "text")
                if rank == 0:  # from the last rank: the ring is closed
                    end = y + 3 * RING_ROW + CELL_HEIGHT
                    canvas.line(middle, end + 1, middle, end + 12, "text")
    canvas.text(left + grid, 18, "reduce-scatter: add what arrives", "text title")
    canvas.text(left + grid, block + 18, "all-gather: pass on what is complete", "text title")
    x, y = 2, block + top
    legend = [({2}, ["of one rank"]), ({0, 1, 3}, ["a sum of some ranks:", "the bar says which"])]
    legend += [({0, 1, 2, 3}, ["the complete sum"])]
    for number, (ranks, texts) in enumerate(legend):
        ring_cell(canvas, x, y + number * RING_ROW, ranks, 1)
        canvas.lines(x + 48, y + 18 - 8 * (len(texts) - 1) + number * RING_ROW, texts, spacing=16)
    y += 3 * RING_ROW
    canvas.arrow(x + 20, y + 4, x + 20, y + 22, "text")
    canvas.lines(x + 48, y + 10, ["sent to the next rank,", "from rank 3 to rank 0"], spacing=16)
    note = "In each phase each rank sends three of its four parts: 3/4 of the data."
    canvas.text(left + grid, 2 * block + 14, note, "text")
    return canvas


# From the meta device to the shards --------------------------------------------------------------

BAND, TENSOR_WIDTH = 11, 88


def tensor(canvas, x, y, kinds):
    """A matrix with four bands of rows, the first for rank 0.

    The kind of a band is meta, memory, values, gathered, or None: the rank does not have it."""
    for rank, kind in enumerate(kinds):
        band(canvas, x, y + rank * BAND, TENSOR_WIDTH, kind, RANK_COLORS[rank])


def band(canvas, x, y, width, kind, color):
    """Some rows of a matrix, see `tensor`."""
    if kind == "meta":
        canvas.dashed_box(x + 1, y + 1, width - 2, BAND - 2, color)
    elif kind == "memory":
        canvas.box(x + 1, y + 1, width - 2, BAND - 2, color, outline=True, radius=0)
    elif kind == "values":
        canvas.box(x, y, width, BAND, color, radius=0)
    elif kind == "gathered":
        canvas.hatched_box(x + 1, y + 1, width - 2, BAND - 2, color)


def meta_device():
    """How the parameters of a large model come to the ranks: shapes, shards, values."""
    left, pitch, row, top, file_row = 364, 120, 76, 40, 62
    # Kinds of band that a rank has of its own rows and of the others: rank 0, then the other ranks.
    meta, empty, values = ("meta", None), ("memory", None), ("values", None)
    gathered = ("values", "gathered")
    steps = [
        (
            "load_model",
            ["rank 0: the values, in CPU memory;", "the others: shapes, on the meta device"],
            ("values", "values"),
            ("meta", "meta"),
        ),
        ("fully_shard", ["only the rows of this rank are left"], values, meta),
        ("to_empty", ["the others: memory for the shard,", "without values"], values, empty),
        (
            "set_model_state_dict",
            ["rank 0 sends each rank its rows of", "the matrix that it has loaded"],
            values,
            values,
        ),
        (
            "all-gather",
            ["before the forward pass of a block:", "complete for a moment, in bf16"],
            gathered,
            gathered,
        ),
        ("free", ["after it: the shard is left"], values, values),
    ]
    canvas = Drawing(top + 6 * row + file_row + 20, label="From the meta device to shards")
    for rank in RANKS:
        middle = left + rank * pitch + TENSOR_WIDTH / 2
        canvas.text(middle, 18, f"rank {rank}", "text title", "middle")
    y = top
    for number, (name, texts, first, others) in enumerate(steps):
        if name == "set_model_state_dict":
            whole_matrix(canvas, left, y, pitch)
            y += file_row
        canvas.text(2, y + 14, number + 1, "text title")
        style = "text title" if name in ("all-gather", "free") else "text code"
        canvas.text(24, y + 14, name, style)
        canvas.lines(24, y + 33, texts)
        for rank in RANKS:
            own, other = others if rank else first
            kinds = [own if part == rank else other for part in RANKS]
            tensor(canvas, left + rank * pitch, y, kinds)
        y += row
    legend = [("meta", "shape only", 0), ("memory", "memory, no values", 140)]
    legend += [("values", "values", 330), ("gathered", "gathered from the other ranks", 440)]
    for kind, text, x in legend:
        band(canvas, 24 + x, y - 1, 28, kind, "rank0")
        canvas.text(24 + x + 36, y + 8, text, "muted small")
    return canvas


def whole_matrix(canvas, left, y, pitch):
    """What rank 0 has loaded. An arrow leads from the rows of a rank to its shard."""
    canvas.text(24, y + 18, "full_weights, on the CPU of rank 0", "text small")
    width = (3 * pitch + TENSOR_WIDTH) / 4
    for rank in RANKS:
        text = f"rows of rank {rank}"
        canvas.box(left + rank * width, y + 4, width, 20, RANK_COLORS[rank], text, radius=0)
        middle = left + rank * pitch + TENSOR_WIDTH / 2
        canvas.arrow(middle, y + 29, middle, y + 62 + rank * BAND - 3)


PICTURES = {
    "memory": memory,
    "memory-ddp-fsdp": memory_ddp_fsdp,
    "broadcast": broadcast,
    "all-reduce": all_reduce,
    "all-gather": all_gather,
    "reduce-scatter": reduce_scatter,
    "all-to-all": all_to_all,
    "send-receive": send_receive,
    "ring-all-reduce": ring_all_reduce,
    "meta-device": meta_device,
}
