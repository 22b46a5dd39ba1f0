"""Pictures of what is where: data, ranks, machines and time. `figures.py` draws them.

Each function computes what it shows by the rules of the scripts, and returns a Canvas.
"""

import itertools
import textwrap

import numpy as np
from canvas import WIDTH, Canvas

# ------------------------------------------------------------------ shapes that Canvas has not


def tint(canvas, x, y, width, height, color, text="", text_style="text small", dashed=False):
    """A box with a pale fill and an outline of the same color, which carries ordinary text."""
    size = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="3"'
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    opacity = "0.05" if dashed else "0.18"
    canvas.parts.append(f'<rect class="{color}" fill-opacity="{opacity}" {size}/>')
    canvas.parts.append(f'<rect class="{color}-line" fill="none" stroke-width="1.2"{dash} {size}/>')
    if text != "":
        canvas.text(x + width / 2, y + height / 2 + 4.5, text, text_style, "middle")


def path(canvas, points, color="line", dashed=False):
    """A line with corners through these points."""
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    steps = " L ".join(f"{x:.1f} {y:.1f}" for x, y in points)
    canvas.parts.append(f'<path class="{color}-line" d="M {steps}"{dash}/>')


def bracket(canvas, x1, x2, y, height=6, color="line"):
    """A square bracket from x1 to x2. It opens downwards, or upwards if `height` is negative."""
    path(canvas, [(x1, y + height), (x1, y), (x2, y), (x2, y + height)], color)


def double_arrow(canvas, x1, y1, x2, y2, color="line", dashed=False):
    """An arrow with a head at both ends."""
    middle_x, middle_y = (x1 + x2) / 2, (y1 + y2) / 2
    canvas.arrow(middle_x, middle_y, x2, y2, color, dashed)
    canvas.arrow(middle_x, middle_y, x1, y1, color, dashed)


def numbered_dot(canvas, x, y, number, color="activations"):
    """A circle with a number in it, which a line of text below the picture explains."""
    canvas.parts.append(f'<circle class="{color}" cx="{x:.1f}" cy="{y:.1f}" r="9"/>')
    canvas.text(x, y + 4, number, "on-color small title", "middle")


def diamond(canvas, x, y, color, size=6):
    """A small square that stands on a corner."""
    points = [(x, y - size), (x + size, y), (x, y + size), (x - size, y)]
    corners = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    canvas.parts.append(f'<polygon class="{color}" points="{corners}"/>')


def upright_text(canvas, x, y, text, style="text"):
    """A text that runs from bottom to top, with its middle at x, y."""
    turn = f'transform="rotate(-90 {x:.1f} {y:.1f})"'
    canvas.parts.append(
        f'<text class="{style}" x="{x:.1f}" y="{y + 4.5:.1f}" text-anchor="middle" {turn}>'
        f"{text}</text>"
    )


def lines(canvas, x, y, texts, style="text", anchor="start", spacing=18):
    """Several lines of text, one below the other."""
    for number, text in enumerate(texts):
        canvas.text(x, y + number * spacing, text, style, anchor)


def paragraph(canvas, x, y, text, style="text", columns=90):
    """A text in lines of at most `columns` characters."""
    lines(canvas, x, y, textwrap.wrap(text, columns), style, spacing=20)


# ------------------------------------------------------------------ data and batches


def bf16_rounding():
    """A weight of 1 and an update of 0.001, on the numbers that bf16 and fp32 have there."""
    canvas = Canvas(246, label="An update that bf16 rounds away")
    low, high, left, right = 1 - 2.4 / 256, 1 + 1.6 / 256, 96, 806

    def place(value):
        return left + (value - low) / (high - low) * (right - left)

    # Below 1 the bf16 numbers are 1/256 apart, above 1 they are 1/128 apart.
    y = 76
    canvas.text(0, y + 5, "bf16", "text title")
    canvas.line(left, y, right, y)
    for value, name in ((1 - 2 / 256, "0.99219"), (1 - 1 / 256, "0.99609"), (1.0, "1")):
        canvas.box(place(value) - 5, y - 5, 10, 10, "rank0", radius=5)
        canvas.text(place(value), y + 26, name, "text small", "middle")
    canvas.line(place(1 - 0.5 / 256), y - 34, place(1 - 0.5 / 256), y + 12, "line", dashed=True)
    canvas.text(place(1 - 0.5 / 256) - 8, y - 40, "halfway", "muted small", "middle")
    canvas.line(place(0.999), y - 12, place(0.999), y, "warning")
    canvas.text(place(0.999) - 3, y - 17, "0.999", "text small", "middle")
    canvas.arrow(place(0.999) + 4, y - 10, place(1.0) - 5, y - 4, "warning", head=6)
    canvas.text(place(1.0) + 14, y - 14, "rounded to 1: the update is lost", "text small")

    y = 176
    canvas.text(0, y + 5, "fp32", "text title")
    canvas.line(left, y, right, y)
    for number in range(143):  # far fewer than there are
        x = left + number * 5
        canvas.line(x, y - 4, x, y + 4, "rank0")
    for value, name in ((0.999, "0.999"), (1.0, "1")):
        canvas.box(place(value) - 5, y - 5, 10, 10, "rank0", radius=5)
        canvas.text(place(value), y + 26, name, "text small", "middle")
    canvas.arrow(place(1.0) - 4, y - 12, place(0.999) + 4, y - 12, "warning", head=6)
    canvas.text(place(1.0) + 14, y - 14, "1 − 0.001 = 0.999", "text small")
    note = "In fp32 there are 65,536 numbers for each one of bf16, too many to draw."
    canvas.text(0, 236, note, "muted small")
    return canvas


