"""The schema of `results.json`: a dataclass for each object in it, each field with its meaning.

`python recipes/results_page.py` writes `docs/results.md` from them.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, dataclass, field
from typing import Annotated, Any, Literal

SCHEMA_VERSION = 2
What = Literal["position", "attention", "norm", "optimizer"]


@dataclass(frozen=True)
class RecipeRecord:
    """Every number of a training recipe."""

    steps: Annotated[int, "of training"]
    batch_size: Annotated[int, "inputs of a step"]
    learning_rate: Annotated[float, "the highest"]
    warmup_steps: Annotated[int, "steps of linear warmup to that rate; then a cosine to 0"]
    position_learning_rate_multiplier: Annotated[float, "factor of the learning rate for position parameters"]
    position_init_std: Annotated[float, "standard deviation of the initial position parameters"]
    weight_decay: Annotated[float, "decoupled, on matrices except those of position"]
    gradient_clip: Annotated[float, "largest norm of the gradient"]
    embed_dim: Annotated[int, "width of the model"]
    depth: Annotated[int, "blocks"]
    num_heads: Annotated[int, "attention heads"]
    mlp_ratio: Annotated[float, "width of an MLP, as a multiple of the model's"]
    shared_position: Annotated[bool, "whether all blocks share one mechanism"]
    optimizer: Annotated[Literal["adamw", "lion", "sophia-g", "sophia-h"], "its name"]
    hessian_every: Annotated[int, "steps between estimates of the Hessian, if the optimizer uses them"]
    attention: Annotated[str, "kind of attention"]
    num_kv_heads: Annotated[int | None, "heads of keys and values; null for as many as attention heads"]
    norm: Annotated[str, "norm of tokens"]
    qk_norm: Annotated[str | None, "norm of queries and keys"]
    global_pool: Annotated[str | None, "for images: how tokens become one vector"] = None
    class_token: Annotated[bool | None, "for images: whether there is one"] = None
    mlp: Annotated[str | None, "for text: kind of MLP"] = None
    window: Annotated[
        list[int | None] | None, "for text: tokens that a token sees, a window for each layer in turn; null for all"
    ] = None


@dataclass(frozen=True)
class SettingsRecord:
    """The settings of a comparison. Two comparisons with equal settings and environment are the same one."""

    task: Annotated[str, "the task's name"]
    positions: Annotated[list[str], "names of mechanisms; with `what`, that of all models"]
    seeds: Annotated[int, "a count: seeds 0 to seeds - 1"]
    quick: Annotated[bool, "a short run to see that everything works"]
    device: Annotated[str, "`cpu`, `cuda`"]
    precision: Annotated[str, "`float32`, `bf16-mixed`, `fp16-mixed`"]
    recipe: Annotated[RecipeRecord, "of all runs"]
    threads: Annotated[int, "per process of a training run"] = 1
    devices_per_trial: Annotated[int | None, "processes of a training run, if several"] = None
    timing_threads: Annotated[int, "for timing steps: all cores, or `OMP_NUM_THREADS`"] = 1
    task_options: Annotated[dict[str, Any], "what made the task, with a fingerprint"] = field(default_factory=dict)
    what: Annotated[What, "what is compared: `position`, `attention`, `norm`, `optimizer`"] = "position"
    choices: Annotated[list[str], "names of those that are compared"] = field(default_factory=list)
    model: Annotated[
        str | None, "`timm:NAME`, `torchvision:NAME`, `hf:FOLDER` or your own `build`, with a fingerprint"
    ] = None
    step: Annotated[str | None, "your own training step, with a fingerprint"] = None
    evaluate: Annotated[str | None, "your own measurement, with a fingerprint"] = None
    changes: Annotated[dict[str, Any], "requested changes of the recipe, except steps"] = field(default_factory=dict)
    better: Annotated[Literal["higher", "lower"] | None, "for your own figures: `higher`, `lower`"] = None
    given: Annotated[
        dict[str, str], "`model`, `step`, `evaluate`, mechanisms of files as typed; not part of the comparison"
    ] = field(default_factory=dict)
    sources: Annotated[
        dict[str, str], "mechanisms that are not relpos's: their file or package, with a fingerprint"
    ] = field(default_factory=dict)


@dataclass(frozen=True)
class Environment:
    """Versions and hardware."""

    relpos: Annotated[str, "version"]
    torch: Annotated[str, "version"]
    python: Annotated[str, "version"]
    platform: Annotated[str, "operating system"]
    processor: Annotated[str, "its name"]
    cores: Annotated[int, "of the machine"]
    device: Annotated[str, "the GPU's name, or `cpu`"]
    host: Annotated[str | None, "the machine's name, of a run on another machine"] = None

    @property
    def kind(self) -> str:
        """The processor or card that computes: times of different ones are not comparable."""
        return self.processor if self.device == "cpu" else self.device


@dataclass(frozen=True)
class ProbeRecord:
    """One question to a trained model. Probes of a group make one curve."""

    id: Annotated[str, "`test`, `shift/1`, `canvas/20/anywhere`, `rotation/90`, `length/512`"]
    group: Annotated[str, "`test`, `shift`, `canvas`, `rotation`; of text `test`, `length`"]
    label: Annotated[str, "a few words"]
    x: Annotated[float, "value on the horizontal axis: pixels shifted, canvas side, degrees, bytes read at once"]
    description: Annotated[str, "one sentence"]
    variant: Annotated[str | None, "distinguishes curves of a group: `centred`, `anywhere`, `zoomed`"] = None
    image_size: Annotated[list[int] | None, "of images: `[rows, columns]`"] = None
    trials: Annotated[int | None, "of images: placements of each test image"] = None
    length: Annotated[int | None, "of text: tokens read at once"] = None


@dataclass(frozen=True)
class TaskRecord:
    """The data, and the probes in the order they are shown."""

    name: Annotated[str, "the task's name"]
    title: Annotated[str, "a few words"]
    description: Annotated[str, "what the data are and what was done to them"]
    sizes: Annotated[dict[str, int], "images or bytes for `train`, `validation`, `test`"]
    probes: Annotated[list[ProbeRecord], "the first is the plain test"]
    kind: Annotated[Literal["images", "text", "other"], "kind of data"] = "images"
    classes: Annotated[list[str], "of images: labels"] = field(default_factory=list)
    channels: Annotated[int | None, "of images"] = None
    image_size: Annotated[list[int] | None, "of images: `[rows, columns]` in training"] = None
    patch_size: Annotated[list[int] | None, "of images: `[rows, columns]`"] = None
    skipped: Annotated[list[dict[str, str]], "broken images left out: `path`, `reason`"] = field(default_factory=list)
    ignored: Annotated[list[str], "files in a class's folder that are no images"] = field(default_factory=list)
    length: Annotated[int | None, "of text: length of inputs in training, in tokens (bytes by default)"] = None
    blocks: Annotated[int | None, "of text: blocks of the longest length in the test text"] = None
    tokenizer: Annotated[str | None, "of text: its name; absent for bytes"] = None
    vocabulary: Annotated[int | None, "of text: different tokens of a model; absent for 256 bytes"] = None
    documents: Annotated[str | None, "of text: `packed` if attention stays within documents"] = None
    bytes_per_token: Annotated[float | None, "of text: their mean; absent for bytes"] = None
    largest_class: Annotated[float | None, "of images: share of the test images in the largest class"] = None


@dataclass(frozen=True)
class MechanismRecord:
    """What is compared: a position mechanism, or a choice of attention, norm or optimizer."""

    name: Annotated[str, "its name in the command"]
    title: Annotated[str, "in words"]
    summary: Annotated[str, "what it is and what to expect"]
    source: Annotated[str, "paper and section"]
    growth: Annotated[list[str], "rules by which it extrapolates to another size"]
    family: Annotated[str, "`none`, `absolute`, `bias`, `rotation`, `vectors`, `sum`, `other`"] = "other"


@dataclass(frozen=True)
class Parameters:
    """How many parameters a model has."""

    total: Annotated[int, "all"]
    position: Annotated[int, "those of position"]
    parts: Annotated[dict[str, int], "by part of the model"]


@dataclass(frozen=True)
class CurveRecord:
    """Training over steps. It ends before the step at which a run diverged."""

    step: Annotated[list[int], "steps of loss and rate"]
    loss: Annotated[list[float], "mean over the steps since the previous entry, in nats"]
    rate: Annotated[list[float], "learning rate"]
    validation_step: Annotated[list[int], "steps of validation"]
    validation: Annotated[list[float], "accuracy, bits per byte, or the figure"]


@dataclass(frozen=True)
class Divergence:
    """Where a loss or a gradient became nan or inf. Training stopped there, and nothing was measured."""

    step: Annotated[int, "counted from 1"]
    rate: Annotated[float, "its learning rate"]
    what: Annotated[Literal["loss", "gradient"], "what was not finite"]
    value: Annotated[str, "`nan`, `inf` or `-inf`"]


@dataclass(frozen=True)
class Metric:
    """One probe by one growth rule: an accuracy or bits per byte, or the reason why there is none."""

    probe: Annotated[str, "its id"]
    growth: Annotated[str | None, "the rule; null at the trained size, or if there is none"]
    accuracy: Annotated[float | None, "of images: 0 to 1"] = None
    trials: Annotated[int | None, "of images: placements of each"] = None
    correct: Annotated[list[int] | None, "of images: how many placements of each were classified right"] = None
    bits_per_byte: Annotated[float | None, "of text"] = None
    values: Annotated[
        list[float] | None,
        "of text: of each block, its bits by the mean bytes of a block; a quick run reads two. Of figures: each unit",
    ] = None
    by_place: Annotated[list[float] | None, "of text: for 32 equal parts of an input, first tokens to last"] = None
    reason: Annotated[str | None, "why there is no figure"] = None
    figure: Annotated[float | None, "your own: the mean of `values`, which has one for each unit"] = None


@dataclass(frozen=True)
class Learned:
    """A bias over offsets (query - key), or the similarity of position vectors."""

    kind: Annotated[Literal["bias", "embedding"], "which of the two"]
    layer: Annotated[str | int | None, "of a bias: `shared` or an index"] = None
    axes: Annotated[int | None, "of a bias: 1 or 2"] = None
    along: Annotated[str | None, "of a bias on one axis: `raster order`, `bytes` or `tokens`"] = None
    offsets: Annotated[list[list[int]] | None, "of a bias: `[lowest, highest]` along each axis"] = None
    values: Annotated[Any, "of a bias: of each head, over offsets from the lowest to the highest"] = None
    prefix: Annotated[Any, "of a bias: of each head prefix to token, token to prefix, prefix to prefix"] = None
    grid: Annotated[list[int] | None, "of vectors: `[rows, columns]`, or `[positions]`"] = None
    every: Annotated[int | None, "of vectors on a sequence: distance between them, in positions"] = None
    similarity: Annotated[Any, "of vectors: cosine of each pair, after subtracting their mean"] = None


@dataclass(frozen=True)
class Attention:
    """The attention of one patch, for up to three test images."""

    image: Annotated[Any, "for each, H x W grey values from 0 to 1"]
    label: Annotated[list[str], "class of each"]
    predicted: Annotated[list[str], "class that the model predicts"]
    query: Annotated[list[int], "`[row, column]` of the patch whose attention is shown"]
    grid: Annotated[list[int], "`[rows, columns]` of patches"]
    maps: Annotated[Any, "`maps[image][layer][head][row][column]`; with prefix tokens a map sums to less than 1"]


@dataclass(frozen=True)
class Sample:
    """A language model's greedy continuation of the first test block."""

    prompt: Annotated[str, "its input"]
    within: Annotated[str, "up to the trained length"]
    beyond: Annotated[str, "beyond it, with the first growth rule"]


