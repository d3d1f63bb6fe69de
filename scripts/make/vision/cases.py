"""Small cases for the tests of the repository: sizes with the checksum of their pixel values, and files of all kinds with their
pixels."""

import io
import json
import random

import numpy as np
import xxhash
from PIL import Image, ImageOps

from vision import pictures

LIMITS = [(65536, 16777216), (2048, 12288), (3136, 50176), (1024, 1024), (8192, 200000)]


def pixel_cases(new_processor):
    """Sizes, limits, the grid and the checksum of all pixel values."""
    draw, cases = random.Random(7), []
    sizes = [(1, 1), (1, 200), (200, 1), (48, 80), (32, 32), (64, 32), (31, 33), (500, 3), (257, 255), (640, 480)]
    sizes += [(draw.randint(1, 400), draw.randint(1, 400)) for _ in range(30)]
    for number, (width, height) in enumerate(sizes):
        least, most = LIMITS[number % len(LIMITS)]
        if max(width, height) > 200 * min(width, height):
            continue
        for patch, resample in ((16, 3),) if number % 4 else ((16, 3), (14, 2)):
            processor = new_processor({"shortest_edge": least, "longest_edge": most}, patch, resample)
            made = processor(images=[pictures.computed(width, height)], return_tensors="np")
            values = np.ascontiguousarray(made["pixel_values"], dtype="<f4")
            cases.append({
                "width": width, "height": height, "least": least, "most": most, "patch": patch, "resample": resample,
                "grid": made["image_grid_thw"][0].tolist(), "xxh3": f"{xxhash.xxh3_64(values.tobytes()).intdigest():016x}",
            })
    return cases


def files():
    """Files of all kinds by name: their bytes, and the pixels of Pillow, turned by EXIF and on white."""
    picture = pictures.shapes(23, 17, seed=9)
    alpha = Image.fromarray((np.mgrid[0:17, 0:23][1] * 11 % 256).astype(np.uint8), "L")
    clear = picture.copy()
    clear.putalpha(alpha)
    grey, grey_alpha = picture.convert("L"), Image.merge("LA", (picture.convert("L"), alpha))
    palette = picture.quantize(16)
    deep = Image.fromarray((np.asarray(grey).astype(np.uint16) * 257 + 100).clip(0, 65535).astype(np.uint16))
    saved = {
        "rgb.png": (picture, {}), "rgba.png": (clear, {}), "grey.png": (grey, {}), "grey-alpha.png": (grey_alpha, {}),
        "palette.png": (palette, {}), "palette-clear.png": (palette, {"transparency": 3}), "one-bit.png": (grey.convert("1"), {}),
        "lossless.webp": (picture, {"lossless": True}), "clear.webp": (clear, {"lossless": True, "exact": True}),
        "lossy.webp": (picture, {"quality": 80}), "whole.jpg": (picture, {"quality": 90, "subsampling": 0}),
        "halved.jpg": (picture, {"quality": 90, "subsampling": 2}), "grey.jpg": (grey, {"quality": 90}),
        "progressive.jpg": (picture, {"quality": 90, "progressive": True}), "cmyk.jpg": (picture.convert("CMYK"), {"quality": 95}),
        "still.gif": (palette, {}), "clear.gif": (palette, {"transparency": 3}),
    }
    made = {}
    for name, (image, more) in saved.items():
        out = io.BytesIO()
        image.save(out, format={"jpg": "JPEG"}.get(name[-3:], name.rsplit(".", 1)[1].upper()), **more)
        made[name] = out.getvalue()
    others = [pictures.shapes(23, 17, seed=seed) for seed in (10, 11)]
    for kind in ("gif", "webp"):
        out, more = io.BytesIO(), {"lossless": True} if kind == "webp" else {}
        first = palette if kind == "gif" else picture
        first.save(out, format=kind.upper(), save_all=True, append_images=others, duration=50, **more)
        made[f"moving.{kind}"] = out.getvalue()
    for turn in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = turn
        for kind, more in (("JPEG", {"quality": 95, "subsampling": 0}), ("PNG", {}), ("WEBP", {"lossless": True})):
            out = io.BytesIO()
            picture.save(out, format=kind, exif=exif, **more)
            made[f"turned-{turn}.{ {'JPEG': 'jpg', 'PNG': 'png', 'WEBP': 'webp'}[kind]}"] = out.getvalue()
    deep_out = io.BytesIO()
    deep.save(deep_out, format="PNG")
    made["deep-grey.png"] = deep_out.getvalue()
    return {name: (data, pixels_of(name, data, deep)) for name, data in made.items()}


def pixels_of(name, data, deep):
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    if name == "deep-grey.png":  # Pillow clips these where it should scale them
        image = Image.fromarray((np.asarray(deep) >> 8).astype(np.uint8), "L")
    if image.mode in ("RGBA", "LA") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image)
    return image.convert("RGB")


def write(folder, new_processor):
    (folder / "files").mkdir(parents=True, exist_ok=True)
    rows = ",\n".join(json.dumps(case) for case in pixel_cases(new_processor))
    (folder / "pixels.json").write_text(f"[\n{rows}\n]\n")
    listed = {}
    for name, (data, image) in files().items():
        (folder / "files" / name).write_bytes(data)
        listed[name] = {"width": image.width, "height": image.height, "rgb": image.tobytes().hex()}
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(case)}" for name, case in listed.items())
    (folder / "files.json").write_text("{\n" + rows + "\n}\n")
