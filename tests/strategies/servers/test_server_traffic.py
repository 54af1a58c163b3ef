from quorate.lanes.chunks import host_lanes
from quorate.strategies.servers.option import ServersSpec


def test_every_lane_goes_to_each_holder_and_values_come_back_once() -> None:
    strategy = ServersSpec(kind="parameter-server", servers=2, replicas=2)
    workers, server = strategy.server_traffic(1000, host_lanes(4, 2))
    assert workers == ((4000, 1000),) * 2
    assert server == (1000, 4000)
    assert sum(sends for sends, _ in workers) == 2 * server[1]
    assert sum(receives for _, receives in workers) == 2 * server[0]
