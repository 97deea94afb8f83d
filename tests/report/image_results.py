"""Made-up comparisons with the shape of real ones: what the report's tests, and its looks, are tried on."""

import itertools
from dataclasses import asdict
from typing import Any

import numpy as np

from relpos.train import ImageRecipe

ENVIRONMENT = {
    "relpos": "0.1.0", "torch": "2.13.0", "python": "3.11.9", "platform": "Linux x86_64", "processor": "A processor",
    "cores": 2, "device": "cpu",
}  # fmt: skip

IMAGES = 360
RECIPE = asdict(ImageRecipe(steps=400))
ELEVEN = (
    "none", "learned", "sinusoidal_2d", "relative_1d", "relative_2d", "t5", "alibi", "rotary_1d", "rotary_2d",
    "learned+relative_2d", "rotary_2d+relative_2d",
)  # fmt: skip
GROWTH = {
    "none": ["as is"],
    "learned": ["interpolated"],
    "relative_2d": ["interpolated", "clipped"],
    "relative_1d": [],
    "learned+relative_2d": ["interpolated", "clipped"],
    "rotary_2d+relative_2d": ["interpolated", "clipped"],
    **{name: ["as is"] for name in ("sinusoidal_2d", "t5", "alibi", "rotary_1d", "rotary_2d")},
}
PARAMETERS = {
    "none": 0, "learned": 3072, "relative_2d": 900, "relative_1d": 508, "t5": 128, "learned+relative_2d": 3972,
    "rotary_2d+relative_2d": 900,
}  # fmt: skip


def make_figures(test: float, one: float, two: float, three: float, **canvas: float) -> dict[str, Any]:
    rules = {rule.replace("_", " "): figure for rule, figure in canvas.items()}
    return {"test": test, "shift/1": one, "shift/2": two, "shift/3": three, "canvas": rules}


ACCURACY = {
    "none": make_figures(0.547, 0.53, 0.567, 0.53, as_is=0.433),
    "learned": make_figures(0.951, 0.286, 0.122, 0.105, interpolated=0.139),
    "relative_2d": make_figures(0.949, 0.916, 0.919, 0.894, interpolated=0.522, clipped=0.75),
    "relative_1d": make_figures(0.93, 0.72, 0.66, 0.58),
    "sinusoidal_2d": make_figures(0.93, 0.41, 0.2, 0.15, as_is=0.13),
    "t5": make_figures(0.9, 0.81, 0.76, 0.7, as_is=0.5),
    "alibi": make_figures(0.545, 0.54, 0.56, 0.53, as_is=0.44),
    "rotary_1d": make_figures(0.94, 0.85, 0.8, 0.7, as_is=0.31),
    "rotary_2d": make_figures(0.955, 0.94, 0.92, 0.9, as_is=0.72),
    "learned+relative_2d": make_figures(0.965, 0.6, 0.35, 0.22, interpolated=0.2, clipped=0.24),
    "rotary_2d+relative_2d": make_figures(0.972, 0.95, 0.935, 0.91, interpolated=0.6, clipped=0.78),
}
FAMILY = {
    "none": "none",
    **dict.fromkeys(("learned", "sinusoidal_2d"), "absolute"),
    **dict.fromkeys(("rotary_1d", "rotary_2d"), "rotation"),
}


def make_results(
    names: tuple[str, ...] = ("none", "learned", "relative_2d"),
    *,
    seeds: int = 3,
    quick: bool = False,
    plain: bool = True,
    images: int = IMAGES,
    accuracy: dict[str, Any] | None = None,
    growth: dict[str, list[str]] | None = None,
) -> dict[str, Any]:
    """A whole results.json. `accuracy` and `growth` replace the figures of the mechanisms they name."""
    random = np.random.default_rng(7)
    figures = {**ACCURACY, **(accuracy or {})}
    rules = {**GROWTH, **(growth or {})}
    probes = make_probes()
    difficulty = random.normal(size=images)
    records = []
    for name in names:
        variants = ("recipe", "x1") if plain and PARAMETERS.get(name, 0) else ("recipe",)
        for variant, seed in itertools.product(variants, range(seeds)):
            records.append(make_record(name, seed, variant, probes, figures[name], rules[name], difficulty, random))
    return {
        "schema_version": 2,
        "settings": {
            "task": "digits", "positions": list(names), "seeds": seeds, "quick": quick, "device": "cpu",
            "precision": "float32", "threads": 1, "recipe": dict(RECIPE),
        },
        "environment": dict(ENVIRONMENT),
        "task": {
            "name": "digits", "title": "Handwritten digits",
            "description": "1,797 real handwritten digits of 8 x 8 pixels, placed on a canvas of 16 x 16.",
            "classes": [str(digit) for digit in range(10)], "channels": 1, "image_size": [16, 16],
            "patch_size": [2, 2], "sizes": {"train": 1257, "validation": 180, "test": images}, "probes": probes,
        },
        "mechanisms": [
            {
                "name": name, "title": name.replace("_", " "), "summary": "A mechanism made up for a test.",
                "source": "Vaswani et al. 2017, arXiv:1706.03762", "growth": rules[name],
                "family": "sum" if "+" in name else FAMILY.get(name, "bias"),
            }
            for name in names
        ],
        "records": records,
        "costs": make_costs(names),
    }  # fmt: skip