def global_batch():
    """The same 8 sequences on one process and on two ranks, and the same update."""
    order = np.random.default_rng((0, 0)).permutation(1729)  # seed 0, epoch 0, the default data
    indices = [int(index) for index in order[:8]]
    canvas = Canvas(592, label="A global batch of 8 sequences on one process and on two ranks")
    left, frame_width, frame_step, seq_width, seq_height = 92, 120, 146, 52, 28

    def micro_batch(x, y, sequences, color, number):
        """Two sequences in a frame, and the box with their gradients below it."""
        canvas.text(x + frame_width / 2, y - 7, f"micro-batch {number}", "muted small", "middle")
        canvas.box(x, y, frame_width, 40, "line", outline=True)
        for i, sequence in enumerate(sequences):
            canvas.box(x + 6 + i * (seq_width + 4), y + 6, seq_width, seq_height, color, sequence)
        canvas.arrow(x + frame_width / 2, y + 40, x + frame_width / 2, y + 60)
        canvas.box(x, y + 60, frame_width, 26, "idle", "gradients")
        if number > 0:
            canvas.text(x - (frame_step - frame_width) / 2, y + 78, "+", "text title", "middle")

    # The global batch, a part of the shuffled order.
    canvas.text(0, 18, "order of the epoch, shuffled", "text title")
    x = 206
    canvas.text(x - 8, 52, "…", "muted", "end")
    for position, index in enumerate(indices):
        canvas.box(x + position * 58, 34, 52, 28, "line", index, outline=True)
        canvas.text(x + position * 58 + 26, 80, position, "muted small", "middle")
    canvas.text(x + 8 * 58 + 4, 52, "…", "muted")
    bracket(canvas, x - 1, x + 8 * 58 - 5, 26, 5)
    canvas.text(x + 4 * 58 - 3, 18, "a global batch of 8 sequences", "text", "middle")
    canvas.text(x - 8, 80, "place in it", "muted small", "end")
    canvas.line(0, 100, WIDTH, 100, "idle")

    # One process.
    canvas.text(0, 126, "one process, micro-batches of 2", "text title")
    y = 160
    canvas.text(0, y + 25, "all 8")
    for number in range(4):
        pair = indices[2 * number : 2 * number + 2]
        micro_batch(left + number * frame_step, y, pair, "rank0", number)
    end = left + 3 * frame_step + frame_width
    canvas.arrow(end, y + 73, end + 50, y + 73)
    canvas.text(end + 24, y + 64, "sum", "muted small", "middle")
    canvas.box(end + 50, y + 53, 100, 40, "text", "update", outline=True, text_style="title")
    update_x = end + 50
    canvas.line(0, 274, WIDTH, 274, "idle")

    # Two ranks.
    canvas.text(0, 300, "two ranks, rank r takes every second one: [r::2]", "text title")
    y0, y1 = 334, 460
    mean_x = left + 2 * frame_step + 44
    for rank, y in enumerate([y0, y1]):
        share = indices[rank::2]
        canvas.text(0, y + 25, f"rank {rank}")
        for number in range(2):
            pair = share[2 * number : 2 * number + 2]
            micro_batch(left + number * frame_step, y, pair, f"rank{rank}", number)
        end = left + frame_step + frame_width
        canvas.arrow(end, y + 73, mean_x, y + 73)
        canvas.text(end + 34, y + 64, "sum", "muted small", "middle")
        canvas.arrow(mean_x + 112, y + 73, update_x, y + 73)
        canvas.box(update_x, y + 53, 100, 40, "text", "same update", outline=True)
    canvas.box(mean_x, y0 + 52, 112, y1 - y0 + 42, "idle")
    lines(canvas, mean_x + 56, (y0 + y1) / 2 + 66, ["mean of", "the ranks"], "text", "middle")
    note = "Each loss is divided by the targets of all 8 sequences. On two ranks it is doubled, "
    note += "so that their mean is the sum."
    canvas.text(0, 580, note, "muted small")
    return canvas


# ------------------------------------------------------------------ machines and time


def model_on_stages():
    """Three blocks on two pipeline stages: which modules stay, and what stands for the others."""
    canvas = Canvas(262, label="What each pipeline stage has of a model with three blocks")
    modules = ["embeddings", "block 0", "block 1", "block 2", "norm", "output layer"]
    left, step, width, height = 84, 124, 110, 40
    replaced = [
        [None, None, None, "PassThrough", "PassThrough", "PassThrough"],
        ["PassThrough", "PassThrough", "PassThrough", None, None, None],
    ]
    for i, name in enumerate(modules):
        canvas.text(left + i * step + width / 2, 18, name, "muted small", "middle")
    for stage, stand_ins in enumerate(replaced):
        y, color = 32 + stage * 110, f"rank{stage}"
        canvas.text(0, y + 25, f"stage {stage}", "text title")
        for i, (name, stand_in) in enumerate(zip(modules, stand_ins, strict=True)):
            x = left + i * step
            if i > 0:
                canvas.arrow(x - 13, y + height / 2, x - 1, y + height / 2, head=5)
            if stand_in is None:
                canvas.box(x, y, width, height, color, name)
            else:
                tint(canvas, x, y, width, height, "line", stand_in, "text small", dashed=True)
    # What stage 0 returns are the inputs of stage 1: its embeddings pass them through.
    start, end, middle = left + 5 * step + width / 2, left + width / 2, 107
    canvas.line(start, 32 + height, start, middle, "activations")
    canvas.line(start, middle, end, middle, "activations")
    canvas.arrow(end, middle, end, 142, "activations")
    canvas.text((start + end) / 2, middle - 8, "hidden states", "muted small", "middle")
    note = "Filled: the module of the model. Dashed: what stands in its place. Both stages run the "
    note += "whole forward pass of the model, from left to right."
    paragraph(canvas, 0, 222, note, columns=112)
    return canvas


