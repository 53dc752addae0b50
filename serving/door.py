"""Who is let into the engine next, where several runs share a server.

vLLM serves requests in the order in which they come: behind a run that has asked for thousands of completions another
one would wait for all of them. So no more sequences are let in than keep vLLM busy, and of the runs that wait the one
with the fewest under way is next; among equals, the one whose turn is longest ago.
"""

import asyncio
import contextlib
import itertools
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass


@dataclass(eq=False)
class Ticket:
    size: int  # sequences
    request_id: str
    admitted: asyncio.Future


class Door:
    """most: sequences inside at a time. A larger request is let in alone."""

    def __init__(self, most: int):
        self.most = most
        self.inside: Counter = Counter()  # sequences, by run
        self.waiting: dict[str, deque[Ticket]] = {}
        self.waited: Counter = Counter()  # seconds of requests that waited, by run
        self.seconds: Counter = Counter()  # of requests inside
        self.tokens: Counter = Counter()  # that were sampled, as `sampled` was told
        self.turns, self.last = itertools.count(1), Counter()

    @contextlib.asynccontextmanager
    async def passing(self, run: str, size: int, request_id: str) -> AsyncIterator[None]:
        """Inside from its turn to the end of the block."""
        ticket = Ticket(size, request_id, asyncio.get_running_loop().create_future())
        self.waiting.setdefault(run, deque()).append(ticket)
        self._admit()
        began = time.monotonic()
        try:
            try:
                await ticket.admitted
            finally:
                self.waited[run] += time.monotonic() - began
            began = time.monotonic()
            try:
                yield
            finally:
                self.seconds[run] += time.monotonic() - began
        finally:
            self._leave(run, ticket)

    def _leave(self, run: str, ticket: Ticket) -> None:
        if ticket in self.waiting[run]:  # cancelled before its turn
            self.waiting[run].remove(ticket)
        elif not ticket.admitted.cancelled() and not ticket.admitted.exception():
            self.inside[run] -= ticket.size
        self._admit()

    def _admit(self) -> None:
        while runs := [run for run, tickets in self.waiting.items() if tickets]:
            run = min(runs, key=lambda run: (self.inside[run], self.last[run]))
            ticket, inside = self.waiting[run][0], self.inside.total()
            if inside and inside + ticket.size > self.most:
                return
            self.waiting[run].popleft()
            if not ticket.admitted.done():  # else its client went away
                self.inside[run] += ticket.size
                self.last[run] = next(self.turns)
                ticket.admitted.set_result(None)

    def turn_away(self, error: Exception, which: Callable[[Ticket], bool]) -> None:
        """Raise `error` in those that wait and are meant."""
        for tickets in self.waiting.values():
            for ticket in [ticket for ticket in tickets if which(ticket)]:
                tickets.remove(ticket)
                if not ticket.admitted.done():
                    ticket.admitted.set_exception(error)

    def describe(self, run: str) -> dict[str, int | float]:
        """Of one run, for /server_info."""
        waiting = sum(ticket.size for ticket in self.waiting.get(run, ()))
        return {"under_way": self.inside[run], "waiting": waiting} | self.used(run)

    def used(self, run: str) -> dict[str, int | float]:
        """By one run since the server's start: tokens sampled; seconds of its requests inside and waiting, summed."""
        seconds = {"sampling_seconds": self.seconds[run], "waited_seconds": self.waited[run]}
        return {"tokens": self.tokens[run]} | {key: round(value, 3) for key, value in seconds.items()}