def make_probes() -> list[dict[str, Any]]:
    found = [make_probe("test", "test", "test", None, 0, 16, "The test images, placed as in training.")]
    for shift in (1, 2, 3):
        text = f"The digit moved {shift} pixels beyond where training put it."
        found.append(make_probe(f"shift/{shift}", "shift", f"shift {shift} px", None, shift, 16, text))
    for side in (20, 24):
        for variant in ("centred", "anywhere", "zoomed"):
            text = f"A canvas of {side} x {side}, the digit {variant}."
            name = f"canvas/{side}/{variant}"
            found.append(make_probe(name, "canvas", f"{side} x {side}, {variant}", variant, side, side, text))
    return found


def make_probe(
    name: str, group: str, label: str, variant: str | None, x: int, side: int, description: str
) -> dict[str, Any]:
    return {
        "id": name, "group": group, "label": label, "variant": variant, "x": x, "image_size": [side, side],
        "trials": 4, "description": description,
    }  # fmt: skip


def make_record(
    name: str,
    seed: int,
    variant: str,
    probes: list[dict[str, Any]],
    accuracy: dict[str, Any],
    rules: list[str],
    difficulty: np.ndarray,
    random: np.random.Generator,
) -> dict[str, Any]:
    metrics: list[dict[str, Any]] = []
    factor = 0.8 if variant == "x1" and name == "relative_2d" else 1.0
    for probe in probes:
        if probe["group"] != "canvas":
            metrics.append(score(probe, None, factor * accuracy[probe["id"]], difficulty, random))
            continue
        for rule in rules:
            easier = {"centred": 1.12, "anywhere": 1.0, "zoomed": 0.8}[probe["variant"]]
            smaller = 1.0 if probe["x"] == 20 else 0.8
            share = min(1.0, accuracy["canvas"][rule] * easier * smaller)
            metrics.append(score(probe, rule, share, difficulty, random))
        if not rules:
            reason = "no rule for a larger grid"
            metrics.append({"probe": probe["id"], "growth": None, "accuracy": None, "reason": reason})
    steps = np.arange(10, 401, 10)
    reach = accuracy["test"]
    loss = 2.4 * np.exp(-steps / (60 + 20 * seed)) + 2.4 * (1 - reach) + 0.03 * random.random(len(steps))
    validation = reach * (1 - np.exp(-steps[3::4] / 70)) + 0.01 * random.normal(size=len(steps[3::4]))
    own = PARAMETERS.get(name, 0)
    return {
        "id": f"{name}--{'x10' if variant == 'recipe' else 'x1'}--seed{seed}", "position": name, "seed": seed,
        "position_learning_rate_multiplier": 10 if variant == "recipe" else 1, "variant": variant,
        "parameters": {
            "total": 60000 + own, "position": own,
            "parts": {"patch embedding": 240, "attention": 28224, "mlp": 28080, "position": own},
        },
        "curve": {
            "step": steps.tolist(), "loss": loss.tolist(),
            "rate": (3e-3 * np.cos(steps / 400 * np.pi / 2)).tolist(), "validation_step": steps[3::4].tolist(),
            "validation": np.clip(validation, 0, 1).tolist(),
        },
        "validation": float(reach), "train_seconds": 8.5, "threads": 1, "peak_memory_mib": 210.0,
        "settings": {"recipe": RECIPE}, "metrics": metrics, "learned": make_learned(name, random),
        "attention": make_attention(random),
    }  # fmt: skip


def score(
    probe: dict[str, Any], rule: str | None, accuracy: float, difficulty: np.ndarray, random: np.random.Generator
) -> dict[str, Any]:
    """Outcomes with about this accuracy, hard images hard for everyone, seeds a little apart."""
    trials = probe["trials"]
    if accuracy in (0.0, 1.0):
        correct = np.full(len(difficulty), int(trials * accuracy))
    else:
        near = np.clip(accuracy + 0.01 * random.normal(), 0.01, 0.99)
        cut = np.quantile(difficulty, near)
        chance = 1 / (1 + np.exp(-12 * (cut - difficulty)))
        correct = random.binomial(trials, chance)
    share = float(correct.mean() / trials)
    return {"probe": probe["id"], "growth": rule, "accuracy": share, "trials": trials, "correct": correct.tolist()}