@dataclass(frozen=True)
class Run:
    """One training run with all measurements of its model."""

    id: Annotated[str, "`relative_2d--recipe--seed0`; unique, also the file's name"]
    position: Annotated[str, "the mechanism"]
    seed: Annotated[int, "of data order and initialisation"]
    variant: Annotated[str, "`recipe`, or `x1` for position parameters at the learning rate of the rest"]
    position_learning_rate_multiplier: Annotated[float, "of this run"]
    parameters: Annotated[Parameters, "of its model"]
    curve: Annotated[CurveRecord, "of its training"]
    train_seconds: Annotated[float, "wall time of training"]
    threads: Annotated[int, "of the run"]
    metrics: Annotated[list[Metric], "empty if it diverged"]
    settings: Annotated[dict[str, Any], "all settings of this run, including `recipe`"]
    peak_memory_mib: Annotated[float | None, "of its process, above the size before the model was built"] = None
    validation: Annotated[float | None, "at the end"] = None
    choice: Annotated[str | None, "the choice, if position is not compared"] = None
    diverged: Annotated[Divergence | None, "only if it diverged"] = None
    learned: Annotated[list[Learned], "the trained position"] = field(default_factory=list)
    attention: Annotated[Attention | None, "of images"] = None
    sample: Annotated[Sample | None, "of text"] = None
    environment: Annotated[Environment | None, "versions and hardware of the run"] = None

    @property
    def name(self) -> str:
        """The mechanism or choice."""
        return self.position if self.choice is None else self.choice


