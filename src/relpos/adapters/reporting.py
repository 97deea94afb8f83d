"""What a retrofit or a replacement did, as data and as text."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from relpos.adapters.common.borders import NEVER
from relpos.adapters.common.kinds import replaced_classes
from relpos.adapters.common.verification import Verdict
from relpos.adapters.replacements.frozen import PEFT
from relpos.core import Coordinates
from relpos.position.base.preset import SCHEDULE
from relpos_command.visible import visible


@dataclass(frozen=True)
class Swapped:
    """A module that relpos now computes: its name in the model, its class, its architecture."""

    module: str
    path: str
    architecture: str


@dataclass(frozen=True)
class Left:
    """A module whose relative position stays as published, and why."""

    module: str
    path: str
    reason: str


@dataclass(frozen=True)
class RetrofitReport:
    """What `relpos.retrofit` did to a model. Print it for the text.

    Attributes:
        border: tokens from which relpos computes, as asked; None for those of the kind of device.
        kind: the kind of device on which the model was.
    """

    model: str
    versions: dict[str, str]
    replaced: tuple[Swapped, ...]
    left: tuple[Left, ...]
    verified: tuple[Verdict, ...]
    border: int | None
    kind: str = "cpu"

    def __str__(self) -> str:
        libraries = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        lines = [f"{self.model} ({libraries})"]
        for path, count in Counter(one.path for one in self.replaced).items():
            first = next(one.module for one in self.replaced if one.path == path)
            lines.append(
                f"  replaced  {_short(path)} x {count}, from {first or 'the model itself'}; {self._from(path)}"
            )
        for (path, reason), count in Counter((one.path, one.reason) for one in self.left).items():
            lines.append(f"  left      {_short(path)} x {count}: {reason}")
        lines += [f"  verified  {verdict}" for verdict in self.verified]
        if not self.verified:
            lines.append("  verified  nothing: verify=False")
        return visible("\n".join(lines), keep="\n")

    def _from(self, path: str) -> str:
        if self.border is not None:
            return f"relpos computes from {self.border} tokens on, as asked"
        mixin = replaced_classes()[path][1].mixin
        borders = mixin.borders_on(self.kind)
        training, other = (
            "never" if tokens >= NEVER else f"from {tokens} tokens on" for tokens in (borders.training, borders.forward)
        )
        if training == other == "never":
            return "as published, which was faster wherever it was timed; border=0 saves its memory"
        said = f"relpos computes {training}" if training == other else f"relpos trains {training}, infers {other}"
        return said if self.kind != "cuda" else f"{said}, an estimate: relpos retrofit times it on this GPU"


@dataclass(frozen=True)
class ResizeReport:
    """What `relpos.resize_position` did to a model. Print it for the text.

    Attributes:
        model: its class.
        rules: the rule of each mechanism, by its name in the model; without those that have none.
        coordinates: what each of them is now for: a window in a Swin.
        image_size: pixels of timm's model, (height, width); None in other models.
    """

    model: str
    rules: dict[str, str]
    coordinates: dict[str, Coordinates]
    image_size: tuple[int, int] | None = None

    def __str__(self) -> str:
        lines = [self.model]
        if self.image_size is not None:
            lines.append(f"  images    {' x '.join(f'{pixels:,}' for pixels in self.image_size)} pixels")
        alike: dict[str, list[str]] = {}
        for name, rule in self.rules.items():
            alike.setdefault(f"{rule}, {self.coordinates[name]}", []).append(name)
        for what, names in alike.items():
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            lines.append(f"  position  {names[0]}{others}: {what}")
        return visible("\n".join(lines), keep="\n")


@dataclass(frozen=True)
class OwnPosition:
    """A position mechanism of the model itself: the name of its module or parameter, and a description.

    Attributes:
        parameters: names in the model of its learned parameters.
    """

    name: str
    what: str
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReplacementReport:
    """What `relpos.replace_position` did to a model. Print it for the text.

    Attributes:
        model: its class's name. position: the mechanism's name.
        own: the model's own position mechanisms.
        layers: which layers now have the mechanism, in words.
        shared: whether one mechanism serves all layers of a stack.
        kept: True for position "own": the model keeps its own position, and nothing was changed.
        restored: modules that were retrofitted and are now as published or replaced.
        learns: whether the mechanisms have trainable parameters.
        adapted: whether the model already had PEFT adapters.
    """

    model: str
    position: str
    own: tuple[OwnPosition, ...]
    layers: tuple[str, ...]
    shared: bool
    kept: bool
    restored: tuple[str, ...] = ()
    learns: bool = False
    adapted: bool = False

    def __str__(self) -> str:
        lines = [self.model]
        if self.kept:
            text = "the model keeps its own position; nothing was changed"
            lines.append(f"  position  {self.position}: {text}")
            kept = [f"{one.name}: {one.what}" for one in self.own] or ["nothing: the model has no position of its own"]
            lines += [f"  kept      {one}" for one in kept]
            return visible("\n".join(lines), keep="\n")
        if self.restored:
            lines.append(f"  restored  {len(self.restored)} retrofitted modules, from {self.restored[0]}")
        lines += [f"  off       {one.name}: {one.what}" for one in self.own]
        if not self.own:
            lines.append("  off       nothing: the model has no position of its own")
        count = "one per layer" if not self.shared else "one per entry" if SCHEDULE in self.position else "one for all"
        lines += [f"  position  {self.position}, {count}: {layers}" for layers in self.layers]
        if self.learns and self.adapted:
            lines.append(f"  adapters  PEFT's came first and are saved without it: replace first, then adapt, {PEFT}")
        elif self.learns:
            lines.append(f"  adapters  PEFT freezes it at its initial values, unless you pass {PEFT}")
        return visible("\n".join(lines), keep="\n")


def _short(path: str) -> str:
    return path.rpartition(".")[2]
