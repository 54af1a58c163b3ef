"""Rows of tables between workers and parameter servers: gradients of the rows that a step touches, new values of these.

What travels follows the rows that are touched, not the size of a table.
"""

from collections.abc import Mapping, Sequence

import torch

from quorate.core.generation import name_of
from quorate.strategies.servers.rows import Rows, Table, sum_rows
from quorate.strategies.servers.spokes import Spokes
from quorate.wire.link import Tag

COUNT_CHANNEL = 10
INDEX_CHANNEL = 11
VALUE_CHANNEL = 12

_PUBLISHED = 2**32
"""Added to the numbers of what servers give out, which has no lane."""

ByBlock = Mapping[int, Rows]


class RowExchange:
    """Like an `Exchange`, for the blocks in `tables`, which have gradients by rows.

    `holders` has for each block the positions of the servers that hold it, the primary first. It may share its links
    with others if everybody uses them in the same order.
    """

    def __init__(self, spokes: Spokes, tables: Mapping[int, Table], holders: Sequence[Sequence[int]]) -> None:
        self._spokes = spokes
        self._tables = dict(sorted(tables.items()))
        self._held = {at: [block for block in self._tables if at in holders[block]] for at in spokes.servers}
        self._led = {at: [block for block in self._tables if holders[block][0] == at] for at in spokes.servers}
        self._received: dict[int, ByBlock] = {}

    def push(self, step: int, lanes: Mapping[int, ByBlock]) -> None:
        """A worker: send what its lanes have of each table to every server that holds it."""
        with self._spokes.exchange():
            for server in self._spokes.peers:
                for lane, rows in sorted(lanes.items()):
                    self._send(server, step, lane, self._held[server], rows)

    def receive(self, step: int) -> None:
        """A server: have the rows of all lanes."""
        spokes = self._spokes
        received: dict[int, ByBlock] = {}
        with spokes.exchange():
            for worker in spokes.peers:
                for lane in spokes.generation.members[worker].lanes:
                    received[lane] = self._receive(worker, step, lane, self._held[spokes.position])
        self._received = received

    def add_up(self) -> dict[int, Rows]:
        """A server: the sum over all lanes of the tables that it holds."""
        lanes = [self._received[lane] for lane in sorted(self._received)]
        return {
            block: sum_rows([rows[block] for rows in lanes], self._tables[block])
            for block in self._held[self._spokes.position]
        }

    def publish(self, step: int, rows: ByBlock) -> None:
        """A server: send the rows that have changed of tables of which it is the primary to all workers."""
        with self._spokes.exchange():
            for worker in self._spokes.peers:
                self._send(worker, step, _PUBLISHED, self._led[self._spokes.position], rows)

    def pull(self, step: int) -> dict[int, Rows]:
        """A worker: the rows that have changed, of all tables."""
        pulled: dict[int, Rows] = {}
        with self._spokes.exchange():
            for server in self._spokes.peers:
                pulled |= self._receive(server, step, _PUBLISHED, self._led[server])
        return pulled

    def close(self) -> None:
        """Any thread may call it, any number of times."""
        self._spokes.close()

    def _send(self, peer: int, step: int, lane: int, blocks: Sequence[int], rows: ByBlock) -> None:
        if not blocks:
            return
        counts = torch.tensor([rows[block].count if block in rows else 0 for block in blocks])
        self._spokes.send(peer, self._tag(step, COUNT_CHANNEL, lane, blocks[0]), counts)
        for block, count in zip(blocks, counts.tolist(), strict=True):
            if count:
                table, given = self._tables[block], rows[block]
                self._spokes.send(
                    peer, self._tag(step, INDEX_CHANNEL, lane, block), given.indices.to(table.index_dtype)
                )
                values = given.values.contiguous().view(-1)
                self._spokes.send(peer, self._tag(step, VALUE_CHANNEL, lane, block), values)

    def _receive(self, peer: int, step: int, lane: int, blocks: Sequence[int]) -> dict[int, Rows]:
        if not blocks:
            return {}
        spokes, whose = self._spokes, name_of(self._spokes.generation.members[peer].worker)
        counts = torch.empty(len(blocks), dtype=torch.int64)
        spokes.receive(peer, self._tag(step, COUNT_CHANNEL, lane, blocks[0]), counts)
        received: dict[int, Rows] = {}
        for block, count in zip(blocks, counts.tolist(), strict=True):
            table = self._tables[block]
            table.check_count(count, whose)
            rows = table.empty(count)
            if count:
                indices = torch.empty(count, dtype=table.index_dtype)
                spokes.receive(peer, self._tag(step, INDEX_CHANNEL, lane, block), indices)
                rows.indices.copy_(indices)
                spokes.receive(peer, self._tag(step, VALUE_CHANNEL, lane, block), rows.values.view(-1))
                rows.check(table, whose)
            received[block] = rows
        return received

    def _tag(self, step: int, channel: int, lane: int, block: int) -> Tag:
        return Tag(self._spokes.generation.id, step, channel, lane * 2**20 + block)
