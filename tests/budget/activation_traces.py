"""Makes synthetic traces of well-known models, as the solver of activation budgets takes them."""

import random
from collections.abc import Sequence

Format = tuple[int, float]
Value = tuple[int, bool, bool, int, list[Format]]
Op = tuple[float, list[int], list[int]]
Use = tuple[int, bool]
Trace = tuple[list[Value], list[Op], list[Use]]

FLOPS = 300e12
BYTES_PER_SECOND = 2e12
LAUNCH = 4e-6


class Recorder:
    """Records operations in order of forward; backward visits them from the last to the first."""

    def __init__(self, noise: float = 0.0) -> None:
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.nodes: list[list[int]] = []
        self.random = random.Random(0)
        self.noise = noise

    def value(
        self, num_bytes: float, can_recompute: bool = True, replaces: int = -1, formats: Sequence[Format] = ()
    ) -> int:
        self.values.append((int(num_bytes), True, can_recompute, replaces, list(formats)))
        return len(self.values) - 1

    def op(
        self, flops: float, reads: Sequence[int], writes: Sequence[float], saves: str = "", opaque: bool = False
    ) -> int:
        """Records an operation and returns the first value that it writes. In `saves`, "r0" is the first value read and
        "w1" the second one written."""
        written = [self.value(b, can_recompute=not opaque) for b in writes]
        self._record(flops, list(reads), written, saves)
        return written[0]

    def in_place(self, flops: float, target: int, reads: Sequence[int], saves: str = "") -> int:
        num_bytes, _, can_recompute, replaces, formats = self.values[target]
        self.values[target] = (num_bytes, False, can_recompute, replaces, formats)
        written = self.value(num_bytes, replaces=target)
        self._record(flops, [target, *reads], [written], saves)
        return written

    def _record(self, flops: float, reads: list[int], written: list[int], saves: str) -> None:
        moved = sum(self.values[v][0] for v in reads + written)
        seconds = (flops / FLOPS + moved / BYTES_PER_SECOND + LAUNCH) * (1 + self.noise * self.random.uniform(-1, 1))
        self.ops.append((seconds, reads, written))
        names = {f"r{i}": v for i, v in enumerate(reads)} | {f"w{i}": v for i, v in enumerate(written)}
        self.nodes.append([names[s] for s in saves.split()])

    def trace(self) -> Trace:
        uses: list[Use] = []
        for saved in reversed(self.nodes):
            uses += [(v, False) for v in saved] + [(v, True) for v in saved]
        return self.values, self.ops, uses


def _linear(r: Recorder, x: int, tokens: int, ins: int, outs: int, casts: bool = False) -> int:
    weight = r.value(0)
    if casts:  # under autocast, backward also needs the 16-bit weight
        weight = r.op(0, [weight], [2 * ins * outs])
    return r.op(2.0 * tokens * ins * outs, [x, weight], [2 * tokens * outs], "r0 r1" if casts else "r0")


def _norm(r: Recorder, x: int, tokens: int, width: int) -> int:
    return r.op(0, [x], [2 * tokens * width, 4 * tokens, 4 * tokens], "r0 w1 w2")


def _dropout(r: Recorder, x: int, numel: int, rate: bool) -> int:
    return r.op(0, [x], [2 * numel, numel], "w1") if rate else x


