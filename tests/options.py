"""Which tests are about an option, so that the core can be tested without it; and which options are rooms already.

A test is of an option if its path, or its path with its name, fits one of the option's patterns. `pytest --core` leaves
these out: what is left has to pass without the option's folder.
"""

from fnmatch import fnmatch

OPTIONS: dict[str, tuple[str, ...]] = {
    "servers": (
        "bits/test_server_*",
        "bits/test_sparse_bits.py",
        "chaos/test_server_faults.py",
        "coordinator/test_server_members.py",
        "faults/test_served_faults.py",
        "faults/test_server_compressed_faults.py",
        "faults/test_unit_modes.py",
        "history/test_staleness.py",
        "simulation/test_simulated_servers.py",
        "strategies/servers/*",
    ),
    "gangs": (
        "strategies/test_strategy_contract.py::*[[]ddp-*",
        "strategies/test_strategy_kinds_told.py::test_nccl_keys_*",
        "bits/test_ddp_*",
        "bits/test_fsdp_*",
        "bits/test_gang_device_bits.py",
        "bits/test_sync_batch_norm.py",
        "coordinator/test_mesh_members.py",
        "faults/test_ddp_*",
        "faults/test_fsdp_*",
        "simulation/test_simulated_meshes.py",
        "spec/test_nccl_keys.py",
        "spec/test_engine_keys.py::test_a_job_that_cannot_grow_*fsdp*",
        "spec/test_strategy_kinds.py::test_a_run_may_go_on_with_a_strategy_that_keeps_the_bits*",
        "spec/test_strategy_kinds.py::test_the_kind_says_whether_each_worker_hosts_a_lane*",
        "spec/test_strategy_kinds.py::test_the_largest_batch_of_a_sharded_model_is_not_looked_for",
        "spec/test_strategy_kinds.py::test_workers_that_normalize_together_*",
        "strategies/gangs/*",
    ),
    "compression": (
        "bits/test_compressed_bits.py",
        "bits/test_ddp_compressed_bits.py",
        "bits/test_server_compressed_bits.py",
        "faults/test_*compressed_faults.py",
        "strategies/compression/*",
        "strategies/servers/test_encoded_traffic.py",
    ),
    "shards": (
        "cli/test_bad_samples_told.py",
        "cli/test_data_verb.py",
        "cli/test_resuming_other_data.py",
        "cli/test_samples_view.py",
        "data/shards/*",
        "data/test_left_out.py",
        "data/test_block_sampler.py",
        "data/test_corrupt_training.py",
        "data/test_sharding.py",
        "examples/test_shard_examples.py",
        "faults/test_changing_shards.py",
        "faults/test_streamed_*",
        "history/test_bad_places.py",
        "history/test_streaming.py",
        "lanes/test_block_pieces.py",
        "training/test_cache_notes.py",
        "training/test_bad_samples.py",
        "training/test_streamed_loop.py",
    ),
    "stores": (
        "api/test_changed_copies.py",
        "api/test_session.py::*what_copiers_write*",
        "checkpoint/test_checkpoint_store.py::*objects*",
        "api/test_copies_told.py",
        "cli/test_remote_copies.py",
        "engines/test_shared_storage.py",
        "stores/*",
    ),
    "encryption": (
        "api/test_checkpoints.py",
        "checkpoint/test_cipher.py",
        "checkpoint/test_key.py",
        "checkpoint/test_rekeying.py",
        "checkpoint/test_part_file.py::*encrypted*",
        "cli/test_checkpoints_verb.py::*encryption*",
        "cli/test_checkpoints_verb.py::*_key_*",
        "cli/test_encrypted_job.py",
        "coordinator/test_encrypted_coordinator.py",
        "faults/test_encrypted_faults.py",
        "spec/test_job_mistakes.py::*an unknown key inside a section*",
        "spec/test_job_mistakes.py::*a section that is empty*",
        "spec/test_job_spec.py::test_rules_of_checkpoints*",
        "spec/test_job_spec.py::test_ways_to_keep_checkpoints*",
        "spec/test_job_spec.py::test_what_is_left_away_keeps_three_*",
        "spec/test_load_job.py::test_the_key_of_a_later_layer_*",
        "spec/test_load_job.py::test_the_file_of_a_key_*",
        "wire/test_certificates.py",
        "wire/test_tls_*",
    ),
    "cuda": (
        "bits/test_captured_bits.py",
        "core/test_gpu*",
        "gpu/*",
        "spec/test_gpu_workers.py",
    ),
    "ray": (
        "api/test_engine_choice.py",
        "api/test_ray_jobs.py",
        "api/test_resume_in.py",
        "benchmarking/test_ray_bench.py",
        "cli/test_every_status.py::*[[]submitted]",
        "cli/test_show_verb.py::test_what_is_encrypted_*",
        "engines/test_cluster_engine.py",
        "spec/test_engine_keys.py",
        "engines/test_engine_contract.py::*on_a_host*",
        "engines/test_draining_nodes.py",
        "engines/test_host_agent.py",
        "engines/test_node_*",
        "engines/test_shared_storage.py",
        "services/test_calls_to_ray.py",
        "services/test_ray_*",
    ),
    "trackers": (
        "api/test_models.py",
        "api/test_tracker_loading.py",
        "cli/test_imports_of_training.py",
        "cli/test_system_told.py",
        "cli/test_track_verb.py",
        "services/test_mlflow_tracking.py",
        "services/test_model_registry.py",
        "services/test_otlp.py",
        "services/test_prometheus.py",
        "services/test_trackers.py",
        "spec/test_tracking_keys.py",
        "tracking/*",
        "worker/test_task_mlflow.py",
    ),
    "tune": (
        "cli/test_search_verbs.py",
        "cli/test_tune_verb.py",
        "docs/test_tune_page.py",
        "services/test_ray_tune.py",
        "services/test_search_report.py",
        "services/test_tune_choosing.py",
        "tune/*",
    ),
    "chaos": (
        "api/test_fault_request.py",
        "chaos/*",
        "faults/test_partitions.py",
        "wire/test_silence.py",
        "cli/test_chaos_verb.py",
    ),
    "doctor": (
        "cli/test_doctor_verb.py",
        "doctor/*",
        "services/test_ray_doctor.py",
    ),
}

