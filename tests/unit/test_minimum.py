"""The moment at which the gates are closed, for curves of live bytes as training makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.minimum import SETTLED_SECONDS, MinimumWatch

MIB = 1 << 20
PARAMETERS = 1000 * MIB
PEAK = 4000 * MIB
Curve = Callable[[float], int]


def sawtooth(period: float, low: int = PARAMETERS, high: int = PEAK, lowest: float = 0.1) -> Curve:
    """Rises in the forward pass, falls in the backward pass, and rests for a `lowest` part."""

    def live(now: float) -> int:
        part = now % period / period
        if part < lowest:
            return low
        middle = (1 + lowest) / 2
        up = part < middle
        share = (part - lowest) / (middle - lowest) if up else (1 - part) / (1 - middle)
        return int(low + (high - low) * share)

    return live


def times(begin: float, end: float, step: float = 0.001) -> Iterator[float]:
    for i in range(int((end - begin) / step) + 1):
        yield begin + i * step


def closed_at(curve: Curve, watch: MinimumWatch, first: float, begin: float) -> float:
    """Sample each millisecond from `first` on; the time at which the watch closes the gates."""
    for now in times(first, begin):
        assert not watch.sample(now, curve(now))
    watch.begin(begin)
    for now in times(begin, begin + 100):
        if watch.sample(now, curve(now)):
            return now
    raise AssertionError("never closed")


@pytest.mark.parametrize("period", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("phase", [0.0, 0.25, 0.5, 0.75, 0.95])
def test_a_known_sawtooth_is_met_at_its_foot(period: float, phase: float) -> None:
    curve = sawtooth(period)
    begin = 5 + phase * period
    at = closed_at(curve, MinimumWatch(), 3.0, begin)
    assert curve(at) <= 1.05 * PARAMETERS
    assert at - begin <= period


@pytest.mark.parametrize("rest", [0.001, 0.02, 0.029])
def test_who_is_at_the_foot_may_rise_at_any_moment_and_is_met_when_it_comes_down(
    rest: float,
) -> None:
    curve = sawtooth(0.3)
    at = closed_at(curve, MinimumWatch(), 3.0, 6 + rest)
    assert curve(6 + rest) == PARAMETERS and 6.3 < at < 6.31
    assert curve(at) == PARAMETERS


@pytest.mark.parametrize("wait", [0.0, 0.1, 0.5, 2.0])
def test_a_step_longer_than_the_wait_is_taken_where_it_is_if_none_was_seen(wait: float) -> None:
    curve = sawtooth(8.0)
    at = closed_at(curve, MinimumWatch(wait=wait), 8.2, 11.0)
    assert at == pytest.approx(11.0 + wait, abs=0.002)
    assert curve(at) > 2 * PARAMETERS


@pytest.mark.parametrize("period", [0.7, 2.0, 3.2])
@pytest.mark.parametrize("phase", [0.3, 0.6, 0.95])
def test_a_step_longer_than_the_wait_is_waited_for_once_one_was_seen(
    period: float, phase: float
) -> None:
    curve = sawtooth(period)
    watch = MinimumWatch()
    begin = (2 + phase) * period
    at = closed_at(curve, watch, 0.2 * period, begin)
    assert curve(at) <= 1.05 * PARAMETERS and at - begin < period
    assert period * 0.9 < watch.patience < period * 1.2  # it may begin before it is watched
    assert MinimumWatch(wait=0.0).patience == 0.0


def test_a_long_step_is_not_waited_for() -> None:
    watch = MinimumWatch()
    closed_at(sawtooth(8.0), watch, 0.0, 9.0)
    assert watch.patience == 3.0


def test_the_start_of_a_job_is_no_step() -> None:
    steps = sawtooth(1.0)
    watch = MinimumWatch()
    closed_at(lambda now: 0 if now < 1 else steps(now), watch, 0.0, 14.5)
    assert watch.patience == pytest.approx(1.0 + SETTLED_SECONDS)


def test_a_job_that_was_never_seen_is_watched_first() -> None:
    curve = sawtooth(0.1)
    watch = MinimumWatch()
    at = closed_at(curve, watch, 5.05, 5.05)  # at its peak
    assert at - 5.05 == pytest.approx(0.5, abs=0.11)
    assert watch.smallest == PARAMETERS


@pytest.mark.parametrize("live", [0, 1, PEAK])
def test_a_flat_job_does_not_wait_once_it_is_known(live: int) -> None:
    at = closed_at(lambda _now: live, MinimumWatch(), 1.0, 2.0)
    assert at == pytest.approx(2.0)


def test_the_time_before_the_model_was_there_is_forgotten() -> None:
    steps = sawtooth(0.1)

    def curve(now: float) -> int:
        return 0 if now < 1 else steps(now)

    early = closed_at(curve, MinimumWatch(), 0.5, 3.05)
    assert early == pytest.approx(3.55, abs=0.002)
    late = closed_at(curve, MinimumWatch(), 0.5, 12.05)
    assert late <= 12.05 + 0.1
    assert curve(late) <= 1.05 * PARAMETERS


def in_step(now: float, optimizer: int) -> tuple[int, bool]:
    """Live bytes of a rank that steps each 0.3 s, and whether its parameters are the next ones."""
    part = now % 0.3
    for until, live in ((0.03, PEAK), (0.08, 2 * PARAMETERS), (0.083, PARAMETERS)):
        if part < until:
            return live, False
    # One of few kernels is launched at once, and takes no memory of its own.
    stepping = part < (0.098 if optimizer else 0.084)
    return PARAMETERS + optimizer * stepping, not stepping


@pytest.mark.parametrize("optimizer", [0, PARAMETERS // 4])
@pytest.mark.parametrize("apart", [0.0, 0.002, 0.006, 0.015])
def test_ranks_are_stopped_behind_the_steps_of_their_optimizers(
    apart: float, optimizer: int
) -> None:
    def both(now: float) -> int:
        return in_step(now, optimizer)[0] + in_step(now + apart, optimizer)[0]

    for begin in times(3.0, 3.3, 0.007):
        at = closed_at(both, MinimumWatch(), 1.0, begin)
        cut = at + 0.005
        assert in_step(cut, optimizer)[1] and in_step(cut + apart, optimizer)[1], begin


def test_a_long_low_point_is_forgotten_after_some_steps() -> None:
    steps = sawtooth(0.02)
    curve = lambda now: PARAMETERS if 3 < now < 4 else steps(now)  # noqa: E731
    at = closed_at(curve, MinimumWatch(), 1.0, 4.3)
    assert curve(at) == PARAMETERS and at < 4.33


def test_a_job_that_grows_for_ever_is_taken_when_the_wait_is_over() -> None:
    at = closed_at(lambda now: int(now * PEAK), MinimumWatch(), 1.0, 5.0)
    assert at == pytest.approx(5.5, abs=0.002)


def test_the_tolerance_says_how_near_is_near() -> None:
    curve = sawtooth(0.2, lowest=0.0)
    for tolerance in (0.0, 0.05, 0.5):
        watch = MinimumWatch(tolerance=tolerance)
        at = closed_at(curve, watch, 3.0, 5.1)
        assert watch.smallest is not None
        assert curve(at) <= watch.smallest * (1 + tolerance)
    assert curve(closed_at(curve, MinimumWatch(tolerance=0.5), 3.0, 5.1)) > 1.2 * PARAMETERS


def test_a_wait_may_begin_again() -> None:
    watch = MinimumWatch(wait=1.0)
    assert watch.deadline is None
    for began in (3.0, 5.0):
        watch.begin(began)
        assert watch.deadline == began + 1.0
        assert not watch.sample(began + 0.5, 1 << 60)
        assert watch.sample(began + 1.0, 1 << 60)
        assert watch.sample(began + 1.1, 7)


@given(
    steps=st.lists(st.tuples(st.floats(0.001, 3), st.integers(0, 100)), min_size=1, max_size=80),
    recent=st.floats(0.1, 5),
)
def test_the_smallest_is_that_of_the_recent_samples(
    steps: list[tuple[float, int]], recent: float
) -> None:
    watch = MinimumWatch(recent=recent)
    seen: list[tuple[float, int]] = []
    now = 0.0
    for step, live in steps:
        now += step
        seen.append((now, live))
        assert not watch.sample(now, live)
        assert watch.smallest == min(b for t, b in seen if t >= now - recent)
