"""How figures are written: units, signs, and ends of an interval that tell each other apart."""

from relpos.report.measure import ACCURACY, BITS
from relpos.report.statistics import Interval


def ends(low: float, high: float) -> Interval:
    return Interval((low + high) / 2, low, high, images=360, seeds=(0,), covers_seeds=False)


def test_the_ends_of_an_interval_are_written_as_finely_as_tells_them_apart() -> None:
    assert ACCURACY.bounds(ends(0.9851, 0.9869)) == "98.5 to 98.7", "not 99 to 99"
    assert ACCURACY.bounds(ends(0.041, 0.149)) == "4 to 15"
    assert BITS.bounds(ends(2.104, 2.146)) == "2.10 to 2.15"
    assert BITS.bounds(ends(2.1041, 2.1043)) == "2.104 to 2.104"
