"""Who is alive, who hosts which lanes, and how the job ends: pure decisions, and the gRPC service around them."""
