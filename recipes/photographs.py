"""Photographs as a folder of classes, and the page of what was compared on them inside timm's ViT.

    python recipes/photographs.py make photos/
    relpos compare --model timm:test_vit --data photos/ ... --out runs/photographs      the command is on the page
    python recipes/photographs.py page runs/photographs                                 writes docs/results-timm.md

The photographs are the 100 faces of 25 x 25 pixels that come with scikit-image (a part of Labeled Faces in the Wild),
each turned by 0, 90, 180 and 270 degrees: the class is which way is up (Gidaris et al. 2018). Where in the picture eyes
and mouth are decides it. No person is in two splits: 50 are to train on, 10 for validation, 40 to test.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import skimage.data
from PIL import Image

TURNS = ("upright", "left", "upside down", "right")
"""Quarter turns counter-clockwise."""
SPLITS = {"train": 50, "validation": 10, "test": 40}


def make(folder: Path) -> None:
    """Write the folder; the same files every time."""
    faces = skimage.data.lfw_subset()[:100]  # those after them are no faces
    order = iter(np.random.default_rng(0).permutation(len(faces)))
    for split, count in SPLITS.items():
        for number in (next(order) for _ in range(count)):
            face = (faces[number] * 255).round().astype(np.uint8)
            for turns, name in enumerate(TURNS):
                file = folder / split / name / f"{number:03}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(np.ascontiguousarray(np.rot90(face, turns))).save(file)
