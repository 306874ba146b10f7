"""The screens of `flowgpu top`. textual is imported nowhere else."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult, ScreenStackError
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.css.query import NoMatches
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Static

from flowgpu.errors import FlowError
from flowgpu.jobs import SUSPENDED
from flowgpu.render import age, one_line, size
from flowgpu.top import details, looks
from flowgpu.top.looks import GAP, NONE, Column, ImageRow, Seen, StoreLook, Watch

STORE_SECONDS = 10.0
"""Between two looks at stores, which read each image's manifest."""
STORE_COLUMNS = (("USED", 9), ("FREE", 9), ("OF", 9), ("IMAGES", 6), ("DAMAGED", 7), ("NEWEST", 7))
SCROLLBAR = 2
"""Letters that a vertical one takes."""

Cells = list[Text]
Keyed = list[tuple[str, Cells]]


class Table(DataTable[Text]):
    """Rows that come and go, with the cursor on the one it was on."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "Details")]

    def __init__(self, name: str) -> None:
        super().__init__(id=name, cursor_type="row", cell_padding=0)
        self._head: list[tuple[str, int]] = []
        self._keys: list[str] = []

    def show(self, head: list[tuple[str, int]], rows: Keyed) -> None:
        """Draw these columns and rows. What is there already stays where it is."""
        keys = [key for key, _ in rows]
        if head == self._head and keys == self._keys:
            for number, (_, cells) in enumerate(rows):
                for column, cell in enumerate(cells):
                    if self.get_cell_at((number, column)) != cell:  # type: ignore[arg-type]
                        self.update_cell_at((number, column), cell)  # type: ignore[arg-type]
            return
        chosen, scrolled = self.chosen, self.scroll_y
        self.clear(columns=True)
        for title, width in head:
            self.add_column(title, width=width + GAP, key=title)
        for key, cells in rows:
            self.add_row(*cells, key=key)
        self._head, self._keys = head, keys
        if chosen in keys:
            self.move_cursor(row=keys.index(chosen), scroll=False)
        self.scroll_to(y=scrolled, animate=False)

    @property
    def chosen(self) -> str:
        """Key of the row with the cursor; empty: there is none."""
        return self._keys[self.cursor_row] if self.cursor_row < len(self._keys) else ""


class Details(Screen[None]):
    """One job or one store."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,enter,left", "dismiss", "Back")]

    def __init__(self, text: Callable[[], Text]) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        """See textual."""
        with VerticalScroll():
            yield Static(self._text(), id="details")
        yield Footer()

    def draw(self) -> None:
        """What is to be told now."""
        self.query_one("#details", Static).update(self._text())


