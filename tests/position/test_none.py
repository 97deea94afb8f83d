"""No position: attention alone."""

from conformance.suite import LibrarySuite
from relpos import NoPosition, Sequence, Site


class TestNoPosition(LibrarySuite):
    translation_invariant = True
    preset = "none"

    def build(self, site: Site) -> NoPosition:
        return NoPosition()


def test_says_nothing() -> None:
    assert len(NoPosition().terms(Sequence(3))) == 0
    assert not NoPosition().acts_in_attention
