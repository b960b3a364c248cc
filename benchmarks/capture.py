"""`python -m benchmarks.capture`: the table of captured models.

One thread: ratios of work, not of what a second core happens to be busy with.
"""

from __future__ import annotations

import torch

from benchmarks import bench_capture
from benchmarks.harness import print_table

if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread")
    print_table("Captured models: GPT-2 small, 20 tokens, CPU, float32", bench_capture.lines())
