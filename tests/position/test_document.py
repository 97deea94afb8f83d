"""The snippets under "Testing and Validation" in the document that the project started from, as they are printed."""

from relpos import RelativePositionBias, get_relative_position_index_1d


def test_1d_indices():
    seq_len = 5
    indices = get_relative_position_index_1d(seq_len)
    assert indices.shape == (seq_len, seq_len)
    assert indices.min() == 0
    assert indices.max() == 2 * seq_len - 2


def test_bias_shape():
    rpb = RelativePositionBias(num_heads=4, window_size=(7, 7), bias_type="2d")
    bias = rpb()
    assert bias.shape == (4, 49, 49)


def test_gradients_flow():
    rpb = RelativePositionBias(num_heads=4, window_size=(7, 7), bias_type="2d")
    bias = rpb()
    loss = bias.sum()
    loss.backward()
    assert rpb.relative_position_bias_table.grad is not None
