"""What the functions of the persistent kernel hand to each other."""

# mypy: ignore-errors
# Annotations are values here: an aggregate checks its fields with them.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate


@aggregate
class Source:
    """What is constant for a program, and where it finds the weights.

    table: addresses of what is not streamed, a row per layer. places: where the weights of a layer
    lie in their boxes. head_row and layer_rows: where the program's keys begin, and the rows of a
    layer. At most IN_FLIGHT copies of half a tile are under way at once, EARLY between products.
    """

    table: gl.tensor
    places: gl.tensor
    head_row: gl.tensor
    layer_rows: gl.tensor
    key_pairs: gl.tensor
    program: gl.tensor
    layers: gl.tensor
    PROGRAMS: gl.constexpr
    IN_FLIGHT: gl.constexpr
    EARLY: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, table, places, head_row, layer_rows, key_pairs, program, layers, PROGRAMS, IN_FLIGHT,
        EARLY,
    ):  # fmt: skip
        self.table = table
        self.places = places
        self.head_row = head_row
        self.layer_rows = layer_rows
        self.key_pairs = key_pairs
        self.program = program
        self.layers = layers
        self.PROGRAMS = gl.constexpr(PROGRAMS)
        self.IN_FLIGHT = gl.constexpr(IN_FLIGHT)
        self.EARLY = gl.constexpr(EARLY)


@aggregate
class Sizes:
    """The layers' constants.

    SCALE: of the attention's scores, for exp2. LANES: a power of two of at least D / 128. CHUNKS:
    parts of the cached columns per query head.
    """

    D: gl.constexpr
    Q: gl.constexpr
    KV: gl.constexpr
    F: gl.constexpr
    FP8: gl.constexpr
    BIAS: gl.constexpr
    EPS: gl.constexpr
    SCALE: gl.constexpr
    LANES: gl.constexpr
    CHUNKS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, D, Q, KV, F, FP8, BIAS, EPS, SCALE, LANES, CHUNKS):
        self.D = gl.constexpr(D)
        self.Q = gl.constexpr(Q)
        self.KV = gl.constexpr(KV)
        self.F = gl.constexpr(F)
        self.FP8 = gl.constexpr(FP8)
        self.BIAS = gl.constexpr(BIAS)
        self.EPS = gl.constexpr(EPS)
        self.SCALE = gl.constexpr(SCALE)
        self.LANES = gl.constexpr(LANES)
        self.CHUNKS = gl.constexpr(CHUNKS)


@aggregate
class Product:
    """A product's shape: TOTAL steps, STEPS for each tile of the N columns.

    At most MOST programs share a tile of columns.
    """

    N: gl.constexpr
    STEPS: gl.constexpr
    TOTAL: gl.constexpr
    FP8: gl.constexpr
    MOST: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, K, N, FP8, PROGRAMS):
        steps = K // (128 if FP8 else 64)
        self.N = gl.constexpr(N)
        self.STEPS = gl.constexpr(steps)
        self.TOTAL = gl.constexpr(N // 128 * steps)
        self.FP8 = gl.constexpr(FP8)
        self.MOST = gl.constexpr(-(-PROGRAMS // (N // 128)) + 1)


@aggregate
class Window:
    """The window's rows, the valid columns [low, high), and this program's cached ones.

    Its own columns are [start, start + kept); first_key is the first cached column of the chunk.
    kept_keys and kept_values [layers, Hkv, N, 128].
    """

    cos: gl.tensor
    sin: gl.tensor
    kept_keys: gl.tensor
    kept_values: gl.tensor
    rows: gl.tensor
    start: gl.tensor
    kept: gl.tensor
    low: gl.tensor
    high: gl.tensor
    first_key: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self, cos, sin, kept_keys, kept_values, rows, start, kept, low, high, first_key
    ):  # fmt: skip
        self.cos = cos
        self.sin = sin
        self.kept_keys = kept_keys
        self.kept_values = kept_values
        self.rows = rows
        self.start = start
        self.kept = kept
        self.low = low
        self.high = high
        self.first_key = first_key


@aggregate
class Work:
    """What the grid writes: the residual, inputs of the products and their scales, sums, states.

    hidden [rows, D]; x_attn, x_ffn [32, D], x_out [32, Q], x_down [32, F]; ffn_scale [D / 128, 32],
    down_scale [F / 128, 32]; partial [i, 32, n]; squares [32, D / 128]; state [Hq, CHUNKS + 1, 32,
    128], maxima and totals without the 128.
    """

    hidden: gl.tensor
    x_attn: gl.tensor
    x_out: gl.tensor
    x_ffn: gl.tensor
    x_down: gl.tensor
    ffn_scale: gl.tensor
    down_scale: gl.tensor
    partial: gl.tensor
    squares: gl.tensor
    state: gl.tensor
    maxima: gl.tensor
    totals: gl.tensor
    counter: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self, hidden, x_attn, x_out, x_ffn, x_down, ffn_scale, down_scale, partial, squares, state,
        maxima, totals, counter,
    ):  # fmt: skip
        self.hidden = hidden
        self.x_attn = x_attn
        self.x_out = x_out
        self.x_ffn = x_ffn
        self.x_down = x_down
        self.ffn_scale = ffn_scale
        self.down_scale = down_scale
        self.partial = partial
        self.squares = squares
        self.state = state
        self.maxima = maxima
        self.totals = totals
        self.counter = counter


@aggregate
class Channel:
    """The rings of the stream, and the barriers between those who fill and who empty them.

    A half of a tile has arrived behind `full`, the activations of a step behind `x_full`; `empty`
    and `x_empty` give the slots back. `go` is passed when the program's own share of a product's
    activations is written. `factors` are the weight's scales of a product's steps.
    """

    ring: gl.shared_memory_descriptor
    x_ring: gl.shared_memory_descriptor
    scale_ring: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    x_full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    x_empty: gl.shared_memory_descriptor
    go: gl.shared_memory_descriptor
    factors: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, ring, x_ring, scale_ring, full, x_full, empty, x_empty, go, factors):
        self.ring = ring
        self.x_ring = x_ring
        self.scale_ring = scale_ring
        self.full = full
        self.x_full = x_full
        self.empty = empty
        self.x_empty = x_empty
        self.go = go
        self.factors = factors