WHOLE = (
    "api/test_public_names.py",
    "benchmarking/*",
    "catalogue/*",
    "cli/test_init_verb.py",
    "cli/test_version_1.py",
    "core/test_errors.py",
    "docs/*",
    "examples/*",
    "history/test_written_before.py",
    "house/*",
)
"""Tests of all that there is, options included: no tests of the core either. Runs that were written before name the
keys of every option."""

ROOMS: dict[str, tuple[str, ...]] = {
    "gangs": ("quorate.strategies.gangs.",),
    "shards": ("quorate.shards",),
    "encryption": ("quorate.encryption.",),
    "servers": ("quorate.strategies.servers.",),
    "stores": ("quorate.stores",),
    "compression": ("quorate.strategies.compression.",),
    "cuda": ("quorate.cuda.",),
    "ray": ("quorate.engines.ray.", "quorate.ray"),
    "trackers": ("quorate.tracking",),
    "tune": ("quorate.tune",),
    "chaos": ("quorate.chaos",),
    "doctor": ("quorate.doctor",),
}
"""How the names of an option's modules begin, of which a worker of a plain ring job imports none but `option`.
Whoever gives an option a room of its own adds it here."""


def is_of_the_core(test: str) -> bool:
    """Whether a test, or a file of tests, has to pass without any option."""
    return not options_of(test) and not any(fnmatch(test.partition("::")[0], pattern) for pattern in WHOLE)


def options_of(test: str) -> list[str]:
    """The options that a test is about, by its id: its path below `tests/`, `::` and its name."""
    path = test.partition("::")[0]
    return [
        option
        for option, patterns in OPTIONS.items()
        if any(fnmatch(test if "::" in pattern else path, pattern) for pattern in patterns)
    ]