def agents():
    """Two nodes with an agent and two workers each, the rendezvous store, and who talks to whom."""
    canvas = Canvas(392, label="Agents, workers and the rendezvous store")
    store_x, store_width = 236, 348
    canvas.box(store_x, 4, store_width, 44, "line", outline=True)
    canvas.text(410, 31, "rendezvous store: keys and values", "text title", "middle")
    for node, x in enumerate((20, 460)):
        canvas.box(x, 112, 340, 216, "line", outline=True, radius=8)
        canvas.text(x + 14, 136, f"node {node}", "text title")
        agent_x = x + 95
        canvas.box(agent_x, 146, 150, 40, "idle", "agent (torchrun)")
        double_arrow(canvas, agent_x + 75, 144, 330 + 160 * node, 52)
        for worker in range(2):
            rank = 2 * node + worker
            worker_x = x + 20 + worker * 160
            canvas.box(worker_x, 262, 140, 44, f"rank{rank}", f"worker: rank {rank}")
            double_arrow(canvas, worker_x + 70, 258, agent_x + 45 + worker * 60, 190)
        double_arrow(canvas, x + 162, 284, x + 178, 284, "activations")
    double_arrow(canvas, 342, 284, 478, 284, "activations")
    canvas.text(410, 92, "ranks, addresses, heartbeats", "muted small", "middle")
    canvas.text(190, 228, "start, SIGTERM;", "muted small", "middle")
    canvas.text(190, 243, "exit codes", "muted small", "middle")
    canvas.text(630, 228, "start, SIGTERM;", "muted small", "middle")
    canvas.text(630, 243, "exit codes", "muted small", "middle")
    canvas.text(410, 272, "tensors", "muted small", "middle")
    canvas.text(410, 302, "NCCL, Gloo", "muted small", "middle")
    note = "No agent looks at the workers of another node. Agents agree through the store; "
    note += "workers send tensors to each other directly."
    paragraph(canvas, 0, 360, note, columns=112)
    return canvas


def elastic():
    """A run on machines that come and go, over time: rounds, checkpoints, and lost steps."""
    left, top, disk_y = 132, 20, 318
    lanes = {"A": 82, "B": 148, "C": 214}
    canvas = Canvas(540, label="An elastic run: a machine joins, another one dies")

    # A checkpoint every 20 steps. C joins during step 47, B dies after step 92. A step of two
    # machines has a width of `step_width`, one of three machines two thirds of it. `meeting` is the
    # width of the rendezvous.
    step_width = 4.1
    rounds = [
        {"machines": "AB", "first": 1, "last": 47, "width": step_width, "meeting": 44},
        {"machines": "ABC", "first": 48, "last": 92, "width": step_width * 2 / 3, "meeting": 62},
        {"machines": "AC", "first": 81, "last": 120, "width": step_width, "meeting": 84},
    ]
    checkpoints = [[20, 40, 47], [60, 80], [100, 120]]  # those of each round

    lines(canvas, 0, top + 12, ["rendezvous", "store"], "text title", spacing=15)
    for name, y in lanes.items():
        canvas.text(0, y + 9, f"machine {name}", "text title")
        canvas.text(left - 8, y + 9, "agent", "muted small", "end")
        canvas.text(left - 8, y + 37, "workers", "muted small", "end")
    canvas.text(0, disk_y + 5, "checkpoints", "text title")
    canvas.line(left, disk_y, WIDTH - 8, disk_y)

    x = left
    starts, ends, places = [], [], {}
    for number, part in enumerate(rounds):
        # The rendezvous is a band over all who take part in it. The workers start at its end.
        bottom = max(lanes[name] for name in part["machines"]) + 52
        canvas.box(x, top - 8, part["meeting"], bottom - top + 8, "idle")
        x += part["meeting"]
        starts.append(x)
        width = (part["last"] - part["first"] + 1) * part["width"]
        members = f"round {number + 1}: {', '.join(part['machines'])}"
        canvas.box(x, top - 4, width, 30, "text", members, outline=True, text_style="small")
        for step in checkpoints[number]:
            places[step] = x + (step - part["first"] + 1) * part["width"]

        kept = places[80] - x if number == 1 else width  # the steps after 80 are lost
        for rank, name in enumerate(part["machines"]):
            y = lanes[name] + 20
            label = f"rank {rank} of {len(part['machines'])}"
            canvas.box(x, y, kept, 26, f"rank{rank}", label, text_style="small")
            if kept < width:
                canvas.box(x + kept, y, width - kept, 26, "warning", "lost", text_style="small")
        x += width
        ends.append(x)

    # Agents: one line for each, as long as the machine takes part.
    join_x, death_x = ends[0] - 30, ends[1]
    for name, (begin, end) in {"A": (left, x), "B": (left, death_x), "C": (join_x, x)}.items():
        canvas.box(begin, lanes[name], end - begin, 10, "muted", radius=2)

    # C joins.
    numbered_dot(canvas, join_x - 14, lanes["C"] + 5, 1)
    for name in "AB":
        canvas.arrow(join_x + 4, lanes[name] + 10, join_x + 4, lanes[name] + 22, "warning")

    # B dies.
    for dy in (-7, 7):
        y = lanes["B"] + 19
        path(canvas, [(death_x + 6, y - dy), (death_x + 20, y + dy)], "warning")
    numbered_dot(canvas, death_x + 36, lanes["B"] + 19, 2)

    # Lost steps are made again.
    y = lanes["C"] + 54
    repeated = (starts[2], starts[2] + 12 * step_width)
    bracket(canvas, places[80], death_x, y + 5, -5, "warning")
    bracket(canvas, *repeated, y + 5, -5, "warning")
    canvas.text((places[80] + death_x) / 2, y + 20, "81 – 92", "text small", "middle")
    canvas.text(sum(repeated) / 2, y + 20, "81 – 92 again", "text small", "middle")

    # Checkpoints, and who continues from which.
    for step, place in places.items():
        diamond(canvas, place, disk_y, "text")
        canvas.text(place, disk_y + 22, step, "text small", "middle")
    for step, start in ((47, starts[1]), (80, starts[2])):
        y = disk_y + 44
        path(canvas, [(places[step], disk_y + 28), (places[step], y), (start, y), (start, y - 8)])
        canvas.arrow(start, y - 8, start, disk_y + 4)
        canvas.text((places[step] + start) / 2, y + 16, "resume", "muted small", "middle")

    y = 412
    canvas.box(0, y - 12, 18, 18, "idle")
    text = "rendezvous: the agents agree which machines take part, and start new workers"
    canvas.text(30, y + 2, text)
    numbered_dot(canvas, 9, y + 30, 1)
    note = "C joins. The other agents send SIGTERM (red arrows) to their workers. All save after "
    note += "the same step, 47, and end. No step is lost."
    paragraph(canvas, 30, y + 34, note)
    numbered_dot(canvas, 9, y + 82, 2)
    note = "B dies. The workers of A and C end with an error, since B no longer answers. The new "
    note += "ones start from the newest checkpoint, 80. Steps 81 to 92 are lost, and repeated."
    paragraph(canvas, 30, y + 86, note)
    return canvas


