"""The conformance suite of position mechanisms, for those of this library and of any other package.

    from relpos.testing import MechanismSuite, oracle

A test subclasses `MechanismSuite`, whose docstring says what it asks for. `oracle` has attention and positions as
loops, `assert_close` the rule by which results are compared with them. Needs pytest: `pip install "relpos[test]"`.
relpos imports this package only when `relpos.testing` is accessed.
"""

try:
    import pytest
except ModuleNotFoundError as error:
    if error.name != "pytest":
        raise
    raise ModuleNotFoundError(
        'relpos.testing needs pytest; install it with: pip install "relpos[test]"', name="pytest"
    ) from None

# Modules with assertions, registered before their import: pytest explains their failures like those of a test.
pytest.register_assert_rewrite(
    *(
        f"relpos.testing.{name}"
        for name in (
            "base",
            "calls",
            "decoding_tests",
            "functional_tests",
            "invariance_tests",
            "mask_tests",
            "module_tests",
            "oracle",
            "sum_tests",
            "tolerance",
            "value_tests",
        )
    )
)

from relpos.testing import oracle  # noqa: E402
from relpos.testing.base import SuiteRun  # noqa: E402
from relpos.testing.cases import CASES, SuiteCase  # noqa: E402
from relpos.testing.orders import Orders, in_orders  # noqa: E402
from relpos.testing.suite import MechanismSuite  # noqa: E402
from relpos.testing.tolerance import assert_close, yardstick_dtype  # noqa: E402

__all__ = [
    "CASES",
    "MechanismSuite",
    "Orders",
    "SuiteCase",
    "SuiteRun",
    "assert_close",
    "in_orders",
    "oracle",
    "yardstick_dtype",
]
