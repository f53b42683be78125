"""Write the 1,797 handwritten digits that scikit-learn ships as PNG files.

Four in five are for training.

    python write_digits.py DIRECTORY

makes DIRECTORY/train and DIRECTORY/test with files `<index>_<label>.png` of 8 x 8 grey pixels.
DIRECTORY may be a mounted volume or the folder that a local Files API server serves. Running it
again changes nothing.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

HELD_OUT_EVERY = 5
"""Each fifth file is held out: 360 of 1,797."""


def main(directory: Path) -> None:
    digits = load_digits()
    for split in ("train", "test"):
        (directory / split).mkdir(parents=True, exist_ok=True)
    for index, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        split = "test" if index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 else "train"
        path = directory / split / f"{index:04d}_{label}.png"
        if path.exists():
            continue
        # Pixels are counts from 0 to 16.
        image = Image.fromarray(np.rint(pixels * 255 / 16).astype(np.uint8), mode="L")
        encoded = io.BytesIO()
        image.save(encoded, format="PNG")
        path.write_bytes(encoded.getvalue())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: write_digits.py DIRECTORY")
    main(Path(sys.argv[1]))