# ------------------------------------------------------------------ layers and ranks


def column_row():
    """An MLP on two ranks: the first matrix split by columns, the second one by rows."""
    unit = 13  # pixels: T is 6 units, H is 4 and I is 8
    tokens, hidden, inner = 6 * unit, 4 * unit, 8 * unit
    tops = [82, 246]  # of the rows of the two ranks
    row_height = inner  # the second matrix is the tallest box
    canvas = Canvas(470, label="An MLP whose matrices are split over two ranks")

    def matrix(x, rank, height, width, parts, names, shape):
        """A matrix in the row of a rank, in two halves: their colors and the names in them.

        It is split by columns if it is wider than high. A half without color is not on the rank."""
        y = tops[rank] + (row_height - height) / 2
        for number, (color, name) in enumerate(zip(parts, names, strict=True)):
            if width > height:
                place = (x + number * width / 2, y, width / 2, height)
            else:
                place = (x, y + number * height / 2, width, height / 2)
            tint(canvas, *place, color or "line", name, dashed=color is None)
        canvas.text(x + width / 2, y + height + 17, shape, "muted small", "middle")

    def part(x, rank, height, width, text, shape):
        """A matrix that the rank has computed, in the rank's color."""
        y = tops[rank] + (row_height - height) / 2
        tint(canvas, x, y, width, height, f"rank{rank}", text)
        canvas.text(x + width / 2, y + height + 17, shape, "muted small", "middle")

    def sign(x, rank, text):
        canvas.text(x, tops[rank] + row_height / 2 + 5, text, "text title", "middle")

    x_part, gather, x_all, a, h = 64, 156, 218, 300, 448
    b, partial, scatter, y_part = 536, 626, 698, 762
    for rank, digit in ((0, "₀"), (1, "₁")):
        middle = tops[rank] + row_height / 2
        canvas.text(2, middle + 5, f"rank {rank}", "text title")
        colors = [f"rank{rank}" if rank == number else None for number in (0, 1)]
        both = ["rank0", "rank1"]
        part(x_part, rank, tokens / 2, hidden, f"x{digit}", "(T/2, H)")
        matrix(x_all, rank, tokens, hidden, both, ["x₀", "x₁"], "(T, H)")
        sign((x_all + hidden + a) / 2, rank, "×")
        matrix(a, rank, hidden, inner, colors, ["A₀", "A₁"], "(H, I)")
        part(h, rank, tokens, inner / 2, f"h{digit}", "(T, I/2)")
        sign((h + hidden + b) / 2, rank, "×")
        matrix(b, rank, inner, hidden, colors, ["B₀", "B₁"], "(I, H)")
        sign((b + hidden + partial) / 2, rank, "=")
        part(partial, rank, tokens, hidden, f"h{digit}B{digit}", "(T, H)")
        part(y_part, rank, tokens / 2, hidden, f"y{digit}", "(T/2, H)")

        for begin, end in (
            (x_part + hidden, gather),
            (gather + 26, x_all),
            (a + inner, h),
            (partial + hidden, scatter),
            (scatter + 26, y_part),
        ):
            canvas.arrow(begin + 5, middle, end - 5, middle)
        canvas.text(a + inner + 22, middle - 10, "act", "muted small", "middle")

    # What the ranks do together.
    height = tops[1] - tops[0] + row_height
    for x, text in ((gather, "all-gather"), (scatter, "reduce-scatter: sum of the partial sums")):
        canvas.box(x, tops[0], 26, height, "idle")
        upright_text(canvas, x + 13, tops[0] + height / 2, text)

    for x, texts in (
        (x_part + hidden / 2, ["half of", "the tokens"]),
        (x_all + hidden / 2, ["all", "tokens"]),
        (a + inner / 2, ["first matrix, split", "by columns"]),
        (h + hidden / 2, ["half of the", "features"]),
        (b + hidden / 2, ["second, split", "by rows"]),
        (partial + hidden / 2, ["a partial", "sum"]),
        (y_part + hidden / 2 - 4, ["half of", "the tokens"]),
    ):
        lines(canvas, x, 28, texts, "text small", "middle", 16)

    y = tops[1] + row_height + 54
    tint(canvas, 0, y - 13, 30, 18, "line", dashed=True)
    canvas.text(40, y, "not on this rank")
    text = "T tokens, H hidden size, I features inside of the MLP, act: activation function"
    canvas.text(180, y, text, "muted")
    note = "Both collectives together send as many bytes as one all-reduce of the partial sums. In "
    note += "the backward pass they change places."
    paragraph(canvas, 0, y + 28, note)
    return canvas


def simulate(schedule, stages, micro_batches, forward=1, backward=2):
    """The passes of one step: for each pipeline stage a list of [phase, micro-batch, start, end].

    The order is that of the loop in 08-pipeline-parallel: the forward passes of a stage are ahead
    of its backward passes by `ahead` micro-batches. A pass starts when the stage is free, and when
    the stage before it (backward: behind it) has sent what it needs."""
    orders = []
    for stage in range(stages):
        ahead = stages - 1 - stage
        if schedule == "gpipe":
            ahead += micro_batches - 1
        order = []
        for i in range(micro_batches + ahead):
            if i < micro_batches:
                order.append(("forward", i))
            if i >= ahead:
                order.append(("backward", i - ahead))
        orders.append(order)

    done = {}  # (phase, stage, micro-batch): when it ends
    passes = [[] for _ in range(stages)]
    free = [0] * stages
    while any(orders):
        for stage, order in enumerate(orders):
            while order:
                phase, number = order[0]
                if phase == "forward":
                    needed = ("forward", stage - 1, number) if stage > 0 else None
                elif stage < stages - 1:
                    needed = ("backward", stage + 1, number)
                else:
                    needed = ("forward", stage, number)
                if needed and needed not in done:
                    break
                start = max(free[stage], done.get(needed, 0))
                free[stage] = start + (forward if phase == "forward" else backward)
                done[phase, stage, number] = free[stage]
                passes[stage].append([phase, number, start, free[stage]])
                order.pop(0)
    return passes


