"""The pictures of the references: drawn by code, so that they belong to nobody."""

import numpy as np
from PIL import Image, ImageDraw


def drawn():
    """Pictures of odd sizes by name; sizes are width × height."""
    return {
        "tall": shapes(37, 91, seed=1),
        "plain": shapes(100, 64, seed=2),
        "odd": shapes(200, 133, seed=3),
        "dot": Image.new("RGB", (1, 1), (200, 30, 90)),
        "wide": shapes(331, 9, seed=4),
    }


def shapes(width, height, seed):
    """A gradient under a few ellipses, rectangles and lines, with a little noise in one half."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    tints = rng.uniform(0, 255, (3, 3))
    planes = [a + (b - a) * x / max(width - 1, 1) + (c - a) * y / max(height - 1, 1) * 0.5 for a, b, c in tints]
    picture = Image.fromarray(np.clip(np.stack(planes, -1), 0, 255).astype(np.uint8), "RGB")
    draw = ImageDraw.Draw(picture)
    for kind in range(9):
        ends = np.sort(rng.uniform(-0.1, 1.1, (2, 2)), axis=0) * (width, height)
        box = [float(v) for v in ends.reshape(-1)]
        colour = tuple(int(v) for v in rng.integers(0, 256, 3))
        if kind % 3 == 0:
            draw.ellipse(box, fill=colour)
        elif kind % 3 == 1:
            draw.rectangle(box, outline=colour, width=2)
        else:
            draw.line(box, fill=colour, width=3)
    pixels = np.asarray(picture).astype(np.int16)
    noise = rng.integers(-12, 13, (height, (width + 1) // 2, 1))
    pixels[:, : (width + 1) // 2] += noise.astype(np.int16)
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8), "RGB")


def computed(width, height):
    """A picture whose bytes follow from their place, so that a test can compute them, too."""
    place = np.arange(height * width * 3, dtype=np.uint64)
    mixed = (place * np.uint64(2654435761) + np.uint64(12345)) & np.uint64(0xFFFFFFFF)
    noise = ((mixed ^ (mixed >> np.uint64(15))) & np.uint64(0xFF)).astype(np.int64)
    rows, columns = np.divmod(np.arange(height * width), width)
    ramp = np.repeat((rows * 5 + columns * 3) % 256, 3)
    blocks = np.repeat(((rows // 7 + columns // 5) % 2) * 255, 3)
    channel = np.tile(np.arange(3), height * width)
    values = np.where(channel == 0, ramp, np.where(channel == 1, blocks, noise))
    return Image.fromarray(values.astype(np.uint8).reshape(height, width, 3), "RGB")
