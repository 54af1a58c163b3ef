import os

# Before torch is imported anywhere: tests fork workers, and a fork after an operation on two threads hangs.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"
for name in [name for name in os.environ if name.startswith("QUORATE_")]:
    del os.environ[name]