def most_kept(passes):
    """Of how many micro-batches a pipeline stage keeps the activations at one time, at most."""
    kept, most = 0, 0
    for phase, *_ in passes:  # in the order of time
        kept += 1 if phase == "forward" else -1
        most = max(most, kept)
    return most


def schedules():
    """GPipe and 1F1B with four pipeline stages and eight micro-batches, by a simulation."""
    stages, micro_batches = 4, 8
    left, row, scale = 62, 30, 18.6
    colors = {"forward": "rank0", "backward": "rank1"}
    canvas = Canvas(492, label="Two schedules of a pipeline")
    y = 18
    for name, schedule in (("GPipe", "gpipe"), ("1F1B", "1f1b")):
        passes = simulate(schedule, stages, micro_batches)
        end = left + max(stage[-1][3] for stage in passes) * scale
        canvas.text(0, y, name, "text title")
        canvas.text(end + 12, y, "activations kept", "muted small")
        y += 12
        for number, stage in enumerate(passes):
            canvas.text(0, y + 17, f"stage {number}")
            canvas.box(left, y, end - left, 24, "idle")
            for phase, i, start, stop in stage:
                x, width = left + start * scale + 0.5, (stop - start) * scale - 1
                canvas.box(x, y, width, 24, colors[phase], i, text_style="small")
            most = most_kept(stage)
            canvas.text(end + 18, y + 17, most, "text title", "middle")
            for i in range(most):
                canvas.box(end + 34 + i * 11, y + 7, 9, 10, "activations", radius=1)
            y += row

        # The last pipeline stage waits, is busy all the time, and waits.
        begin, stop = (left + time * scale for time in (passes[-1][0][2], passes[-1][-1][3]))
        for x1, x2, text in (
            (left, begin, "S − 1 forward"),
            (begin, stop, "M forward and backward passes without a pause"),
            (stop, end, "S − 1 backward"),
        ):
            bracket(canvas, x1 + 2, x2 - 2, y + 5, -6)
            canvas.text((x1 + x2) / 2, y + 21, text, "muted small", "middle")
        y += 58

        length = (end - left) / scale
        busy = sum(stop - start for stage in passes for _, _, start, stop in stage)
        idle = 1 - busy / (stages * length)
        if abs(idle - (stages - 1) / (micro_batches + stages - 1)) > 1e-9:
            raise ValueError(f"{name}: the simulation and the formula differ")

    legend = [("rank0", "forward pass of micro-batch 0, 1, …", 0)]
    legend += [("rank1", "backward pass, twice as long", 300), ("idle", "idle", 550)]
    for color, label, x in legend:
        canvas.box(x, y - 12, 24, 20, color)
        canvas.text(x + 34, y + 3, label)
    canvas.box(7, y + 19, 9, 10, "activations", radius=1)
    text = "micro-batch whose activations the pipeline stage keeps: the most at the same time"
    canvas.text(34, y + 29, text)
    share = f"(S − 1) / (M + S − 1) = {stages - 1} / {micro_batches + stages - 1} = {idle:.0%}"
    text = f"idle, in both: {share.replace('%', ' %')} of the time"
    canvas.text(0, y + 62, text, "text title")
    text = f"S = {stages} pipeline stages, M = {micro_batches} micro-batches"
    canvas.text(WIDTH - 2, y + 62, text, "muted", "end")
    return canvas


# The two machines of `mesh_of_ranks`: y of the first one, and of what is between the ranks of both.
MESH_TOP = 34
BETWEEN = (MESH_TOP + 120, MESH_TOP + 240)


def mesh_of_ranks(canvas, machines, link_text, between, cells):
    """Two machines of four ranks, and the fast link in each. Returns the middle of each column.

    `machines` has the lines of text beside each machine, and `between` those between the machines,
    `link_text` stands in the link, and `cells` has the color and the second line of each rank."""
    left, frame_width, cell_width, cell_step, height = 116, 698, 140, 166, 54
    tops = [MESH_TOP, MESH_TOP + 228]
    for row, top in enumerate(tops):
        canvas.box(left, top, frame_width, 132, "line", outline=True, radius=6)
        lines(canvas, 0, top + 36, machines[row][:1], "text title")
        lines(canvas, 0, top + 56, machines[row][1:], "text small", spacing=17)

        # The link is above the ranks of the first machine and below those of the second one.
        cells_top = top + 62 if row == 0 else top + 16
        link = top + 14 if row == 0 else top + 92
        canvas.box(left + 28, link, frame_width - 56, 26, "idle", link_text, text_style="small")
        for column in range(4):
            rank = 4 * row + column
            x = left + 30 + column * cell_step
            color, text = cells[rank]
            canvas.box(x, cells_top, cell_width, height, color)
            middle = x + cell_width / 2
            canvas.text(middle, cells_top + 23, f"rank {rank}", "on-color title", "middle")
            canvas.text(middle, cells_top + 41, text, "on-color small", "middle")
            ends = (link + 27, cells_top - 1) if row == 0 else (cells_top + height + 1, link - 1)
            double_arrow(canvas, middle, ends[0], middle, ends[1])
    lines(canvas, 0, tops[0] + 160, between[:1], "text title")
    lines(canvas, 0, tops[0] + 179, between[1:], "text small", spacing=17)
    return [left + 30 + column * cell_step + cell_width / 2 for column in range(4)]


