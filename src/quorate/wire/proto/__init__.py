"""The coordinator's gRPC service: its messages, the stubs made from them by `scripts/proto.py`, and how to call it."""
