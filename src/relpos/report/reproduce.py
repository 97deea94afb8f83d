"""A comparison's run as a Python program: the same model, trained by a plain loop with relpos's public API.

It contains the recipe's settings as numbers: initial standard deviation and learning rate of the position parameters,
warm-up and cosine, clipping, seed and the order of batches. With the same machine and threads, it reaches the same
figure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relpos.results import Results, ResultsError, plain

_MODEL = ("embed_dim", "depth", "num_heads", "mlp_ratio", "shared_position", "position_init_std")
_IMAGE_MODEL, _TEXT_MODEL = (*_MODEL, "global_pool", "class_token"), (*_MODEL, "mlp")
_USUAL = {"attention": "full", "num_kv_heads": None, "norm": None, "qk_norm": None}
"""Defaults of the model; arguments equal to them are left out."""
_USUAL_NORM = {"images": "layernorm", "text": "rmsnorm"}
_OPTIMIZERS = {
    "adamw": "torch.optim.AdamW(groups, fused=True)",
    "lion": "relpos.Lion(groups)",
    "sophia-g": "relpos.Sophia(groups, rho=0.05)",
    "sophia-h": "relpos.Sophia(groups, rho=0.01)",
}
_AUTOCAST = {"bf16-mixed": "torch.bfloat16", "fp16-mixed": "torch.float16"}


@dataclass(frozen=True)
class _Printed:
    """Everything read from the results."""

    name: str
    position: str
    seed: int
    recipe: Mapping[str, Any]
    task: Mapping[str, Any]
    task_name: str
    task_options: Mapping[str, Any]
    device: str
    precision: str
    threads: int
    quick: bool
    is_packed: bool
    files: tuple[str, ...]

    @classmethod
    def of(cls, results: Results, name: str) -> _Printed:
        """The first finished run of a mechanism or choice by the recipe."""
        finished = results.runs(name)
        if not finished:
            raise ResultsError(f"expected a finished run of {name}; got none: choose another, or run the rest")
        record, settings = finished[0], results.settings
        return cls(
            name=name,
            position=record.position,
            seed=record.seed,
            recipe=record.settings["recipe"],
            task=plain(results.task),
            task_name=settings.task,
            task_options=settings.task_options,
            device=settings.device,
            precision=settings.precision,
            threads=settings.threads,
            quick=settings.quick,
            is_packed=results.task.documents == "packed",
            files=tuple(settings.given[part] for part in re.split("[+~]", record.position) if part in settings.given),
        )


def reproduce(results: Results, position: str) -> str:
    """A Python program that trains one model of a comparison without the command, and prints its figure.

    Args:
        results: the result of `load_results`.
        position: the name of the mechanism, or of the choice if something else is compared.

    Raises:
        ResultsError: no run of this name has finished.
    """
    run = _Printed.of(results, position)
    recipe, estimating = run.recipe, run.recipe["optimizer"].startswith("sophia")
    options = f", {dict(run.task_options)!r}" if run.task_options else ""
    steps, warmup = recipe["steps"], min(recipe["warmup_steps"], recipe["steps"])
    lines = [
        f"# {run.name}, seed {run.seed}, on {run.task['title']!r}, as relpos compare trains it.",
        "import math",
        "",
        "import torch",
        "",
        "import relpos",
        "from relpos.data import find_task",
        f"from relpos.train import {'estimate_hessian, ' if estimating else ''}measured",
        "",
        *(f"relpos.position.from_file({file!r})" for file in run.files),
        f"STEPS, WARMUP, RATE = {steps}, {warmup}, {recipe['learning_rate']}",
        "",
        f"torch.set_num_threads({run.threads})",
        f"device = torch.device({run.device!r})",
        f"task = find_task({run.task_name!r}{options})",
        f"torch.manual_seed({run.seed})",
        *_model(run),
        "groups = relpos.optim.parameter_groups(",
        f"    model, learning_rate=RATE, weight_decay={recipe['weight_decay']},",
        f"    position_learning_rate_multiplier={recipe['position_learning_rate_multiplier']},",
        ")",
        f"optimizer = {_OPTIMIZERS[recipe['optimizer']]}",
        *(["scaler = torch.amp.GradScaler(device.type)"] if run.precision == "fp16-mixed" else []),
        "",
        f"batches = task.batches({recipe['batch_size']}, seed={run.seed})",
        "for step in range(STEPS):",
        "    rate = RATE * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / max(1, STEPS - WARMUP)))  # a cosine to 0",
        "    if step < WARMUP:",
        "        rate = RATE * (step + 1) / WARMUP",
        "    for group in optimizer.param_groups:",
        '        group["lr"] = rate * group["multiplier"]',
        *_batch(run),
        *_estimate(recipe, estimating),
        *_step(run),
        "",
        "model.eval()",
        f"print({_measured(run)})",
    ]
    return "\n".join(lines) + "\n"


def _measured(run: _Printed) -> str:
    """Code that measures the plain test; a quick run on text reads only the first blocks."""
    if run.task["kind"] == "images":
        return 'measured(model, task, task.probes[0], device)["accuracy"]'
    quick = ", quick=True" if run.quick else ""
    return f'measured(model, task, task.probes[0], device{quick})["bits_per_byte"]'


def _model(run: _Printed) -> list[str]:
    """Code that builds the model."""
    task, recipe = run.task, run.recipe
    if task["kind"] == "images":
        kind = "VisionTransformer"
        sizes: dict[str, Any] = {"img_size": tuple(task["image_size"]), "patch_size": tuple(task["patch_size"])}
        sizes |= {"in_chans": task["channels"], "num_classes": len(task["classes"])}
    else:
        kind, sizes = "LanguageModel", {"vocab_size": task.get("vocabulary") or 256, "context": task["length"]}
    names = _IMAGE_MODEL if task["kind"] == "images" else _TEXT_MODEL
    usual = _USUAL | {"norm": _USUAL_NORM[task["kind"]]}
    unusual = {name: recipe[name] for name, value in usual.items() if recipe[name] != value}
    unusual |= {"window": window} if (window := recipe.get("window")) else {}
    return [
        f"model = relpos.{kind}(",
        f"    {_arguments(sizes)},",
        f"    position={run.position!r},",
        *(f"    {_arguments(some)}," for some in _few({name: recipe[name] for name in names} | unusual)),
        ").to(device)",
    ]


def _few(arguments: Mapping[str, Any], at_once: int = 4) -> list[dict[str, Any]]:
    """Split arguments into groups that fit on a line."""
    items = list(arguments.items())
    return [dict(items[start : start + at_once]) for start in range(0, len(items), at_once)]


def _arguments(named: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in named.items())


def _batch(run: _Printed) -> list[str]:
    """Code that takes a batch; packed documents have segments beside their tokens."""
    if not run.is_packed:
        return ["    inputs, classes = (x.to(device) for x in next(batches))"]
    return [
        "    inputs, classes = next(batches)",
        "    inputs, classes = type(inputs)(*(x.to(device) for x in inputs)), classes.to(device)",
    ]


def _estimate(recipe: Mapping[str, Any], estimating: bool) -> list[str]:
    """Code for Sophia's Hessian estimate every few steps."""
    if not estimating:
        return []
    return [
        f"    if step % {recipe['hessian_every']} == 0:",
        f"        estimate_hessian({recipe['optimizer']!r}, optimizer, model, inputs, classes)",
    ]


def _step(run: _Printed) -> list[str]:
    """Code for loss, gradient, clipping and the optimizer's step."""
    dtype, clip = _AUTOCAST.get(run.precision), run.recipe["gradient_clip"]
    each = "classes" if run.task["kind"] == "images" else "classes.flatten()"
    called = "model(inputs.tokens, segments=inputs.segments)" if run.is_packed else "model(inputs)"
    scores = called if run.task["kind"] == "images" else f"{called}.flatten(0, 1)"
    forward = [f"    loss = torch.nn.functional.cross_entropy({scores}, {each})"]
    if dtype is not None:
        forward = [f"    with torch.autocast(device.type, {dtype}):", f"    {forward[0]}"]
    clipped = f"    torch.nn.utils.clip_grad_norm_(model.parameters(), {clip})"
    if run.precision == "fp16-mixed":
        back = ["    scaler.scale(loss).backward()", "    scaler.unscale_(optimizer)", clipped]
        back += ["    scaler.step(optimizer)", "    scaler.update()"]
    else:
        back = ["    loss.backward()", clipped, "    optimizer.step()"]
    return [*forward, *back, "    optimizer.zero_grad()"]