def mesh_hsdp():
    """HSDP on two machines with four GPUs each: shards within, replicas between."""
    canvas = Canvas(456, label="The mesh of eight ranks: two replicas of four shards")
    texts = [["machine 0", "replica 0", "shard group:", "ranks 0 1 2 3"]]
    texts += [["machine 1", "replica 1", "shard group:", "ranks 4 5 6 7"]]
    between = ["slow link", "replicate groups:", "ranks 0 4, 1 5,", "2 6, 3 7"]
    link = "fast link, in each micro-batch: all-gather of parameters, reduce-scatter of gradients"
    cells = [(f"rank{rank % 4}", f"shard {rank % 4} of 4") for rank in range(8)]
    columns = mesh_of_ranks(canvas, texts, link, between, cells)
    for column, x in enumerate(columns):
        double_arrow(canvas, x, BETWEEN[0], x, BETWEEN[1], f"rank{column}")
        y = MESH_TOP + 176
        lines(canvas, x + 10, y, ["gradients of", f"shard {column}, int8"], "text small")
    note = "Within a machine nothing is compressed. Parameters are gathered as --dtype, gradients "
    note += "are added up in fp32. Between machines only gradients are sent: once per step, "
    note += "as int8."
    paragraph(canvas, 0, MESH_TOP + 390, note)
    return canvas


def stages_and_shards():
    """Eight ranks as two pipeline stages of four shards, a machine for each stage."""
    canvas = Canvas(492, label="The mesh of eight ranks: two pipeline stages of four shards")
    texts = [["machine 0", "stage 0:", "embeddings,", "first blocks"]]
    texts += [["machine 1", "stage 1:", "last blocks, norm,", "output layer"]]
    link = "fast link: all-gather of the stage's parameters, reduce-scatter of their gradients"
    between = ["slow link", "for each", "micro-batch"]
    cells = [(f"rank{rank // 4}", f"1/4 of stage {rank // 4}") for rank in range(8)]
    columns = mesh_of_ranks(canvas, texts, link, between, cells)
    for column, x in enumerate(columns):
        text = f"pipeline {column}: [{column}::4]"
        canvas.text(x, MESH_TOP - 14, text, "text small", "middle")
        canvas.arrow(x - 12, BETWEEN[0], x - 12, BETWEEN[1], "activations")
        canvas.arrow(x + 12, BETWEEN[1], x + 12, BETWEEN[0], "gradients")
    y = MESH_TOP + 394
    canvas.arrow(2, y - 5, 34, y - 5, "activations")
    canvas.text(46, y, "forward: hidden states, (B, T, H)")
    canvas.arrow(334, y - 5, 302, y - 5, "gradients")
    canvas.text(346, y, "backward: their gradients, (B, T, H)")
    note = "A column is a pipeline: its ranks load the same sequences, every fourth one of the "
    note += "global batch. A row is a pipeline stage: its ranks have the same layers, sharded as "
    note += "in stage 03."
    paragraph(canvas, 0, y + 32, note)
    return canvas


# ------------------------------------------------------------------ numbers


def int8():
    """Eight gradients as int8 with a common scale, decoded again, and the errors."""
    canvas = Canvas(572, label="Gradients in int8: scaled, rounded, and decoded")
    left, step, width = 142, 84, 72
    gradients = np.array([0.4, -1.27, 0.036, 0.002, -0.25, 0.618, -0.009, 0.004], np.float32)

    # As `encode` and `decode` in 04-compression compute it.
    scale = np.abs(gradients).max() / np.float32(127)
    quotients = gradients / scale
    integers = quotients.round().astype(np.int8)
    decoded = integers * scale
    errors = decoded - gradients

    def signed(value, digits):
        return f"{value:z.{digits}f}".replace("-", "−")

    def row(y, name, values, style="text"):
        """A line of the table."""
        canvas.text(0, y, name, "text")
        for i, value in enumerate(values):
            canvas.text(left + i * step + width / 2, y, value, style, "middle")

    def bars(zero, height, values, largest, color):
        """A bar for each value, from the line at zero. `largest` has the height `height`."""
        for i, value in enumerate(values):
            size = abs(value) / largest * height
            top = zero - size if value > 0 else zero
            canvas.box(left + i * step + width / 2 - 14, top, 28, max(size, 0.8), color, radius=1)
        canvas.line(left, zero, left + 7 * step + width, zero)

    bars(66, 52, gradients, np.abs(gradients).max(), "gradients")
    row(154, "gradient, fp32", [signed(value, 3) for value in gradients])
    texts = f"scale = largest magnitude / 127 = {np.abs(gradients).max():.2f} / 127"
    texts += f" = {scale:.3f}"
    canvas.text(left, 192, texts, "text title")
    row(228, "divided by the scale", [signed(value, 1) for value in quotients])
    for i, value in enumerate(integers):
        x = left + i * step
        canvas.arrow(x + width / 2, 236, x + width / 2, 254)
        canvas.box(x, 256, width, 28, "gradients", signed(value, 0))
        canvas.arrow(x + width / 2, 286, x + width / 2, 304)
    canvas.text(0, 275, "rounded: int8")
    row(320, "times the scale", [signed(value, 3) for value in decoded])
    row(356, "error", [signed(value, 3) for value in errors])

    half = float(scale) / 2
    zero, height = 424, 44
    canvas.box(left - 2, zero - height, 7 * step + width + 4, 2 * height, "idle")
    bars(zero, height, errors, half, "warning")
    for sign, dy in (("+", -height), ("−", height)):
        canvas.text(left - 10, zero + dy + 4, f"{sign}scale / 2", "muted small", "end")
    canvas.text(0, zero + 5, "error, enlarged")
    note = "An error is at most half of the scale, which the largest value sets. A value smaller "
    note += "than that becomes 0. Sent are the integers and the scale: 8 + 4 bytes instead of 32. "
    note += "In the script 256 values have a common scale: 256 + 4 bytes instead of 1024."
    paragraph(canvas, 0, 510, note)
    return canvas


