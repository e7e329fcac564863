"""torchao's NVFP4 quantiser in a process of its own: pickled arrays in on stdin, pickled answers out on stdout.

transformers imports torchao wherever it finds it, and complains on stderr that its CUDA libraries do not load. So it lies
in a folder that only this process looks into (``make install``).
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

REFERENCE = Path(sys.prefix) / "reference"


def main() -> None:
    """Answer until stdin ends: x (heads, tokens, head_dim) float32 -> packed numbers, scales as bytes, numbers read back."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever is printed on import goes to stderr
    sys.path.insert(0, str(REFERENCE))
    import torch
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, nvfp4_quantize

    while True:
        try:
            x = torch.from_numpy(pickle.load(sys.stdin.buffer))
        except EOFError:
            return
        scales, packed = nvfp4_quantize(x.contiguous())
        scales = scales.view(*x.shape[:2], -1)
        read = NVFP4Tensor(packed, scales, 16, torch.float32).dequantize(torch.float32)
        pickle.dump((packed.numpy(), scales.view(torch.uint8).numpy(), read.numpy()), answers)
        answers.flush()


if __name__ == "__main__":
    main()