class Top(App[None]):
    """The table of jobs, and below it that of stores."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #summary { height: 1; text-style: bold; }
    #error { height: auto; color: $error; }
    Table { height: 1fr; overflow-x: auto; }
    #stores { height: auto; max-height: 40%; border-top: solid $primary; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c,ctrl+q", "quit", "Quit", priority=True, key_display="q"),
        Binding("o", "sort", "Sort"),
        Binding("r", "reverse", "Reverse"),
        Binding("a", "ended", "Ended jobs"),
        Binding("tab", "other", "Stores", priority=True),
    ]

    def __init__(self, watch: Watch, delay: float) -> None:
        """Looks each `delay` seconds."""
        super().__init__()
        self._watch, self._delay = watch, delay
        self._jobs: list[Seen] = []
        self._stores: list[StoreLook] = []
        self._error = ""
        self._sort: Column | None = None  # None: the order in which they began
        self._reverse = False
        self._ended = False
        self._now = asyncio.Event()
        self._stores_now = asyncio.Event()

    def compose(self) -> ComposeResult:
        """See textual."""
        yield Static("", id="summary")
        yield Static("", id="error")
        yield Table("jobs")
        yield Table("stores")
        yield Footer()

    def on_mount(self) -> None:
        """See textual."""
        for signum in (signal.SIGTERM, signal.SIGHUP):  # the terminal is to be as it was
            end = partial(self.exit, return_code=128 + signum)
            asyncio.get_running_loop().add_signal_handler(signum, end)
        self.run_worker(self._look_at_jobs())
        self.run_worker(self._look_at_stores())

    def on_unmount(self) -> None:
        """See textual."""
        self._watch.close()

    def on_resize(self) -> None:
        """See textual."""
        self._draw()

    # Looks: in threads, so that keys are never waited for.

    async def _look_at_jobs(self) -> None:
        while True:
            self._now.clear()
            try:
                jobs = await asyncio.to_thread(lambda: self._watch.jobs(ended=self._ended))
                if _stores_of(jobs) != _stores_of(self._jobs):
                    self._stores_now.set()
                self._jobs, self._error = jobs, ""
            except (FlowError, OSError) as error:
                self._error = str(error)
            self._draw()
            await _until(self._now, self._delay)

    async def _look_at_stores(self) -> None:
        while True:
            self._stores_now.clear()
            try:
                self._stores = await asyncio.to_thread(self._watch.stores)
            except (FlowError, OSError):
                self._stores = []  # the look at jobs says why
            self._draw()
            self.refresh_bindings()
            await _until(self._stores_now, STORE_SECONDS)

    # Drawing

    def _draw(self) -> None:
        with suppress(NoMatches, ScreenStackError):  # it ends
            self._draw_on(self.screen_stack[0], time.time())

    def _draw_on(self, base: Screen[object], now: float) -> None:
        base.query_one("#summary", Static).update(Text(_summary(self._jobs)))
        error = base.query_one("#error", Static)
        error.display = bool(self._error)
        error.update(Text(one_line(self._error)))
        chosen = looks.columns(self._jobs, self.size.width - SCROLLBAR)
        mark = "▲" if self._reverse else "▼"
        head = [
            (f"{column.title[: width - 1]}{mark}" if column is self._sort else column.title, width)
            for column, width in chosen
        ]
        rows = [
            (
                job.record.id,
                [_cell(column.text(job, now), width, column) for column, width in chosen],
            )
            for job in self._sorted(now)
        ]
        base.query_one("#jobs", Table).show(_aligned(head, chosen), rows)
        stores = base.query_one("#stores", Table)
        stores.display = bool(self._stores)
        room = self.size.width - SCROLLBAR - GAP - sum(width + GAP for _, width in STORE_COLUMNS)
        stores.show(
            [("STORE", room), *((title.rjust(width), width) for title, width in STORE_COLUMNS)],
            [(str(store.path), _store_cells(store, room, now)) for store in self._stores],
        )
        if isinstance(self.screen, Details):
            self.screen.draw()

    def _sorted(self, now: float) -> list[Seen]:
        jobs = list(self._jobs)
        if (column := self._sort) is not None:
            jobs.sort(key=lambda job: column.key(job, now))
        return jobs[::-1] if self._reverse else jobs

    # Keys

    def action_sort(self) -> None:
        """Sort by the next column; after the last one, by the begin."""
        shown = [column for column, _ in looks.columns(self._jobs, self.size.width - SCROLLBAR)]
        order: list[Column | None] = [None, *shown]
        place = order.index(self._sort) if self._sort in order else 0
        self._sort = order[(place + 1) % len(order)]
        self._draw()

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        """Sort by the column that was clicked; the other way round at a second click."""
        if event.data_table.id != "jobs":
            return
        shown = looks.columns(self._jobs, self.size.width - SCROLLBAR)
        column = shown[event.column_index][0]
        self._reverse = column is self._sort and not self._reverse
        self._sort = column
        self._draw()

    def action_reverse(self) -> None:
        """Turn the order round."""
        self._reverse = not self._reverse
        self._draw()

    def action_ended(self) -> None:
        """Show jobs that have ended as well, or not any more."""
        self._ended = not self._ended
        self._now.set()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Show the details of a job or a store."""
        key = event.row_key.value or ""
        text = self._job_text if event.data_table.id == "jobs" else self._store_text
        self.push_screen(Details(lambda: text(key)))

    def _job_text(self, key: str) -> Text:
        job = next((job for job in self._jobs if job.record.id == key), None)
        if job is None:
            return Text("The job is not there any more.")
        images = _images_of(job, self._stores)
        return details.of_job(job, self._watch.operation(key), images, time.time())

    def _store_text(self, key: str) -> Text:
        store = next((store for store in self._stores if str(store.path) == key), None)
        return Text("") if store is None else details.of_store(store, time.time())

    def action_other(self) -> None:
        """Go to the other table."""
        jobs, stores = self.query_one("#jobs"), self.query_one("#stores")
        (jobs if stores.has_focus else stores).focus()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """See textual: keys of the tables are theirs, and stores are there or not."""
        if action in ("other", "sort", "reverse", "ended") and isinstance(self.screen, Details):
            return False
        return bool(self._stores) if action == "other" else True


async def _until(event: asyncio.Event, timeout: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), timeout)
    except TimeoutError:
        pass


def _stores_of(jobs: Sequence[Seen]) -> set[str]:
    return {f"{job.saving.store} {job.counts.last_success}" for job in jobs if job.saving}


def _images_of(job: Seen, stores: Sequence[StoreLook]) -> list[ImageRow]:
    return [image for store in stores for image in store.images if image.id == job.record.id]


def _summary(jobs: Sequence[Seen]) -> str:
    states: dict[str, int] = {}
    for job in jobs:
        states[job.record.shown_state] = states.get(job.record.shown_state, 0) + 1
    parts = [f"{count} {state}" for state, count in states.items()]
    gpu = sum(job.memory[0] for job in jobs if job.record.shown_state != SUSPENDED)
    host = sum(job.record.host_bytes for job in jobs)
    if gpu:
        parts.append(f"GPU {size(gpu)}")
    if host:
        parts.append(f"host {size(host)}")
    return f"{time.strftime('%H:%M:%S')}  {', '.join(parts) or 'no jobs'}"


def _cell(text: str, width: int, column: Column | None = None) -> Text:
    right = column is not None and column.right
    cell = Text(one_line(text), no_wrap=True, end="")
    cell.truncate(width, overflow="ellipsis")
    cell.align("right" if right else "left", width)
    return cell


def _aligned(
    head: Sequence[tuple[str, int]], chosen: Sequence[tuple[Column, int]]
) -> list[tuple[str, int]]:
    """Titles above numbers end where the numbers do."""
    return [
        (title.rjust(width) if column.right else title, width)
        for (title, width), (column, _) in zip(head, chosen, strict=True)
    ]


def _store_cells(store: StoreLook, room: int, now: float) -> Cells:
    facts = store.facts
    if facts is None:
        rest = [store.error or NONE, *[""] * (len(STORE_COLUMNS) - 1)]
    else:
        newest = max(facts.newest.values(), default=None)
        rest = [
            *map(size, (facts.used, facts.available, facts.capacity)),
            *map(str, (facts.whole, facts.damaged)),
            NONE if newest is None else age(now - newest),
        ]
    path = one_line(str(store.path))
    path = path if len(path) <= room else f"…{path[1 - room :]}"
    cells = [_cell(path, room)]
    for text, (_, width) in zip(rest, STORE_COLUMNS, strict=True):
        cells.append(_cell(text.rjust(width), width))
    return cells