def dct():
    """Two chunks of four values, their spectra, and what is left without the upper half of them."""
    canvas = Canvas(520, label="The DCT of a smooth chunk and of one that is not")
    n = np.arange(4)
    basis = np.sqrt(2 / 4) * np.cos(np.pi / 4 * (n + 0.5) * n[:, None])
    basis[0] /= np.sqrt(2)
    bar, pitch, unit, row = 34, 46, 13, 152

    def bars(x, zero, values, color, names, dropped=0):
        """A bar for each value. The last `dropped` ones are pale."""
        canvas.line(x - 6, zero, x + 3 * pitch + bar + 6, zero)
        for i, value in enumerate(values):
            size = max(abs(value) * unit, 1)
            top = zero - size if value > 0 else zero
            shown = "idle" if i >= 4 - dropped else color
            canvas.box(x + i * pitch, top, bar, size, shown, radius=1)
            text = f"{value:z.2f}".replace("-", "−")
            text_y = zero - size - 6 if value > 0 else zero + size + 15
            canvas.text(x + i * pitch + bar / 2, text_y, text, "text small", "middle")
        for i, name in enumerate(names):
            y = zero + 4.3 * unit + 20
            canvas.text(x + i * pitch + bar / 2, y, name, "muted small", "middle")

    # The waves.
    canvas.text(0, 60, "the four waves", "text title")
    canvas.text(0, 80, "of the basis", "muted small")
    for i, wave in enumerate(basis):
        x, zero = 176 + i * 168, 66
        canvas.text(x + 56, 16, f"frequency {i}", "muted small", "middle")
        canvas.line(x - 6, zero, x + 118, zero)
        for j, value in enumerate(wave):
            top = zero - value * 60 if value > 0 else zero
            canvas.box(x + j * 30, top, 22, max(abs(value) * 60, 1), "activations", radius=1)

    # Two chunks.
    columns = (176, 396, 616)
    heads = ("values", "spectrum", "without frequencies 2, 3")
    for x, head in zip(columns, heads, strict=True):
        canvas.text(x - 6, 136, head, "text title")
    chunks = ((1.0, 2.0, 3.0, 4.0), (1.0, -3.0, 4.0, 2.0))
    for k, (chunk, name) in enumerate(zip(chunks, ("smooth", "not smooth"), strict=True)):
        zero = 222 + k * row
        values = np.array(chunk)
        spectrum = basis @ values
        kept = spectrum * (n < 2)
        decoded = kept @ basis
        error = np.linalg.norm(decoded - values) / np.linalg.norm(values)
        canvas.text(0, zero - 8, name, "text title")
        canvas.text(0, zero + 12, f"relative error {error:.2f}", "muted small")
        bars(columns[0], zero, values, "gradients", "")
        bars(columns[1], zero, spectrum, "activations", "0123" if k else "", dropped=2)
        bars(columns[2], zero, decoded, "gradients", "")
    note = (
        "The spectrum says how much of each wave the values contain. A smooth chunk needs the slow "
    )
    note += "waves only, so the fast ones (grey) can be dropped. A gradient is not smooth."
    paragraph(canvas, 0, 484, note, columns=112)
    return canvas


def mesh_tensor():
    """Eight ranks as two tensor groups, and a matrix of 512 rows that is cut twice."""
    canvas = Canvas(352, label="A mesh of two tensor groups, and a matrix that is cut twice")
    for group in (0, 1):
        y = 32 + group * 120
        canvas.box(0, y, 372, 92, "line", outline=True, radius=8)
        title_y, ranks_y = (y + 20, y + 34) if group == 0 else (y + 80, y + 14)
        canvas.text(10, title_y, f"machine {group}: tensor group {group}", "text title")
        canvas.text(362, title_y, f"sequences {group}::2", "muted small", "end")
        for part in range(4):
            canvas.box(10 + part * 90, ranks_y, 82, 44, f"rank{part}", f"rank {4 * group + part}")
    for part in range(4):
        double_arrow(canvas, 51 + part * 90, 114, 51 + part * 90, 162, f"rank{part}")
    canvas.text(0, 14, "the mesh", "text title")
    note = (
        "A row computes each layer together and sends activations. A column shards its quarter of "
    )
    note += "a matrix as stage 03 shards all of it, and sends parameters and gradients."
    paragraph(canvas, 0, 280, note, columns=54)

    x, width, height = 520, 250, 58
    canvas.text(x - 74, 14, "a matrix with 512 rows", "text title")
    for part in range(4):
        top = 32 + part * (height + 6)
        canvas.text(x - 12, top + 34, f"rows {128 * part}–{128 * part + 127}", "muted small", "end")
        for group in (0, 1):
            half = height / 2
            y = top + group * half
            name = f"rank {4 * group + part}: 64 rows"
            if group == 0:
                canvas.box(x, y, width, half - 1, f"rank{part}", name, text_style="small")
            else:
                tint(canvas, x, y, width, half - 1, f"rank{part}", name)
    lines(
        canvas,
        x - 74,
        302,
        [
            "The tensor split gives 128 rows to a column of",
            "the mesh, and each of its ranks keeps 64.",
        ],
    )
    return canvas


# ------------------------------------------------------------------ documents and tokens


