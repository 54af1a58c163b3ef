"""What joins the members of a generation with servers ends together."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest

import gang
from bits.bit_tasks import Momentum
from quorate.collectives.endpoint import Endpoint, Listeners
from quorate.core.errors import LinkError
from quorate.core.generation import Generation, Member, Role, server_id
from quorate.replica.device import CPU
from quorate.replica.replica import Replica
from quorate.strategies.kinds import Holdings
from quorate.strategies.servers.factory import ServersFactory
from quorate.strategies.servers.step import ServersConnection
from quorate.task.task import configure
from wire.pairs import GENERATION, credentials, within

pytestmark = pytest.mark.usefixtures("unmeasured")

IDS = (0, server_id(0), server_id(1))


def test_who_closes_the_links_ends_the_wait_for_one_that_is_alive_and_says_nothing() -> None:
    """As a member does that hears of the end of its generation: the one for whom it waits may never come to itself."""
    spec = gang.job(Momentum, strategy={"kind": "parameter-server", "servers": 2}, lanes=1)

    def connect(worker: int) -> ServersConnection:
        replica = Replica(configure(Momentum, spec.params, "test", spec.seed), spec, CPU)
        factory = ServersFactory(spec, replica, Holdings(Role.of(worker)))
        connection = factory.connect(
            Endpoint(generation, credentials(worker), listeners[worker], within(100), within(60))
        )
        assert isinstance(connection, ServersConnection)
        return connection

    with ExitStack() as stack, ThreadPoolExecutor(len(IDS)) as threads:
        listeners = {one: stack.enter_context(closing(Listeners.bind("127.0.0.1", shares_memory=False))) for one in IDS}
        members = [
            Member(one, listeners[one].network.address, range(one == 0), role=Role.of(one)) for one in sorted(IDS)
        ]
        generation = Generation(GENERATION, tuple(members))
        connections = list(threads.map(connect, IDS))
        for connection in connections:
            stack.callback(connection.close)
        waiting = threads.submit(connections[1].exchange.receive, 1)
        connections[1].links.close()
        with pytest.raises(LinkError):
            waiting.result(60)
