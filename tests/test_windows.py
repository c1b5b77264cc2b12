"""Windows are inclusive at both ends and hold together with the policy."""

import numpy as np
import pytest

import checks
import oracle
import te_mixed_jax as te

EIGHT = [1] * 8
D8_PROBE = [0, 0.5, 1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9]


def test_D6_window_seven_zero_equals_causal(implementation):
    expected = [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5]
    for policy in (oracle.window(oracle.FULL, 7, 0), oracle.CAUSAL):
        checks.assert_probe(
            expected, q_ids=EIGHT, policies=(policy,), implementation=implementation
        )


def test_D6_window_zero_zero_gives_v(implementation):
    checks.assert_probe(
        range(8),
        q_ids=EIGHT,
        policies=(oracle.window(oracle.FULL, 0, 0),),
        implementation=implementation,
    )


@pytest.mark.parametrize(
    ("left", "right", "row", "keys"),
    [(2, 0, 5, (3, 4, 5)), (1, 2, 4, (3, 4, 5, 6))],
)
def test_D6_both_ends_are_inside(implementation, left, right, row, keys):
    """Each key in the window moves the mean, and no other one does."""
    data = checks.random_data(1, 8, 8)
    policies = (oracle.window(oracle.FULL, left, right),)
    got = checks.check(
        [EIGHT], policies=policies, implementation=implementation, data=data
    )
    mask = oracle.mask([EIGHT], [EIGHT], policies=policies)
    assert tuple(np.flatnonzero(mask[0, row])) == keys
    assert got.out[0, row].any()


def test_D7_a_window_by_itself_counts(implementation):
    """Without ids and with the full policy, the window still cuts."""
    means, _ = checks.probe_call(
        *(64, 64),
        policy=te.FULL.with_window(0, 31),
        implementation=implementation,
    )
    np.testing.assert_allclose(
        means[[0, 10, 40, 63]], [15.5, 25.5, 51.5, 63], rtol=1e-6
    )


def test_D7_window_zero_zero_of_64_tokens(implementation):
    probed = checks.probe_call(
        *(64, 64), policy=te.FULL.with_window(0, 0), implementation=implementation
    )
    checks.assert_means(probed, range(64))


@pytest.mark.parametrize(
    "policy",
    [
        oracle.window(oracle.FULL, 4, 0),
        oracle.window(oracle.CAUSAL, 4, 0),
        oracle.window(oracle.CAUSAL, 4, 7),
    ],
    ids=["full (4,0)", "causal (4,0)", "causal (4,7)"],
)
def test_D8_right_bound_and_causality(implementation, policy):
    """A window must not reopen the future, nor a right bound of 0 be unbounded."""
    checks.assert_probe(
        D8_PROBE, q_ids=[1] * 12, policies=(policy,), implementation=implementation
    )


def test_D8_gradients(implementation):
    checks.check(
        [[1] * 12],
        policies=(oracle.window(oracle.CAUSAL, 4, 7),),
        implementation=implementation,
    )


D11_CASES = [((2, 0), [3, 4, 5, 6]), ((-1, -1), [2, 2.5, 3, 3.5])]


@pytest.mark.parametrize(("window", "expected"), D11_CASES)
def test_D11_continuing_with_bottom_right(implementation, window, expected):
    checks.assert_probe(
        expected,
        q_ids=[1] * 4,
        kv_ids=EIGHT,
        policies=(oracle.window(oracle.BOTTOM_RIGHT, *window),),
        implementation=implementation,
    )


@pytest.mark.parametrize(("window", "expected"), D11_CASES)
def test_D11_continuing_with_positions(implementation, window, expected):
    checks.assert_probe(
        expected,
        q_ids=[1] * 4,
        kv_ids=EIGHT,
        q_pos=[4, 5, 6, 7],
        kv_pos=list(range(8)),
        policies=(oracle.window(oracle.CAUSAL, *window),),
        implementation=implementation,
    )


@pytest.mark.parametrize(("window", "expected"), D11_CASES)
def test_D11_equals_the_last_rows_of_the_whole_call(implementation, window, expected):
    means, _ = checks.probe(
        EIGHT,
        policies=(oracle.window(oracle.CAUSAL, *window),),
        implementation=implementation,
    )
    np.testing.assert_allclose(means[4:], expected, rtol=1e-6)


def test_D11_one_query(implementation):
    checks.assert_probe(
        [6],
        q_ids=[1],
        kv_ids=EIGHT,
        policies=(oracle.window(oracle.BOTTOM_RIGHT, 2, 0),),
        implementation=implementation,
    )


def test_window_beyond_int32_is_unbounded_or_exact(implementation):
    """q - left must not wrap around for a large left."""
    big = 2**31 - 1
    checks.assert_probe(
        [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5],
        q_ids=EIGHT,
        policies=(oracle.window(oracle.CAUSAL, big, big),),
        implementation=implementation,
    )


def test_windows_at_positions_near_the_ends_of_int32(implementation):
    """Range ends saturate instead of wrapping."""
    top = 2**31 - 1
    for start in (top - 7, -top - 1):
        positions = [start + i for i in range(8)]
        checks.assert_probe(
            [1.5, 2, 2.5, 3.5, 4.5, 5, 5.5, 6],
            q_ids=EIGHT,
            q_pos=positions,
            kv_pos=positions,
            policies=(oracle.window(oracle.FULL, 2, 3),),
            implementation=implementation,
        )