def streams():
    """Four documents on two endless streams: sequences, steps, ranks, positions after step 2."""
    canvas = Canvas(426, label="Documents are dealt to endless streams, which cut them")
    documents = [("a", 6), ("b", 5), ("c", 7), ("d", 2)]  # names, and their numbers of tokens
    colors = {"a": "parameters", "b": "gradients", "c": "moments", "d": "activations"}
    count, seq_length = 2, 4  # the streams are the sequences of a global batch

    def cut(stream):
        """As `cut` in 06-streaming/toy.py: sequences, and the position after each."""
        tokens = []
        for epoch in itertools.count():
            for name, length in documents[stream::count]:
                tokens += [(name, i, epoch) for i in range(length)]
                while len(tokens) >= seq_length:
                    sequence, tokens = tokens[:seq_length], tokens[seq_length:]
                    yield sequence, (epoch, name, length - len(tokens))

    size = 24
    canvas.text(0, 52, "documents", "text title")
    x = 116
    for number, (name, length) in enumerate(documents):
        middle = x + length * size / 2
        canvas.text(middle, 24, name, "text title", "middle")
        for token in range(length):
            canvas.box(x + token * size, 36, size - 2, 24, colors[name], f"{name}{token}")
        canvas.text(middle, 80, f"stream {number % count}", "muted small", "middle")
        x += length * size + 30

    left, step_width, tops = 116, 4 * size + 36, [158, 228]
    sequences = [list(itertools.islice(cut(stream), 3)) for stream in range(count)]
    for k in range(3):
        x = left + k * step_width
        canvas.box(x - 12, 122, 4 * size + 22, 158, "line", outline=True, radius=6)
        canvas.text(x + 2 * size - 1, 114, f"step {k + 1}", "text title", "middle")
    for stream, y in enumerate(tops):
        canvas.text(0, y + 17, f"stream {stream}", "text title")
        epoch_before = 0
        for k, (content, _) in enumerate(sequences[stream]):
            x = left + k * step_width
            for i, (name, token, epoch) in enumerate(content):
                canvas.box(x + i * size, y, size - 2, 24, colors[name], f"{name}{token}")
                if epoch > epoch_before:
                    canvas.line(x + i * size - 1, y - 5, x + i * size - 1, y + 29, "text")
                    end = x + 4 * size - 2
                    canvas.text(end, y + 42, "begins again", "text small", "end")
                    epoch_before = epoch

    x = left + 3 * step_width + 8
    canvas.text(x + 105, 114, "read by", "text title", "middle")
    for column, ranks in enumerate((1, 2)):
        middle = x + 50 + column * 110
        canvas.text(middle, 138, f"with {ranks} rank" + "s" * (ranks > 1), "muted", "middle")
        for stream, y in enumerate(tops):
            tint(canvas, middle - 40, y - 2, 80, 28, "line", f"rank {stream % ranks}", "text")

    # The positions after step 2.
    edge = left + 2 * step_width - 19
    canvas.line(edge, 92, edge, 300, "warning", dashed=True)
    canvas.arrow(edge, 294, edge, 314, "warning")
    canvas.box(left - 12, 316, 382, 64, "line", outline=True, radius=6)
    canvas.text(0, 340, "positions", "text title")
    canvas.text(0, 358, "after step 2", "muted small")
    for stream in range(count):
        epoch, name, used = sequences[stream][1][1]
        text = f"stream {stream}: epoch {epoch}, in document {name}, {used} of its tokens used"
        canvas.text(left + 4, 342 + 24 * stream, text)
    note = "a4 is token 4 of document a."
    canvas.text(0, 412, note, "muted small")
    return canvas


def packing():
    """Three documents joined with end-of-text tokens, cut into sequences, with their targets."""
    canvas = Canvas(446, label="Packing: documents are joined and cut into sequences")
    documents = ["the sea is calm today", "we train a small model", "no one saw the red cat"]
    documents = [text.split() + ["EOS"] for text in documents]
    colors = ["parameters", "gradients", "moments"]
    length = 8
    joined = [(word, number) for number, words in enumerate(documents) for word in words]
    end = len(joined) - len(joined) % length
    sequences = [joined[start : start + length] for start in range(0, end, length)]
    leftover = joined[end:]
    width, height, row, right = 47, 28, 46, 432

    def token(x, y, word, number, width=width):
        """A box with a token in the color of its document, pale if it is an end-of-text token."""
        if word == "EOS":
            tint(canvas, x, y, width - 3, height, colors[number], word)
        else:
            canvas.box(x, y, width - 3, height, colors[number], word, text_style="small")

    canvas.text(0, 18, "documents, EOS after each", "text title")
    for line, words in enumerate(documents):
        for i, word in enumerate(words):
            token(i * width, 44 + line * row, word, line)
    canvas.arrow(360, 104, 412, 104)
    canvas.text(386, 94, "joined", "muted small", "middle")
    canvas.text(386, 122, "and cut", "muted small", "middle")
    canvas.text(right, 18, f"sequences of {length} tokens", "text title")
    for line, content in enumerate([*sequences, leftover]):
        for i, (word, number) in enumerate(content):
            token(right + i * width, 44 + line * row, word, number)
    y = 44 + 2 * row
    for i in range(len(leftover), length):
        tint(canvas, right + i * width, y, width - 3, height, "line", dashed=True)
    bracket(canvas, right, right + len(leftover) * width - 3, y + height + 11, -6)
    text = "leftover, goes on with the next batch of documents"
    canvas.text(right, y + height + 28, text, "text small")
    canvas.line(0, 218, WIDTH, 218, "idle")

    # The target of a position is the token that follows it.
    canvas.text(0, 248, "a sequence as input and target", "text title")
    left, width, target_y, input_y = 84, 88, 270, 350
    canvas.text(0, target_y + 19, "target")
    canvas.text(0, input_y + 19, "input")
    for i, (word, number) in enumerate(sequences[0]):
        x = left + i * width
        token(x, input_y, word, number, width - 8)
        middle = x + (width - 11) / 2
        if i + 1 < length:
            token(x, target_y, *sequences[0][i + 1], width - 8)
            canvas.arrow(middle + width - 12, input_y - 3, middle + 12, target_y + height + 3)
        else:
            tint(canvas, x, target_y, width - 11, height, "line", "−100", dashed=True)
    note = "The model reads the input up to a position, and predicts the target there. Nothing "
    note += "follows the last token: its target is −100, which the loss leaves out."
    paragraph(canvas, 0, 412, note)
    return canvas


PICTURES = {
    "packing": packing,
    "bf16-rounding": bf16_rounding,
    "global-batch": global_batch,
    "mesh-hsdp": mesh_hsdp,
    "int8": int8,
    "dct": dct,
    "agents": agents,
    "elastic": elastic,
    "streams": streams,
    "column-row": column_row,
    "mesh-tensor": mesh_tensor,
    "schedules": schedules,
    "stages-and-shards": stages_and_shards,
    "model-on-stages": model_on_stages,
}
