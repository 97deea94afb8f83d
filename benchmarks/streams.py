"""The memory of a process that trains on a stream of shards, while it reads many times what it holds.

    python benchmarks/streams.py [--gigabytes 20] [--shard 100]

A shard of random images of 256 x 256 is written to a temporary folder, and has other names by hard links, so that 20 GB
need the disk of one. The images are BMP: decoding takes least, and most bytes are read in a second. All shards are read
once, in batches of 64. It prints the resident memory after each tenth, and the images and MB in a second.
"""

from __future__ import annotations

import argparse
import io
import os
import tarfile
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from relpos.data import from_wds

BATCH = 64


def write_shard(path: Path, megabytes: int) -> int:
    """Write a shard, and return its number of samples."""
    random, count, size = np.random.default_rng(0), 0, 0
    with tarfile.open(path, "w") as archive:
        while size < megabytes * 10**6:
            file = io.BytesIO()
            Image.fromarray(random.integers(0, 256, (256, 256, 3), dtype=np.uint8)).save(file, "bmp")
            for field, content in (("bmp", file.getvalue()), ("cls", str(count % 10).encode())):
                member = tarfile.TarInfo(f"{count:06}.{field}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
                size += member.size
            count += 1
    return count


def resident() -> float:
    """The memory of this process, in MiB."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=20.0)
    parser.add_argument("--shard", type=int, default=100, help="MB of a shard")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="relpos-streams-") as folder:
        first = Path(folder, "0000.tar")
        each, shards = write_shard(first, given.shard), max(1, round(given.gigabytes * 1000 / given.shard))
        for number in range(1, shards):
            os.link(first, Path(folder, f"{number:04}.tar"))
        size = first.stat().st_size * shards
        task = from_wds(f"{folder}/{{0000..{shards - 1:04}}}.tar", streaming=True, survey=50 * shards)
        print(f"{shards} shards, {each * shards:,} samples, {size / 1e9:.1f} GB; {resident():.0f} MiB after the survey")
        batches, start, steps, highest = task.batches(BATCH, 0), time.perf_counter(), 0, 0.0
        total = int(each * shards * 0.7 / BATCH)  # about 30% are held out
        for step in range(total):
            next(batches)
            steps += 1
            highest = max(highest, resident())
            if step % max(1, total // 10) == 0:
                print(f"  {step / total:4.0%}  {resident():.0f} MiB", flush=True)
        seconds = time.perf_counter() - start
        read = steps / total * size
        speed = f"{steps * BATCH / seconds:.0f} training images and {read / 1e6 / seconds:.0f} MB a second"
        print(f"highest {highest:.0f} MiB; {speed}")


if __name__ == "__main__":
    main()
