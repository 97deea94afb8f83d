"""A kernel as the calls of one structure launch it: with its grid, its constants and what the compiler made of it.

To find a compiled kernel again by its forty arguments takes Triton a hundred microseconds a launch. Those of one
structure differ in nothing that it looks at but where tensors begin, of which it asks whether 16 divides the address,
and in the strides of the gradient that comes from above.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor
from triton.compiler import CompiledKernel


class Alignment:
    """Whether 16 divides where each tensor in some tuples begins: one bit for each, or 0 if it divides all. Asked of
    tuples like the first, which have tensors at the same indices."""

    def __init__(self) -> None:
        self._tensors: list[tuple[int, int]] | None = None

    def __call__(self, *groups: tuple[Any, ...]) -> int:
        if self._tensors is None:
            self._tensors = [
                (group_index, index)
                for group_index, group in enumerate(groups)
                for index, x in enumerate(group)
                if isinstance(x, Tensor)
            ]
        together, bits = 0, 1
        for group_index, index in self._tensors:
            at = groups[group_index][index].data_ptr()
            together |= at
            bits = bits << 1 | (at % 16 == 0)
        return bits if together % 16 else 0


class Kernel:
    """Launches a kernel of Triton's.

    Args:
        function: the kernel.
        grid: how many programs, along one to three axes.
        constants: its constants by name, and what the compiler is told (`num_warps`).
    """

    def __init__(self, function: Any, grid: tuple[int, ...], constants: dict[str, Any]) -> None:
        self.function, self.constants = function, constants
        self.grid = (*grid, 1, 1)[:3]
        self._last: tuple[Any, ...] = ()
        self._compiled: dict[Hashable, Any] = {}

    def launch(self, varying: Hashable, *arguments: Any) -> None:
        """Launch it.

        Args:
            varying: all that Triton looks at and that calls of one structure may differ in: the `Alignment` of tensors
                that are not fresh, and strides.
            arguments: all but the constants, in order.
        """
        known = self._compiled.get(varying)
        if known is not None:
            known[self.grid](*arguments, *self._last)
            return
        compiled = self.function[self.grid](*arguments, **self.constants)
        if isinstance(compiled, CompiledKernel):  # Triton's interpreter compiles nothing
            names = self.function.arg_names[len(arguments) :]
            self._last = tuple(self.constants[name] for name in names)
            self._compiled[varying] = compiled
