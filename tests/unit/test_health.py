"""The health machine: the table of docs/contract.md cell by cell; its invariants by Hypothesis."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nomarr_systemd.core import health
from nomarr_systemd.core.death import LABELS
from nomarr_systemd.core.frames import STATUSES as FRAMES
from nomarr_systemd.core.health import (
    DECISION,
    EOF_GONE,
    NOISE,
    REGISTERED,
    REPORTED,
    RESET,
    SET_FAILED,
    TABLE,
    Event,
    HealthRules,
    Signal,
    State,
    Transition,
)
from tests.support.depth import times

RULES = HealthRules()
PENDING, HEALTHY, UNHEALTHY = Signal("pending"), Signal("healthy"), Signal("unhealthy")
STOPPING = Signal("stopping")
TICK = Signal("tick")  # time has passed
LIVE = ("pending", "healthy", "unhealthy", "recovering")
STATUSES = ("unregistered", *LIVE, "dead", "failed")
OTHER_EVENTS = (REGISTERED, TICK, NOISE, EOF_GONE, SET_FAILED, RESET)


class Life(NamedTuple):
    """A state, and when it was heard last, which the supervisor keeps beside it."""

    state: State = State()
    heard_at: float = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.state, name)


def step(
    life: Life, event: Event, now: float, rules: HealthRules
) -> tuple[Life, tuple[Transition, ...]]:
    """By an event or by time, as the supervisor does it."""
    if event is TICK:
        state, transitions = health.tick(life.state, life.heard_at, now, rules)
        return Life(state, life.heard_at), transitions
    state, transitions = health.step(life.state, event, now, rules)
    is_heard = event is REGISTERED or event.kind in FRAMES
    return Life(state, now if is_heard else life.heard_at), transitions


def deadline(life: Life, rules: HealthRules) -> float | None:
    return health.deadline(life.state, life.heard_at, rules)


def recovering(seconds: float | None = None) -> Event:
    return Signal("recovering", seconds)


def walk(
    *events: tuple[float, Event], rules: HealthRules = RULES, start: Life | None = None
) -> Life:
    state = start or Life()
    for now, event in events:
        state, _ = step(state, event, now, rules)
    return state


# A state of each status, all of them reached the ordinary way at second 0.
IN = {
    "unregistered": Life(),
    "pending": walk((0, REGISTERED)),
    "healthy": walk((0, REGISTERED), (0, HEALTHY)),
    "unhealthy": walk((0, REGISTERED), (0, UNHEALTHY)),
    "recovering": walk((0, REGISTERED), (0, recovering(30))),
    "dead": walk((0, REGISTERED), (0, EOF_GONE)),
    "failed": walk((0, REGISTERED), (0, SET_FAILED)),
}

# The design's table: in which statuses, what happens, to which status. "=": as it was.
DESIGN = [
    (STATUSES[:-1], REGISTERED, "pending"),
    (("pending",), PENDING, "pending"),
    (("pending", "unhealthy", "recovering"), HEALTHY, "healthy"),
    (("healthy",), HEALTHY, "healthy"),
    (("pending", "healthy", "recovering"), UNHEALTHY, "unhealthy"),
    (("unhealthy",), UNHEALTHY, "unhealthy"),
    (("pending", "healthy", "unhealthy"), recovering(9), "recovering"),
    (("recovering",), recovering(9), "recovering"),
    (("healthy", "unhealthy"), PENDING, "pending"),
    (("recovering",), PENDING, "recovering"),
    (LIVE, STOPPING, "="),
    (LIVE, NOISE, "="),
    (LIVE, EOF_GONE, "dead"),
    (("dead",), PENDING, "dead"),
    (("dead",), HEALTHY, "dead"),
    (("dead",), recovering(9), "dead"),
    (STATUSES, SET_FAILED, "failed"),
    (("failed",), RESET, "unregistered"),
    (("failed",), REGISTERED, "failed"),
    (("failed",), HEALTHY, "failed"),
    (("failed",), EOF_GONE, "failed"),
    (("failed",), TICK, "failed"),
    (("unregistered",), HEALTHY, "unregistered"),
]


@pytest.mark.parametrize(
    ("status", "event", "to"),
    [(status, event, to) for statuses, event, to in DESIGN for status in statuses],
)
def test_the_designs_table(status: str, event: Event, to: str) -> None:
    before = IN[status]
    assert before.status == status
    after, transitions = step(before, event, 1, RULES)
    assert after.status == (status if to == "=" else to)
    changed = after.status != status
    assert [t[:2] for t in transitions] == [(status, after.status)] * changed


@pytest.mark.parametrize("stopping", [False, True])
def test_a_healthy_frame_keeps_nothing_but_a_stop(stopping: bool) -> None:
    for status in LIVE:
        state = State(status, 2, stopping, True, True, 1.0, 2.0, 3.0, 4)
        after, _ = health.step(state, HEALTHY, 9, RULES)
        assert after == State("healthy", stopping=stopping)


def test_the_table_is_complete_and_knows_only_known_words() -> None:
    assert TABLE.keys() == set(STATUSES) == IN.keys() == REPORTED.keys() == DECISION.keys()
    known = {*FRAMES} | {event.kind for event in OTHER_EVENTS if event is not TICK}
    for cells in TABLE.values():
        assert cells.keys() == known


# Silence, second by second


def test_a_start_without_a_frame() -> None:
    state = walk((0, REGISTERED))
    assert deadline(state, RULES) == 60
    assert walk((59.9, TICK), start=state).status == "pending"
    dead, transitions = step(state, TICK, 60, RULES)
    assert (dead.status, dead.cause) == ("dead", "startup-timeout")
    assert transitions == (("pending", "dead", "startup-timeout"),)


def test_loading_for_minutes_is_not_death() -> None:
    state = walk((0, REGISTERED))
    for second in range(0, 600, 50):
        state = walk((second, TICK), (second, PENDING), start=state)
        assert state.status == "pending"
    assert deadline(state, RULES) == 550 + 60


def test_silence_counts_misses_and_kills_at_three() -> None:
    state = IN["healthy"]
    assert deadline(state, RULES) == 5
    state = walk((5, TICK), start=state)
    assert (state.status, state.misses, deadline(state, RULES)) == ("unhealthy", 1, 10)
    state = walk((10, TICK), start=state)
    assert (state.status, state.misses) == ("unhealthy", 2)
    assert walk((14.9, TICK), start=state).status == "unhealthy"
    state = walk((15, TICK), start=state)
    assert (state.status, state.cause) == ("dead", "stale")


def test_a_late_tick_owes_every_transition() -> None:
    state, transitions = step(IN["healthy"], TICK, 100, RULES)
    assert state.status == "dead"
    assert [*transitions] == [
        ("healthy", "unhealthy", ""),
        ("unhealthy", "dead", "stale"),
    ]


def test_any_valid_frame_ends_silence() -> None:
    for frame, status in ((HEALTHY, "healthy"), (UNHEALTHY, "unhealthy")):
        state = walk((12, TICK), (14, frame), (18.9, TICK), start=IN["healthy"])
        assert (state.status, state.misses) == (status, 0)


def test_one_miss_allowed_means_dead_at_the_first() -> None:
    rules = RULES._replace(max_misses=1)
    state, transitions = step(IN["healthy"], TICK, 5, rules)
    assert state.status == "dead"
    assert len(transitions) == 1


def test_unhealthy_by_frames_lives_while_frames_come() -> None:
    state = IN["unhealthy"]
    for second in range(1, 4000, 4):
        state = walk((second, TICK), (second, UNHEALTHY), start=state)
    assert state.status == "unhealthy"
    assert walk((4100, TICK), start=state).cause == "stale"


def test_unhealthy_too_long_if_asked_for() -> None:
    rules = RULES._replace(max_unhealthy_s=60)
    state = IN["unhealthy"]
    for second in range(1, 58, 2):
        state = walk((second, TICK), (second, UNHEALTHY), start=state, rules=rules)
    assert state.status == "unhealthy"
    assert deadline(state, rules) == 60
    assert walk((60, TICK), start=state, rules=rules).cause == "unhealthy-too-long"
    # By silence it is not the worker's word, and a healthy frame ends the count.
    silent = walk((5, TICK), start=IN["healthy"], rules=rules)
    assert deadline(silent, rules) == 10
    state = walk((59, HEALTHY), (59.5, UNHEALTHY), (61, TICK), start=state, rules=rules)
    assert state.status == "unhealthy"


def test_unhealthy_too_long_is_not_evaded_by_other_words() -> None:
    rules = RULES._replace(max_unhealthy_s=60)
    for words in ([recovering(5), UNHEALTHY], [PENDING, UNHEALTHY], [STOPPING, UNHEALTHY]):
        state = IN["unhealthy"]
        for second in range(1, 59, 2):
            state = walk(
                (second, TICK), *((second, word) for word in words), start=state, rules=rules
            )
        assert state.unhealthy_since == 0
    still = state._replace(state=state.state._replace(stopping=False))
    assert walk((60, TICK), start=still, rules=rules).status == "dead"
    assert walk((20, HEALTHY), (21, UNHEALTHY), start=state).unhealthy_since == 21


def test_loading_again_is_no_way_around_the_bound_of_recovery() -> None:
    state = walk((0, recovering(60)), (50, UNHEALTHY), (51, PENDING), start=IN["healthy"])
    state = walk((100, recovering(60)), start=state)
    assert deadline(state, RULES) == 120


def test_stopping_stays_whatever_comes_after() -> None:
    for word in (PENDING, HEALTHY, UNHEALTHY, recovering(9), NOISE, TICK):
        for status in LIVE:
            state = walk((1, STOPPING), (2, word), (9999, TICK), start=IN[status])
            assert state.stopping
            assert state.status in LIVE


def test_only_invalid_lines_are_an_invalid_heartbeat() -> None:
    for start, ends_at in ((IN["pending"], 60), (IN["healthy"], 15)):
        state = walk((4, NOISE), (ends_at, TICK), start=start)
        assert (state.status, state.cause) == ("dead", "invalid-heartbeat")
    state = walk((4, NOISE), (4.5, HEALTHY), (19.5, TICK), start=IN["healthy"])
    assert state.cause == "stale"


def test_every_cause_of_death_has_a_label() -> None:
    assert set(LABELS) == {
        "stale", "startup-timeout", "recovery-timeout", "unhealthy-too-long", "invalid-heartbeat",
    }  # fmt: skip


# Recovery


@pytest.mark.parametrize(
    ("asked", "until"),
    [(30, 30), (1, 5), (-4, 5), (1e9, 120), (None, 120), (120, 120)],
)
def test_recovery_is_clamped(asked: float | None, until: float) -> None:
    state = walk((0, recovering(asked)), start=IN["healthy"])
    assert deadline(state, RULES) == until
    dead = walk((until, TICK), start=state)
    assert (dead.status, dead.cause) == ("dead", "recovery-timeout")


def test_a_recovering_worker_may_move_its_deadline_but_not_past_the_bound() -> None:
    state = walk((0, recovering(30)), start=IN["healthy"])
    for second in range(10, 120, 10):
        state = walk((second, TICK), (second, recovering(30)), start=state)
        assert state.status == "recovering"
    assert deadline(state, RULES) == 120
    assert walk((120, TICK), start=state).status == "dead"


def test_unhealthy_and_recovering_in_turn_gain_nothing() -> None:
    state = IN["healthy"]
    for second in range(0, 119, 3):
        frame = recovering(60) if second % 2 else UNHEALTHY
        state = walk((second, TICK), (second, frame), start=state)
        assert state.status != "dead"
    state = walk((125, UNHEALTHY), (126, recovering(60)), (126, TICK), start=state)
    assert (state.status, state.cause) == ("dead", "recovery-timeout")


def test_a_healthy_frame_clears_the_bound() -> None:
    state = walk((0, recovering(60)), (50, HEALTHY), (51, recovering(60)), start=IN["healthy"])
    assert deadline(state, RULES) == 111


# Ends


def test_a_stopping_worker_is_not_judged_and_leaves_without_a_death() -> None:
    for status in LIVE:
        state = walk((1, STOPPING), (10_000, TICK), start=IN[status])
        assert (state.status, deadline(state, RULES)) == (status, None)
        gone, transitions = step(state, EOF_GONE, 10_001, RULES)
        assert gone.state == State()
        assert [t.new for t in transitions] == ["unregistered"]
        assert walk((1, STOPPING), (2, REGISTERED), start=IN[status]).stopping is False


def test_late_frames_are_counted_and_change_nothing() -> None:
    state = walk((1, HEALTHY), (2, recovering(9)), (3, TICK), start=IN["dead"])
    assert (state.status, state.late, state.cause) == ("dead", 2, "pipe-closed")
    assert walk((9, REGISTERED), start=state) == (State("pending"), 9)


def test_what_it_says_outside() -> None:
    said = {status: (REPORTED[status], DECISION[status]) for status in STATUSES}
    assert said == {
        "unregistered": ("pending", "Unknown"),
        "pending": ("pending", "Unknown"),
        "healthy": ("healthy", "Healthy"),
        "unhealthy": ("unhealthy", "Degraded"),
        "recovering": ("unhealthy", "Degraded"),
        "dead": ("unhealthy", "Unhealthy"),
        "failed": ("failed", "Unhealthy"),
    }
    assert set(REPORTED.values()) == {"pending", "healthy", "unhealthy", "failed"}


# Invariants over any history

rule_sets = st.builds(
    HealthRules,
    startup_timeout_s=st.sampled_from([1.0, 60.0]),
    staleness_interval_s=st.sampled_from([0.5, 5.0]),
    max_misses=st.integers(1, 4),
    min_recovery_s=st.sampled_from([0.0, 5.0]),
    max_recovery_s=st.sampled_from([5.0, 120.0]),
    max_unhealthy_s=st.sampled_from([0.0, 7.0]),
)
frames = st.one_of(
    st.sampled_from([PENDING, HEALTHY, UNHEALTHY, STOPPING]),
    st.builds(recovering, st.one_of(st.none(), st.floats(-10, 1000))),
)
events = st.one_of(frames, st.sampled_from(OTHER_EVENTS))
gaps = st.one_of(st.floats(0, 3), st.floats(0, 200))
histories = st.lists(st.tuples(gaps, events), max_size=40)


def play(
    history: list[tuple[float, Event]], rules: HealthRules, state: Life, now: float = 0.0
) -> tuple[Life, float]:
    for gap, event in history:
        now += gap
        before = state
        state, transitions = step(state, event, now, rules)
        # The transitions are a chain from the old status to the new one.
        places = [before.status, *(t.new for t in transitions)]
        assert [t.old for t in transitions] == places[:-1]
        assert places[-1] == state.status
    return state, now


@given(histories, histories, rule_sets)
def test_failed_is_terminal(
    before: list[tuple[float, Event]], after: list[tuple[float, Event]], rules: HealthRules
) -> None:
    state, now = play([*before, (0, SET_FAILED)], rules, Life())
    final, _ = play([e for e in after if e[1] is not RESET], rules, state, now)
    assert final.state is state.state
    assert deadline(final, rules) is None
    assert step(final, RESET, now, rules)[0].state == State()


@given(histories, rule_sets, st.lists(st.sampled_from([PENDING, HEALTHY, UNHEALTHY]), max_size=80))
def test_no_death_while_frames_flow(
    before: list[tuple[float, Event]], rules: HealthRules, flow: list[Event]
) -> None:
    """From any living state, however it got there: frames at half the staleness interval."""
    rules = rules._replace(max_unhealthy_s=0)
    state, now = play(before, rules, Life())
    state, _ = step(state, REGISTERED, now, rules)
    for frame in flow:
        now += rules.staleness_interval_s / 2
        state, _ = step(state, TICK, now, rules) if rules.startup_timeout_s > now else (state, ())
        state, _ = step(state, frame, now, rules)
        assert state.status in (*LIVE, "failed")


@given(histories, rule_sets)
def test_silence_always_ends_in_death_within_bounds(
    before: list[tuple[float, Event]], rules: HealthRules
) -> None:
    state, now = play(before, rules, Life())
    if state.status not in LIVE or state.stopping:
        assert deadline(state, rules) is None
        return
    bound = max(
        rules.startup_timeout_s,
        rules.max_misses * rules.staleness_interval_s,
        rules.max_recovery_s,
    )
    # By its own deadlines, each a real change, as the supervisor's loop goes.
    silent, steps = state, 0
    while (due := deadline(silent, rules)) is not None:
        assert due <= now + bound
        after, _ = step(silent, TICK, max(due, now), rules)
        assert after != silent
        silent, steps = after, steps + 1
    assert silent.status == "dead"
    assert steps <= rules.max_misses + 1
    # And by one late tick all the same.
    late, _ = step(state, TICK, now + bound, rules)
    assert (late.status, late.cause) == ("dead", silent.cause)


@given(
    rule_sets,
    st.lists(st.tuples(st.floats(0.01, 4.9), st.floats(-10, 1000), st.booleans()), min_size=200),
)
@settings(max_examples=times(40))
def test_recovery_is_bounded_however_a_worker_asks(
    rules: HealthRules, asks: list[tuple[float, float, bool]]
) -> None:
    """Never a healthy frame: past entry + max_recovery_s the next moment in recovery is death."""
    rules = rules._replace(staleness_interval_s=5.0, max_misses=3)
    state, now = walk((0, REGISTERED), (0, recovering(1)), rules=rules), 0.0
    for gap, asked, unhealthy in asks:
        now += gap
        state, _ = step(state, UNHEALTHY if unhealthy else recovering(asked), now, rules)
        if state.status == "recovering":
            due = deadline(state, rules)
            assert due is not None
            assert due <= rules.max_recovery_s
        state, _ = step(state, TICK, now, rules)
        if state.status == "dead":
            return
        assert state.status == "unhealthy" or now < rules.max_recovery_s


@given(histories, rule_sets)
def test_deadlines_are_what_ticks_wait_for(
    history: list[tuple[float, Event]], rules: HealthRules
) -> None:
    """Before its deadline a tick changes nothing: the loop may sleep."""
    state, now = play(history, rules, Life())
    due = deadline(state, rules)
    for moment in (now, now + 1, now + 100, now + 1000):
        if due is None or moment < due:
            assert step(state, TICK, moment, rules) == (state, ())


@given(histories, rule_sets, gaps, events)
def test_the_deadline_of_a_worker_that_stays_healthy_never_comes_earlier(
    history: list[tuple[float, Event]], rules: HealthRules, gap: float, event: Event
) -> None:
    """So the supervisor need not look at it for each frame."""
    state, now = play([*history, (0, REGISTERED), (0, HEALTHY)], rules, Life())
    after, transitions = step(state, event, now + gap, rules)
    if after.status == "healthy" and not transitions:
        before, due = deadline(state, rules), deadline(after, rules)
        assert due is None or (before is not None and before <= due)