def set_share(
    results: dict[str, Any], name: str, probe: str, by_seed: tuple[float, ...], variant: str = "recipe"
) -> None:
    """Let the model of each seed get the first so many images right in every trial, and no others."""
    for record in results["records"]:
        if (record["position"], record["variant"]) != (name, variant):
            continue
        for metric in record["metrics"]:
            if metric["probe"] == probe and metric["growth"] is None:
                images, trials = len(metric["correct"]), metric["trials"]
                right = round(by_seed[record["seed"]] * images)
                metric["correct"] = [trials] * right + [0] * (images - right)
                metric["accuracy"] = right / images


def make_learned(name: str, random: np.random.Generator) -> list[dict[str, Any]]:
    axis = np.arange(-7, 8)
    rows, columns = np.meshgrid(axis, axis, indexing="ij")
    if name == "learned+relative_2d":
        return make_learned("learned", random) + make_learned("relative_2d", random)
    if name in ("relative_2d", "alibi", "rotary_2d+relative_2d"):
        directions = [(1.5, 0), (-1.5, 0), (0, 2), (0, -2)]
        heads = [
            2.5 * np.exp(-((rows - r) ** 2 + (columns - c) ** 2) / 4) - 0.8 + 0.15 * random.normal(size=(15, 15))
            for r, c in directions
        ]
        values = [head.tolist() for head in heads]
        return [make_bias(2, [[-7, 7], [-7, 7]], values)]
    if name in ("relative_1d", "t5"):
        offsets = np.arange(-63, 64)
        values = [(np.cos(offsets / (2 + head)) * np.exp(-abs(offsets) / 25)).tolist() for head in range(4)]
        return [make_bias(1, [[-63, 63]], values)]
    if name in ("learned", "sinusoidal_2d"):
        place = np.stack(np.meshgrid(np.arange(8), np.arange(8), indexing="ij"), -1).reshape(64, 2)
        distance = np.square(place[:, None] - place[None]).sum(-1)
        similarity = 1.2 * np.exp(-distance / 6) - 0.2
        return [{"kind": "embedding", "grid": [8, 8], "similarity": similarity.tolist()}]
    return []


def make_bias(axes: int, offsets: list[list[int]], values: list[Any]) -> dict[str, Any]:
    return {"kind": "bias", "layer": "shared", "axes": axes, "offsets": offsets, "values": values, "prefix": None}


def make_attention(random: np.random.Generator) -> dict[str, Any]:
    images, maps = [], []
    for number in range(3):
        image = np.zeros((16, 16))
        angle = np.linspace(0, 2 * np.pi, 60)
        image[(8 + 3.5 * np.sin(angle)).astype(int), (8 + (1.5 + number) * np.cos(angle)).astype(int)] = 1.0
        images.append((0.8 * image).round(3).tolist())
        scores = random.normal(size=(3, 4, 8, 8)) + 2 * image.reshape(8, 2, 8, 2).mean((1, 3))
        weights = np.exp(scores) / np.exp(scores).sum((-2, -1), keepdims=True)
        maps.append(weights.tolist())
    grid = {"query": [4, 3], "grid": [8, 8]}
    return {"image": images, "label": ["0", "3", "8"], "predicted": ["0", "3", "6"], **grid, "maps": maps}


def make_costs(names: tuple[str, ...]) -> list[dict[str, Any]]:
    costs: list[dict[str, Any]] = []
    dearer = {"none": 1.0, "learned": 1.01, "sinusoidal_2d": 1.01, "relative_2d": 1.12, "relative_1d": 1.09}
    dearer |= {"alibi": 1.03, "rotary_1d": 1.07, "rotary_2d": 1.08, "rotary_2d+relative_2d": 1.2}
    for tokens, milliseconds, memory in ((64, 14.0, 40.0), (1024, 210.0, 420.0), (4096, 2900.0, 5200.0)):
        for name in names:
            ratio = dearer.get(name, 1.05) ** (1 + tokens / 2048)
            shared = {"position": name, "tokens": tokens, "batch_size": 1, "depth": 3, "backend": "sdpa"}
            if tokens == 4096 and name == "relative_1d":
                none = {"step_ms": None, "ratio": None, "peak_memory_mib": None, "reason": "would need more memory"}
                costs.append({**shared, **none})
                continue
            middle = milliseconds * ratio
            step = {"median": middle, "low": 0.97 * middle, "high": 1.04 * middle, "repeats": 12}
            costs.append({**shared, "step_ms": step, "ratio": ratio, "peak_memory_mib": memory * ratio**2})
    return costs


def diverge(results: dict[str, Any], *names: str, seeds: tuple[int, ...] = (0, 1, 2, 3)) -> dict[str, Any]:
    """Let the runs of these with these seeds diverge."""
    for record in results["records"]:
        if record.get("choice", record["position"]) in names and record["seed"] in seeds:
            record |= {"metrics": [], "learned": [], "validation": None, "attention": None, "sample": None}
            record["curve"] = {key: [] for key in ("step", "loss", "rate", "validation_step", "validation")}
            record["diverged"] = {"step": 12, "rate": 0.003, "what": "loss", "value": "nan"}
    return results