def _attention(r: Recorder, q: int, kv: int, tokens: int, width: int, seq: int) -> int:
    reads = [q] if q == kv else [q, kv]
    saves = "r0 w0 w1" if q == kv else "r0 r1 w0 w1"
    return r.op(4.0 * tokens * seq * width, reads, [2 * tokens * width, 4 * tokens * width // 64], saves)


def _mlp(r: Recorder, x: int, tokens: int, width: int, fat: bool) -> int:
    y = _linear(r, _norm(r, x, tokens, width), tokens, width, 4 * width, fat)
    y = r.op(0, [y], [2 * tokens * 4 * width], "r0")  # gelu
    y = _dropout(r, _linear(r, y, tokens, 4 * width, width, fat), tokens * width, fat)
    return r.op(0, [x, y], [2 * tokens * width])


def _block(r: Recorder, x: int, tokens: int, width: int, seq: int, fat: bool, memory: int | None = None) -> int:
    y = _linear(r, _norm(r, x, tokens, width), tokens, width, 3 * width, fat)
    if fat:  # copies the heads into contiguous memory
        y = r.op(0, [y], [2 * tokens * 3 * width])
    y = _attention(r, y, y, tokens, width, seq)
    if fat:
        y = r.op(0, [y], [2 * tokens * width])
    y = _dropout(r, _linear(r, y, tokens, width, width, fat), tokens * width, fat)
    x = r.op(0, [x, y], [2 * tokens * width])
    if memory is not None:
        q = _linear(r, _norm(r, x, tokens, width), tokens, width, width, fat)
        kv = _linear(r, memory, tokens, width, 2 * width, fat)
        y = _linear(r, _attention(r, q, kv, tokens, width, seq), tokens, width, width, fat)
        x = r.op(0, [x, y], [2 * tokens * width])
    return _mlp(r, x, tokens, width, fat)


def _head(r: Recorder, x: int, tokens: int, width: int, words: int) -> None:
    logits = _linear(r, _norm(r, x, tokens, width), tokens, width, words)
    logp = r.op(0, [logits], [2 * tokens * words], "w0")
    r.op(0, [logp], [4], "")


def gpt(layers: int, fat: bool = False, words: int = 0, noise: float = 0.0) -> Trace:
    """Makes a GPT. `fat` adds dropout, the casts of autocast, and copies: about 20 operations per layer."""
    r = Recorder(noise)
    tokens, width, seq = 8192, 1024, 1024
    x = r.op(0, [r.value(0)], [2 * tokens * width])
    for _ in range(layers):
        x = _block(r, x, tokens, width, seq, fat)
    if words:
        _head(r, x, tokens, width, words)
    return r.trace()


def encoder_decoder(layers: int) -> Trace:
    r = Recorder()
    tokens, width, seq = 8192, 1024, 1024
    x = r.op(0, [r.value(0)], [2 * tokens * width])
    for _ in range(layers):
        x = _block(r, x, tokens, width, seq, False)
    memory = _norm(r, x, tokens, width)
    x = r.op(0, [r.value(0)], [2 * tokens * width])
    for _ in range(layers):
        x = _block(r, x, tokens, width, seq, False, memory)
    return r.trace()


def _conv(r: Recorder, x: int, pixels: int, ins: int, outs: int, kernel: int) -> int:
    return r.op(2.0 * pixels * ins * outs * kernel * kernel, [x, r.value(0)], [2 * pixels * outs], "r0")


def _conv_norm_relu(r: Recorder, x: int, pixels: int, ins: int, outs: int, kernel: int) -> int:
    y = _conv(r, x, pixels, ins, outs, kernel)
    y = r.op(0, [y], [2 * pixels * outs, 4 * outs, 4 * outs], "r0 w1 w2")
    return r.in_place(0, y, [], "w0")


def resnet(depths: Sequence[int] = (3, 4, 6, 3), batch: int = 64) -> Trace:
    r = Recorder()
    size, width, ins = 112, 64, 64
    x = _conv_norm_relu(r, r.value(0), batch * size * size, 3, 64, 7)
    size //= 2
    x = r.op(0, [x], [2 * batch * size * size * 64, 8 * batch * size * size * 64], "r0 w1")  # max-pool and its indices
    for stage, depth in enumerate(depths):
        for block in range(depth):
            pixels = batch * size * size
            y = _conv_norm_relu(r, x, pixels, ins, width, 1)
            if block == 0 and stage > 0:
                size //= 2
            shortcut = x
            y = _conv_norm_relu(r, y, batch * size * size, width, width, 3)
            pixels = batch * size * size
            y = _conv(r, y, pixels, width, 4 * width, 1)
            y = r.op(0, [y], [2 * pixels * 4 * width, 16 * width, 16 * width], "r0 w1 w2")
            if block == 0:
                shortcut = _conv(r, x, pixels, ins, 4 * width, 1)
                shortcut = r.op(0, [shortcut], [2 * pixels * 4 * width, 16 * width, 16 * width], "r0 w1 w2")
            y = r.in_place(0, y, [shortcut])
            x = r.in_place(0, y, [], "w0")
            ins = 4 * width
        width *= 2
    pooled = r.op(0, [x], [2 * batch * ins])
    _linear(r, pooled, batch, ins, 1000)
    return r.trace()


def u_net(levels: int = 5, convs: int = 2, batch: int = 8) -> Trace:
    r = Recorder()
    size, width = 256, 64
    x, skips = r.value(0), []
    ins = 3
    for level in range(levels):
        pixels = batch * size * size
        for _ in range(convs):
            x = _conv_norm_relu(r, x, pixels, ins, width, 3)
            ins = width
        if level + 1 < levels:
            skips.append((x, size, width))
            size, width = size // 2, width * 2
            x = r.op(0, [x], [2 * batch * size * size * ins, 8 * batch * size * size * ins], "r0 w1")
    for skip, size, width in reversed(skips):
        pixels = batch * size * size
        x = r.op(2.0 * pixels * ins * width, [x, r.value(0)], [2 * pixels * width], "r0")  # transposed convolution
        x = r.op(0, [skip, x], [2 * pixels * 2 * width])  # concatenated
        ins = 2 * width
        for _ in range(convs):
            x = _conv_norm_relu(r, x, pixels, ins, width, 3)
            ins = width
    _conv(r, x, batch * 256 * 256, ins, 2, 1)
    return r.trace()


def unstructured(num_ops: int, seed: int = 0, far: float = 0.1) -> Trace:
    """Makes a graph whose operations read a few recent values, and sometimes any; two thirds of them save values."""
    r = Recorder()
    rng = random.Random(seed)
    values = [r.op(0, [r.value(0)], [2**20])]
    for _ in range(num_ops - 1):
        count = rng.choice([1, 1, 2, 2, 3])
        reads = {rng.choice(values) if rng.random() < far else rng.choice(values[-20:]) for _ in range(count)}
        num_bytes = 2 ** rng.randint(16, 24)
        saves = " ".join(s for s in ["r0", "w0"] if rng.random() < 0.4)
        values.append(r.op(rng.choice([0, 0, 1e11]), sorted(reads), [num_bytes], saves))
    return r.trace()