@dataclass(frozen=True)
class Time:
    """Milliseconds of a training step: forward, backward, optimizer; everything interleaved in one process."""

    median: Annotated[float, "over repeats"]
    low: Annotated[float, "quartile"]
    high: Annotated[float, "quartile"]
    repeats: Annotated[int, "how many"]


@dataclass(frozen=True)
class Cost:
    """A training step at one number of tokens: the task's own, then those nearest to 1,024 and 4,096."""

    tokens: Annotated[int, "of an input"]
    batch_size: Annotated[int, "inputs"]
    depth: Annotated[int | None, "blocks of the model; null for your own model"]
    backend: Annotated[str, "the engine of attention"]
    position: Annotated[str | None, "the mechanism"] = None
    choice: Annotated[str | None, "the choice, if position is not compared"] = None
    threads: Annotated[int | None, "of the timing"] = None
    step_ms: Annotated[Time | None, "its time"] = None
    ratio: Annotated[float | None, "median over rounds of its time divided by that of `none`, or the first choice"] = (
        None
    )
    peak_memory_mib: Annotated[float | None, "in a separate process; with one seed, at the largest size only"] = None
    state_per_parameter: Annotated[float | None, "numbers that the optimizer stores per parameter, with `what`"] = None
    reason: Annotated[str | None, "why there is no time"] = None

    @property
    def name(self) -> str:
        """The mechanism or choice."""
        return self.choice or self.position or ""


