"""Lists the parameter shapes of well-known models without a model library."""

Shape = tuple[int, ...]


def gpt2_124m() -> list[Shape]:
    """Returns the shapes of GPT-2 small: 148 tensors, 124.4 M parameters."""
    return _gpt(width=768, depth=12, length=1024)


def gpt3_xl() -> list[Shape]:
    """Returns the shapes of GPT-3 XL with GPT-2's vocabulary: 292 tensors, 1.3 B parameters."""
    return _gpt(width=2048, depth=24, length=2048)


def _gpt(width: int, depth: int, length: int) -> list[Shape]:
    shapes: list[Shape] = [(50257, width), (length, width)]
    for _ in range(depth):
        shapes += [(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,)]
        shapes += [(width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [*shapes, (width,), (width,)]


def resnet50() -> list[Shape]:
    """Returns the shapes of ResNet-50: 161 tensors, 25.6 M parameters."""
    shapes: list[Shape] = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for out, inner, kernel in ((width, channels, 1), (width, width, 3), (4 * width, width, 1)):
                shapes += [(out, inner, kernel, kernel), (out,), (out,)]
            if block == 0:
                shapes += [(4 * width, channels, 1, 1), (4 * width,), (4 * width,)]
            channels = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def many_small() -> list[Shape]:
    """Returns 10,000 shapes of 64 elements."""
    return [(64,)] * 10_000
