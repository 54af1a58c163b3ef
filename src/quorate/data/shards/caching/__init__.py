"""What is kept on a local disk: bytes that came from a store, and samples that `decode` has made."""
