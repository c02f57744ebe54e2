"""Rows of docs/performance.md that a plan can be held against: what ran, and what it took.

Each table is a run on one machine, whose host is known by one number of that run which is not
predicted: milliseconds in which it launched a step of DDP, or of one of our rows; or, where each
row of a host that limits everything has a floor of its own, the milliseconds of the `optim` row,
which then is no row to predict, in proportion to those floors.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """gpus, model, layers, sequence; host: the number above, and `known`, which it is: "ddp",
    "ours" or "optim" (ours, of that strategy), launched in that time, "step": the table's row of
    `optim` says, or "": nobody does, where all rows are graphs of an iteration. fused: weight
    gradients written into buckets; clips: the norm is above the limit, as its trace shows. use: of
    its rows; of the first ones every second was fitted to. today: whether it was measured since
    copy engines carry gradients as autograd gives them; one_pass: since Adam's kernel is our own,
    and clips. experts_tflops: what their products
    reach with that release of Transformer Engine, 0 for what the tables say."""

    name: str
    gpus: int
    model: str
    layers: int
    seq: int
    host: float
    fused: bool
    expert: int = 1
    clips: bool = False
    known: str = "ddp"
    microbatch: int = 1
    use: str = "half"
    experts_tflops: float = 0.0
    today: bool = False
    one_pass: bool = False


@dataclass(frozen=True)
class Measured:
    """One row: the wrapper as docs/performance.md names it, microbatches, ms: median, lowest,
    highest. fp8: the recipe, of FP8 weights; host_layers: whose activations are in host memory;
    fused: where it differs from the table's other rows; budget: GiB of what stays whole; floor: ms
    of forward and backward alone in the same rounds, which say how fast the host was then, where it
    limits and its speed changed from row to row; expert_overlap: core's schedule with exchanges
    beside another microbatch; whole: experts of one rank had no buckets any more; unit_numel:
    elements up to which layers were joined, which all were measured without."""

    table: Table
    wrapper: str
    ms: float
    low: float
    high: float
    microbatches: int = 1
    strategy: str = "optim_grads_params"
    wire: str = "fp32"
    fp8: str = ""
    host_layers: int = 0
    fused: bool | None = None
    budget: float = 0.0
    floor: float = 0.0
    expert_overlap: bool = False
    whole: bool = False
    unit_numel: int = 0

    @property
    def name(self) -> str:
        words = [f"{self.wrapper}:{self.strategy}"]
        words += ["bf16 wire"] if self.wire == "bf16" else []
        words += [f"FP8 weights, {self.fp8}"] if self.fp8 else []
        words += [f"activations of {self.host_layers} layers away"] if self.host_layers else []
        words += [f"budget {self.budget:g} GiB"] if self.budget else []
        words += ["experts overlapped"] if self.expert_overlap else []
        words += ["experts whole"] if self.whole else []
        words += ["fused"] if self.fused and not self.table.fused else []
        return ", ".join(words)


FITTED, HELD, AFTER, MACHINE = "fitted", "held", "measured after", "the machine"
UNEVEN = "uneven"
"""What a row is for: numbers were fitted to it; kept aside; measured after all numbers had been
fixed; or it says how fast the host of its table is. An uneven one is no measurement to a tenth: a
prediction has to be within what was measured, or near its median."""

APART = 1.25
"""Times the lowest of what was measured, from which on the highest makes a row uneven."""

OLD_EXPERTS = 455.0
"""Of Transformer Engine 2.11; 2.20 is faster."""

A8 = Table("2 x H200, 8 layers", 2, "llama3-8b", 8, 4096, 56, False)
A15 = Table("2 x H200, 1.5B", 2, "llama-1.5b", 16, 2048, 0.0, False, known="step")
B32 = Table("4 x H200, 8B", 4, "llama3-8b", 32, 4096, 175, True)
B15 = Table("4 x H200, 1.5B", 4, "llama-1.5b", 16, 2048, 0.0, False, known="step")
C32 = Table("4 x H200, 8B, every peer", 4, "llama3-8b", 32, 4096, 259, True)
C15 = Table("4 x H200, 1.5B, every peer", 4, "llama-1.5b", 16, 2048, 130, True)
D32 = Table("4 x H200, 8B, third machine", 4, "llama3-8b", 32, 4096, 216, True)
D15 = Table("4 x H200, 1.5B, third machine", 4, "llama-1.5b", 16, 2048, 104, True)
E24 = Table("2 x H200, 24 layers", 2, "llama3-8b", 24, 4096, 219, True)
E32 = Table("2 x H200, 32 layers", 2, "llama3-8b", 32, 4096, 290, True)
E15 = Table("2 x H200, 1.5B, slow host", 2, "llama-1.5b", 16, 2048, 110, True)
H15 = Table("2 x H200, 1.5B, core 0.19.2", 2, "llama-1.5b", 16, 2048, 112.6, False, use=AFTER)
F8 = Table("2 x H200, 8 layers, core 0.19.2", 2, "llama3-8b", 8, 4096, 79, False)
G16 = Table("4 x H200, 16 layers", 4, "llama3-8b", 16, 4096, 62, False)
K24 = Table("2 x H200, 24 layers, TE 2.20", 2, "llama3-8b", 24, 4096, 223, False, 1, True)
FP8 = Table(
    "2 x H200, 24 layers, FP8 weights", 2, "llama3-8b", 24, 4096, 160, False, clips=True,
    known="ours", use=FITTED,
)  # fmt: skip
AWAY = Table(
    "2 x H200, 24 layers, 2 sequences", 2, "llama3-8b", 24, 4096, 223, False, clips=True,
    microbatch=2, use=FITTED,
)  # fmt: skip
W13 = Table(
    "2 x H200, 13B, 16 layers", 2, "llama-13b", 16, 4096, 104.8, True, clips=True, known="ours",
    use=AFTER,
)  # fmt: skip
V16 = Table(
    "2 x H200, 16 layers, core 0.19.2", 2, "llama3-8b", 16, 4096, 93.0, True, clips=True,
    known="ours", use=AFTER,
)  # fmt: skip
MOE8 = Table("4 x H200, Mixtral 8 layers, EP 4", 4, "mixtral-8x7b", 8, 4096, 126, False, 4,
             use=FITTED, experts_tflops=OLD_EXPERTS)  # fmt: skip
MOE4 = Table("4 x H200, Mixtral 4 layers, EP 2", 4, "mixtral-8x7b", 4, 4096, 52, False, 2,
             use=FITTED, experts_tflops=OLD_EXPERTS)  # fmt: skip
MOE2 = Table(
    "2 x H200, Mixtral 4 layers, EP 2", 2, "mixtral-8x7b", 4, 4096, 410.6, False, 2, True,
    known="ours", use=FITTED,
)  # fmt: skip
MOE2B = Table(
    "2 x H200, Mixtral 4 layers, EP 2, later", 2, "mixtral-8x7b", 4, 4096, 400.5, False, 2, True,
    known="ours", use=FITTED,
)  # fmt: skip
MUON8 = Table("2 x H200, 8 layers, Muon", 2, "llama3-8b", 8, 4096, 813, True, clips=True,
              known="ours", use=AFTER)  # fmt: skip
STREAM = Table("2 x H200, 32 layers, streamed", 2, "llama3-8b", 32, 4096, 209.9, False, clips=True,
               known="ours", use=AFTER)  # fmt: skip
KEPT = Table("2 x H200, 24 layers, budgets", 2, "llama3-8b", 24, 4096, 1079.2, False, clips=True,
             known="ours", use=AFTER)  # fmt: skip
S30 = Table("2 x H200, 30 layers of 30B, streamed", 2, "llama-30b", 30, 4096, 322.3, False,
            clips=True, known="ours", use=AFTER)  # fmt: skip
KEPT2 = Table("2 x H200, 24 layers, budgets, later", 2, "llama3-8b", 24, 4096, 934.1, False,
              clips=True, use=AFTER)  # fmt: skip
W13M = Table("2 x H200, 13B, 16 layers, 4 microbatches", 2, "llama-13b", 16, 4096, 828.6, True,
             clips=True, known="ours", use=AFTER)  # fmt: skip
MUON8O = Table("2 x H200, 8 layers, Muon, ZeRO-1", 2, "llama3-8b", 8, 4096, 678.8, True, clips=True,
               known="optim", use=AFTER)  # fmt: skip
T15 = Table("2 x H200, 1.5B, graphs", 2, "llama-1.5b", 16, 2048, 0, False, known="", use=AFTER)
I15 = Table("2 x H200, 1.5B, in turns", 2, "llama-1.5b", 16, 2048, 0, False, known="step",
            use=AFTER)  # fmt: skip
J15 = Table("2 x H200, 1.5B, in turns, without flight recorder", 2, "llama-1.5b", 16, 2048, 0,
            False, known="step", use=AFTER)  # fmt: skip
WHOLE2 = Table(
    "2 x H200, Mixtral 4 layers, EP 2, experts whole", 2, "mixtral-8x7b", 4, 4096, 339.3, True, 2,
    True, use=AFTER, today=True,
)  # fmt: skip
KEPT3 = Table("2 x H200, 24 layers, budgets, third", 2, "llama3-8b", 24, 4096, 928.7, False,
              clips=True, use=AFTER, today=True)  # fmt: skip
MUON8B = Table("2 x H200, 8 layers, Muon, later", 2, "llama3-8b", 8, 4096, 787.1, True, clips=True,
               known="ours", use=AFTER, today=True)  # fmt: skip
NARROW15 = Table("2 x H200, 1.5B, graphs, bf16 pieces", 2, "llama-1.5b", 16, 2048, 0, False,
                 known="", use=AFTER, today=True)  # fmt: skip
NARROW24 = Table("2 x H200, 24 layers, bf16 pieces", 2, "llama3-8b", 24, 4096, 0, False, clips=True,
                 known="", use=AFTER, today=True)  # fmt: skip
PASS15 = Table("2 x H200, 1.5B, graphs, Adam in one pass", 2, "llama-1.5b", 16, 2048, 0, False,
               known="", use=AFTER, today=True, one_pass=True)  # fmt: skip
PASS24 = Table("2 x H200, 24 layers, Adam in one pass", 2, "llama3-8b", 24, 4096, 0, False,
               known="", use=AFTER, today=True, one_pass=True)  # fmt: skip
FUSED15 = Table("2 x H200, 1.5B, graphs, fused, bf16 wire", 2, "llama-1.5b", 16, 2048, 0, True,
                known="", use=AFTER, today=True, one_pass=True)  # fmt: skip
V4 = Table("2 x H200, 4 layers, core 0.19.2", 2, "llama3-8b", 4, 4096, 29.6, False, clips=True,
           known="ours", use=AFTER)  # fmt: skip


def _rows(table: Table, *rows: tuple) -> list[Measured]:
    return [Measured(table, *row[:4], *row[4:]) for row in rows]


ZERO3 = "optim_grads_params"

ROWS: list[Measured] = [
    *_rows(
        A8, ("ours", 169.4, 169.4, 169.8, 1, "no_shard"),
        ("ours", 149.5, 148.9, 149.6, 1, "optim"), ("ours", 151.1, 151.0, 151.2, 1, "optim_grads"),
        ("ours", 154.2, 154.2, 154.8),
    ),
    Measured(A15, "ours", 88.1, 83.8, 93.1, strategy="optim", floor=62.5),
    Measured(A15, "ours", 99.6, 94.6, 102.7, floor=64.7),
    *_rows(
        B32, ("ours", 431.0, 428.9, 432.6), ("ours-ub", 423.3, 421.6, 427.1),
        ("ours-ce", 419.9, 416.6, 421.8), ("ours-ce-ub", 418.8, 417.0, 419.4),
        ("ours", 1704.0, 1702.1, 1704.8, 4), ("ours-ce", 1641.9, 1638.9, 1642.7, 4),
    ),
    Measured(B15, "ours", 79.8, 77.5, 84.8, floor=53.2),
    Measured(B15, "ours", 81.9, 80.6, 83.6, strategy="optim", floor=64.0),
    Measured(B15, "ours-ce", 82.4, 82.1, 86.2, floor=62.4),
    *_rows(
        C32, ("ours", 446.9, 444.9, 447.9), ("ours-ce", 450.7, 432.1, 453.1),
        ("ours-ce-rs", 421.7, 418.1, 426.9), ("ours", 1727.7, 1721.2, 1731.9, 4),
        ("ours-ce-rs", 1644.3, 1643.4, 1647.7, 4),
    ),
    *_rows(
        C15, ("ours-graph", 56.6, 56.5, 56.7), ("ours", 114.0, 112.1, 119.9, 1, "optim"),
        ("ours", 139.8, 139.3, 141.1),
    ),
    *_rows(
        D32, ("ours-ce-graph", 410.7, 410.2, 415.2), ("ours-ce-rs", 422.3, 418.5, 426.8),
        ("ours-graph", 431.9, 431.8, 439.3), ("ours", 432.0, 431.8, 434.0),
        ("ours-ce-graph", 396.4, 396.4, 396.4, 1, "optim_grads_params", "bf16"),
        ("ours", 1477.0, 1475.7, 1477.2, 4, "optim"),
        ("ours", 1571.8, 1570.5, 1572.4, 4, "optim_grads"),
        ("ours-ce-graph", 1585.0, 1575.1, 1588.3, 4), ("ours-ce-rs", 1648.5, 1639.2, 1655.8, 4),
        ("ours", 1704.7, 1698.0, 1707.5, 4),
    ),
    *_rows(
        D15, ("ours-ce-graph", 49.9, 49.7, 50.5), ("ours-graph", 55.8, 55.4, 55.8),
        ("ours", 100.4, 97.3, 102.4, 1, "optim"), ("ours", 116.2, 115.8, 119.4),
    ),
    *_rows(
        E24, ("ours-ce-graph", 334.5, 333.5, 342.6), ("ours-ce-rs", 336.5, 333.7, 338.5),
        ("ours", 347.0, 344.5, 350.4, 1, "optim"), ("ours", 350.3, 349.2, 353.8),
        ("ours-ce-graph", 325.0, 325.0, 325.0, 1, "optim_grads_params", "bf16"),
        ("ours", 1173.9, 1168.9, 1175.7, 4, "optim"),
        ("ours-ce-graph", 1253.3, 1251.0, 1255.6, 4), ("ours", 1317.4, 1315.6, 1321.4, 4),
    ),
    *_rows(
        E32, ("ours-ce-graph", 432.8, 432.8, 432.8), ("ours-ce-rs", 434.4, 434.4, 434.4),
        ("ours", 466.1, 466.1, 466.1),
    ),
    *_rows(
        E15, ("ours-ce-graph", 53.9, 53.6, 53.9), ("ours", 108.2, 104.9, 111.3, 1, "optim"),
        ("ours", 116.1, 110.6, 119.3),
    ),
    *_rows(
        F8, ("ours", 146.6, 145.7, 148.5, 1, "optim"),
        ("ours", 148.0, 147.7, 150.7, 1, "optim_grads"), ("ours", 150.4, 150.1, 152.4),
        ("ours", 166.9, 165.5, 170.6, 1, "no_shard"),
    ),
    *_rows(G16, ("ours", 236.7, 235.4, 238.2, 1, "optim"), ("ours", 243.1, 241.6, 244.8)),
    *_rows(K24, ("ours", 368.9, 367.6, 370.3)),
    *_rows(MOE8, ("ours", 256.7, 254.5, 264.9), ("ours", 266.9, 258.8, 268.9)),
    *_rows(MOE4, ("ours", 170.7, 169.8, 171.6), ("ours-ag", 142.8, 141.1, 144.6)),
    *_rows(
        FP8, ("ours", 375.4, 372.9, 378.0),
        ("ours", 311.6, 311.2, 312.0, 1, ZERO3, "fp32", "tensorwise"),
        ("ours-ce-rs", 292.8, 289.8, 295.8, 1, ZERO3, "fp32", "tensorwise"),
        ("ours-ce-graph", 280.2, 279.9, 280.5, 1, ZERO3, "fp32", "tensorwise"),
        ("ours-ce-graph", 269.1, 266.5, 271.8, 1, ZERO3, "fp32", "tensorwise", 0, True),
        ("ours", 319.0, 314.2, 323.9, 1, ZERO3, "fp32", "blockwise"),
        ("ours", 1069.0, 1056.8, 1081.1, 4, ZERO3, "fp32", "tensorwise"),
    ),
    *_rows(
        AWAY, ("ours", 633.8, 621.9, 638.9),
        ("ours", 730.7, 727.4, 731.0, 1, ZERO3, "fp32", "", 12),
        ("ours", 1440.2, 1433.7, 1440.6, 1, ZERO3, "fp32", "", 23),
    ),
    *_rows(
        H15, ("ours", 107.0, 106.3, 108.8, 1, "optim"), ("ours", 114.1, 106.2, 119.8),
        ("ours-layers", 59.9, 59.8, 60.2), ("ours-graph", 60.6, 60.5, 60.6),
        ("ours-ce-layers", 56.2, 55.8, 56.2),
    ),
    *_rows(
        W13, ("ours-ce-rs", 295.2, 294.6, 295.7), ("ours", 305.9, 305.7, 306.6, 1, "optim"),
        ("ours", 306.8, 304.9, 307.3),
    ),
    *_rows(MOE2, ("ours", 492.7, 492.0, 512.1, 4)),
    *_rows(
        MOE2B, ("ours", 483.9, 473.4, 489.5, 4),
        ("ours", 423.5, 412.0, 426.7, 4, ZERO3, "fp32", "", 0, None, 10.0),
    ),
    Measured(MOE2B, "ours", 465.0, 457.0, 477.0, 4, expert_overlap=True),
    *_rows(MUON8, ("ours", 1077.4, 1072.8, 1077.4, 8), ("ours-muon", 1178.4, 1175.2, 1183.3, 8)),
    *_rows(
        KEPT, ("ours", 1370.9, 1365.5, 1376.4, 4),
        ("ours", 1290.3, 1287.5, 1293.1, 4, ZERO3, "fp32", "", 0, None, 10.0),
        ("ours", 1219.8, 1219.8, 1219.8, 4, ZERO3, "fp32", "", 0, None, 30.0),
    ),
    *_rows(S30, ("ours-stream", 3174.3, 3174.3, 3174.3)),
    *_rows(STREAM, ("ours-stream", 1516.2, 1492.7, 1539.7)),
    *_rows(V4, ("ours", 96.5, 95.8, 97.1)),
    *_rows(V16, ("ours-ce-rs", 240.0, 237.2, 241.9)),
    *_rows(
        KEPT2, ("ours", 1217.7, 1216.1, 1221.9, 4, ZERO3, "fp32", "", 0, None, 25.0),
        ("ours-ce-graph", 1234.0, 1233.2, 2050.1, 4, ZERO3, "fp32", "", 0, None, 20.0),
        ("ours-ce-graph", 1269.0, 1262.1, 2101.2, 4, ZERO3, "fp32", "", 0, None, 10.0),
    ),
    *_rows(
        W13M, ("ours", 1062.4, 1059.6, 1065.2, 4, ZERO3, "fp32", "", 0, None, 16.0),
        ("ours", 1154.6, 1152.1, 1157.0, 4),
    ),
    *_rows(
        MUON8O, ("ours", 926.1, 925.0, 926.2, 8, "optim"),
        ("ours-muon", 1032.4, 1031.1, 1035.1, 8, "optim"),
    ),
    *_rows(T15, ("ours-ce-graph", 54.7, 54.5, 55.1), ("ours-graph", 60.8, 60.7, 60.9)),
    *_rows(
        I15, ("ours", 91.3, 81.8, 113.5, 1, "optim"), ("ours", 107.2, 83.2, 134.6),
        ("ours-ce-rs", 102.3, 81.9, 119.3),
    ),
    Measured(WHOLE2, "ours", 418.6, 417.3, 449.3, 4, whole=True),
    *_rows(KEPT3, ("ours", 1211.6, 1211.1, 1212.1, 4, ZERO3, "fp32", "", 0, None, 20.0)),
    *_rows(
        MUON8B, ("ours", 1052.4, 1051.1, 1053.6, 8), ("ours-muon", 1148.1, 1147.9, 1148.3, 8),
        ("ours-muon", 1006.0, 1004.4, 1007.7, 8, "optim"),
    ),
    *_rows(NARROW15, ("ours-ce-graph", 49.5, 49.4, 49.5)),
    *_rows(NARROW24, ("ours-ce-graph", 326.6, 326.4, 326.8)),
    *_rows(PASS15, ("ours-ce-graph", 47.3, 47.0, 47.6), ("ours-ce-graph", 46.3, 46.1, 46.4)),
    *_rows(FUSED15, ("ours-ce-graph", 45.0, 44.9, 45.2, 1, ZERO3, "bf16")),
    *_rows(PASS24, ("ours-ce-graph", 325.0, 324.3, 328.1)),
    *_rows(J15, ("ours", 96.4, 80.1, 134.9, 1, "optim"), ("ours", 122.4, 89.3, 147.8)),
]


def use_of(number: int) -> str:
    """Of a row of `ROWS`."""
    row = ROWS[number]
    if row.table.known == "step" and (row.wrapper, row.strategy) == ("ours", "optim"):
        return MACHINE
    if row.high > APART * row.low:
        return UNEVEN
    if row.table.use != "half":
        return row.table.use
    return HELD if number % 2 else FITTED


def machine_row(table: Table) -> Measured:
    """That which says how fast the host is; ValueError if there is none."""
    for number, row in enumerate(ROWS):
        if row.table is table and use_of(number) == MACHINE:
            return row
    raise ValueError(f"{table.name}: no row of `optim` says how fast the host is")
