"""How two processes speak: framed links over TCP and in memory, and the protobuf stubs of the coordinator."""
