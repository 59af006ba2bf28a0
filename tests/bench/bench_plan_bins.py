"""How fast samples are packed into bins, and how full the bins get.

Run: python -m tests.bench.bench_plan_bins
"""

import time

import numpy as np

from stages.plan_bins import pack


def lengths(kind: str, num: int, seq_len: int, pad_multiple: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, patches) of `num` samples: log-normal text (median 120) and images as the name says."""
    rng = np.random.default_rng(seed)
    text = np.exp(rng.normal(np.log(120), 0.9, num)).astype(np.int64) + 16
    per_image = np.exp(rng.normal(np.log(480), 0.6, num)).astype(np.int64)
    images = {"text": 0, "one image": 1, "mixed": rng.integers(0, 4, num)}[kind] * per_image
    room = seq_len - text.clip(max=seq_len // 2)
    images = np.minimum(images, room)
    tokens = text.clip(max=seq_len // 2) + images
    return -(-tokens // pad_multiple) * pad_multiple, 4 * images


def main() -> None:
    print("| lengths | samples | seq_len | max_patches | pad | bins | fill | lower bound | seconds |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for kind in ("text", "one image", "mixed"):
        for num, seq_len, max_patches, pad in (
            (100_000, 8192, 32_768, 1),
            (100_000, 8192, 32_768, 16),
            (100_000, 8192, 16_384, 1),
            (100_000, 2048, 8192, 1),
            (100_000, 131_072, 524_288, 1),
            (1_000_000, 8192, 32_768, 16),
        ):
            tokens, patches = lengths(kind, num, seq_len, pad, seed=0)
            patches = patches.clip(max=max_patches)
            started = time.perf_counter()
            bins = pack(tokens, patches, seq_len, max_patches)
            seconds = time.perf_counter() - started
            count = int(bins.max()) + 1
            bound = max(-(-int(tokens.sum()) // seq_len), -(-int(patches.sum()) // max_patches))
            fill = max(tokens.sum() / (count * seq_len), patches.sum() / (count * max_patches))
            print(
                f"| {kind} | {num:,} | {seq_len:,} | {max_patches:,} | {pad} | {count:,} | {fill:.4f} | {bound:,} "
                f"| {seconds:.2f} |"
            )


if __name__ == "__main__":
    main()
