"""Random windows from one raw token file, shuffled over eight workers, one line a window."""

import hashlib
import sys
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

NUM_TOKENS = 2048 * 1024
CONTEXT = 2048


class TokenWindows(Dataset):
    """Windows of one raw token file on the mount."""

    def __init__(self, path, ctx=CONTEXT):
        self.tokens = np.memmap(path, dtype=np.uint16, mode="r")
        self.ctx = ctx

    def __len__(self):
        return (len(self.tokens) - 1) // self.ctx

    def __getitem__(self, i):
        start = i * self.ctx
        window = self.tokens[start : start + self.ctx + 1]
        window = torch.from_numpy(window.astype(np.int64))
        return window[:-1], window[1:]


def main(path: Path) -> None:
    if not path.exists():
        tokens = np.random.default_rng(0).integers(0, 1 << 16, NUM_TOKENS, dtype=np.uint16)
        path.write_bytes(tokens.tobytes())
    torch.manual_seed(3)
    loader = DataLoader(TokenWindows(str(path)), batch_size=8, shuffle=True, num_workers=8)
    for tokens, targets in loader:
        print(hashlib.sha256(tokens.numpy().tobytes() + targets.numpy().tobytes()).hexdigest())


if __name__ == "__main__":
    main(Path(sys.argv[1]) / "train.bin")