@dataclass(frozen=True)
class Failure:
    """Work without a record: its workers died each time, or it raised an error. The same command tries again."""

    id: Annotated[str, "of the run, `memory--NAME--SIZE` or `timing`"]
    reason: Annotated[str, "the last line of its error"]
    name: Annotated[str | None, "the mechanism or choice, of a training run"] = None
    seed: Annotated[int | None, "of a training run"] = None
    variant: Annotated[str | None, "of a training run"] = None


@dataclass(frozen=True)
class Results:
    """One comparison, finished or not."""

    schema_version: Annotated[int, f"{SCHEMA_VERSION}"]
    settings: Annotated[SettingsRecord, "what was requested"]
    environment: Annotated[Environment, "versions and hardware"]
    task: Annotated[TaskRecord, "the data and the probes"]
    mechanisms: Annotated[list[MechanismRecord], "what is compared, in the requested order"]
    records: Annotated[list[Run], "training runs"]
    costs: Annotated[list[Cost], "one for each choice and number of tokens"]
    failed: Annotated[list[Failure], "what other machines could not do"] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """The names compared, in the requested order."""
        return [one.name for one in self.mechanisms]

    def mechanism(self, name: str) -> MechanismRecord:
        """The mechanism or choice of this name."""
        return next(one for one in self.mechanisms if one.name == name)

    def runs(self, name: str, variant: str = "recipe", *, diverged: bool = False) -> list[Run]:
        """The measured or the diverged runs of one name, sorted by seed."""
        found = [run for run in self.records if run.name == name and run.variant == variant]
        return sorted((run for run in found if (run.diverged is not None) == diverged), key=lambda run: run.seed)

    def failures(self, name: str, variant: str = "recipe") -> list[Failure]:
        """The failed training runs of one name, sorted by seed."""
        found = [one for one in self.failed if one.name == name and one.variant == variant]
        return sorted(found, key=lambda one: -1 if one.seed is None else one.seed)

    def probes(self, group: str) -> list[ProbeRecord]:
        """The probes of a group."""
        return [probe for probe in self.task.probes if probe.group == group]

    def cost(self, name: str, tokens: int) -> Cost | None:
        """The cost of a step by name and number of tokens."""
        return next((one for one in self.costs if one.name == name and one.tokens == tokens), None)

    @property
    def token_counts(self) -> list[int]:
        """The numbers of tokens with costs, ascending."""
        return sorted({one.tokens for one in self.costs})


def is_required(one: Field[Any]) -> bool:
    """Whether a field is always present."""
    return one.default is MISSING and one.default_factory is MISSING
