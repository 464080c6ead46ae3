"""The table drawer: columns, what is cut, and what a terminal shows of it."""

from __future__ import annotations

import click
from hypothesis import given
from hypothesis import strategies as st

from nomarr_systemd.cli.table import Table, fit, room_of

HEADS = ("NAME", "JOB", "N")
ROWS = [("tag-0", "/music/a.flac", "3"), ("tag-10", "-", "12")]


def test_columns_are_as_wide_as_they_must_be() -> None:
    table = Table(HEADS, ROWS, right=["N"])
    assert click.unstyle(table.head()) == "NAME    JOB             N"
    assert [table.row(row) for row in ROWS] == [
        "tag-0   /music/a.flac   3",
        "tag-10  -              12",
    ]
    assert table.width == len("tag-10  /music/a.flac  12")


def test_one_column_gives_way() -> None:
    table = Table(HEADS, ROWS, least={"NAME": 8})
    table.shrink("JOB", 20, 5)
    assert table.row(ROWS[0]) == "tag-0     /musi…  3"
    table.shrink("JOB", 1, 5)
    assert table.row(ROWS[0]) == "tag-0     /mus…  3"
    table.leave_out(["JOB"])
    assert table.row(ROWS[0], colours={"N": "red"}) == f"tag-0     {click.style('3', fg='red')}"


@given(st.text(), st.integers(1, 30))
def test_nothing_is_wider_than_its_room(text: str, room: int) -> None:
    shown = fit(text, room)
    assert room_of(shown) <= room
    assert shown.isprintable()


@given(st.lists(st.tuples(st.text(), st.text(), st.text()), max_size=4), st.integers(20, 80))
def test_no_line_is_wider_than_the_terminal(rows: list[tuple[str, ...]], width: int) -> None:
    table = Table(HEADS, rows)
    table.shrink("JOB", width, 8)
    for row in rows:
        assert room_of(table.row(row, width)) <= width
