from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Ack(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GenerationId(_message.Message):
    __slots__ = ("incarnation", "number")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    number: int
    def __init__(self, incarnation: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("worker", "address", "first_lane", "lane_count", "local_address", "cursor", "role", "part")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FIRST_LANE_FIELD_NUMBER: _ClassVar[int]
    LANE_COUNT_FIELD_NUMBER: _ClassVar[int]
    LOCAL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    worker: int
    address: str
    first_lane: int
    lane_count: int
    local_address: str
    cursor: Cursor
    role: str
    part: int
    def __init__(self, worker: _Optional[int] = ..., address: _Optional[str] = ..., first_lane: _Optional[int] = ..., lane_count: _Optional[int] = ..., local_address: _Optional[str] = ..., cursor: _Optional[_Union[Cursor, _Mapping]] = ..., role: _Optional[str] = ..., part: _Optional[int] = ...) -> None: ...

class Generation(_message.Message):
    __slots__ = ("id", "members", "restored")
    ID_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FIELD_NUMBER: _ClassVar[int]
    id: GenerationId
    members: _containers.RepeatedCompositeFieldContainer[Member]
    restored: Cursor
    def __init__(self, id: _Optional[_Union[GenerationId, _Mapping]] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., restored: _Optional[_Union[Cursor, _Mapping]] = ...) -> None: ...

class Cursor(_message.Message):
    __slots__ = ("step", "phase")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    step: int
    phase: int
    def __init__(self, step: _Optional[int] = ..., phase: _Optional[int] = ...) -> None: ...

class TensorDigest(_message.Message):
    __slots__ = ("name", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("slot", "pid", "host", "ring_address", "facts", "tensors", "cursor", "local_address", "position")
    class FactsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SLOT_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    RING_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    LOCAL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    slot: int
    pid: int
    host: str
    ring_address: str
    facts: _containers.ScalarMap[str, str]
    tensors: _containers.RepeatedCompositeFieldContainer[TensorDigest]
    cursor: Cursor
    local_address: str
    position: Position
    def __init__(self, slot: _Optional[int] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., ring_address: _Optional[str] = ..., facts: _Optional[_Mapping[str, str]] = ..., tensors: _Optional[_Iterable[_Union[TensorDigest, _Mapping]]] = ..., cursor: _Optional[_Union[Cursor, _Mapping]] = ..., local_address: _Optional[str] = ..., position: _Optional[_Union[Position, _Mapping]] = ...) -> None: ...

class Position(_message.Message):
    __slots__ = ("generation", "cursor", "has_left", "has_trained")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    HAS_LEFT_FIELD_NUMBER: _ClassVar[int]
    HAS_TRAINED_FIELD_NUMBER: _ClassVar[int]
    generation: Generation
    cursor: Cursor
    has_left: bool
    has_trained: bool
    def __init__(self, generation: _Optional[_Union[Generation, _Mapping]] = ..., cursor: _Optional[_Union[Cursor, _Mapping]] = ..., has_left: _Optional[bool] = ..., has_trained: _Optional[bool] = ...) -> None: ...

class RegisterReply(_message.Message):
    __slots__ = ("worker", "lease", "refusal", "incarnation", "time")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    worker: int
    lease: float
    refusal: str
    incarnation: int
    time: float
    def __init__(self, worker: _Optional[int] = ..., lease: _Optional[float] = ..., refusal: _Optional[str] = ..., incarnation: _Optional[int] = ..., time: _Optional[float] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("worker", "generation", "sequence", "step", "phase", "events", "pid", "leaving", "pace", "moves", "waits_for")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    PACE_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    worker: int
    generation: GenerationId
    sequence: int
    step: int
    phase: str
    events: _containers.RepeatedScalarFieldContainer[str]
    pid: int
    leaving: bool
    pace: Pace
    moves: int
    waits_for: str
    def __init__(self, worker: _Optional[int] = ..., generation: _Optional[_Union[GenerationId, _Mapping]] = ..., sequence: _Optional[int] = ..., step: _Optional[int] = ..., phase: _Optional[str] = ..., events: _Optional[_Iterable[str]] = ..., pid: _Optional[int] = ..., leaving: _Optional[bool] = ..., pace: _Optional[_Union[Pace, _Mapping]] = ..., moves: _Optional[int] = ..., waits_for: _Optional[str] = ...) -> None: ...

class Pace(_message.Message):
    __slots__ = ("steps", "lanes", "data_s", "compute_s", "apply_s")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    DATA_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    APPLY_S_FIELD_NUMBER: _ClassVar[int]
    steps: int
    lanes: int
    data_s: float
    compute_s: float
    apply_s: float
    def __init__(self, steps: _Optional[int] = ..., lanes: _Optional[int] = ..., data_s: _Optional[float] = ..., compute_s: _Optional[float] = ..., apply_s: _Optional[float] = ...) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("lease", "unknown", "incarnation", "time")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    lease: float
    unknown: bool
    incarnation: int
    time: float
    def __init__(self, lease: _Optional[float] = ..., unknown: _Optional[bool] = ..., incarnation: _Optional[int] = ..., time: _Optional[float] = ...) -> None: ...

class FollowRequest(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: int
    def __init__(self, worker: _Optional[int] = ...) -> None: ...

class Directive(_message.Message):
    __slots__ = ("formed", "stop", "end", "regroup", "dismiss", "save")
    FORMED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    REGROUP_FIELD_NUMBER: _ClassVar[int]
    DISMISS_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    formed: Generation
    stop: StopDirective
    end: EndDirective
    regroup: RegroupDirective
    dismiss: DismissDirective
    save: SaveDirective
    def __init__(self, formed: _Optional[_Union[Generation, _Mapping]] = ..., stop: _Optional[_Union[StopDirective, _Mapping]] = ..., end: _Optional[_Union[EndDirective, _Mapping]] = ..., regroup: _Optional[_Union[RegroupDirective, _Mapping]] = ..., dismiss: _Optional[_Union[DismissDirective, _Mapping]] = ..., save: _Optional[_Union[SaveDirective, _Mapping]] = ...) -> None: ...

class RegroupDirective(_message.Message):
    __slots__ = ("generation", "at_boundary", "saves")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    AT_BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    SAVES_FIELD_NUMBER: _ClassVar[int]
    generation: GenerationId
    at_boundary: bool
    saves: bool
    def __init__(self, generation: _Optional[_Union[GenerationId, _Mapping]] = ..., at_boundary: _Optional[bool] = ..., saves: _Optional[bool] = ...) -> None: ...

class DismissDirective(_message.Message):
    __slots__ = ("worker", "pid", "incarnation")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    worker: int
    pid: int
    incarnation: int
    def __init__(self, worker: _Optional[int] = ..., pid: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class SaveDirective(_message.Message):
    __slots__ = ("generation", "request")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    generation: GenerationId
    request: str
    def __init__(self, generation: _Optional[_Union[GenerationId, _Mapping]] = ..., request: _Optional[str] = ...) -> None: ...

class StateReport(_message.Message):
    __slots__ = ("worker", "pid", "generation", "cursor", "symptom", "saved", "has_trained")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    SYMPTOM_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    HAS_TRAINED_FIELD_NUMBER: _ClassVar[int]
    worker: int
    pid: int
    generation: GenerationId
    cursor: Cursor
    symptom: str
    saved: bool
    has_trained: bool
    def __init__(self, worker: _Optional[int] = ..., pid: _Optional[int] = ..., generation: _Optional[_Union[GenerationId, _Mapping]] = ..., cursor: _Optional[_Union[Cursor, _Mapping]] = ..., symptom: _Optional[str] = ..., saved: _Optional[bool] = ..., has_trained: _Optional[bool] = ...) -> None: ...

class StateReply(_message.Message):
    __slots__ = ("refusal", "unknown", "incarnation")
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    refusal: str
    unknown: bool
    incarnation: int
    def __init__(self, refusal: _Optional[str] = ..., unknown: _Optional[bool] = ..., incarnation: _Optional[int] = ...) -> None: ...

class StopDirective(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class EndDirective(_message.Message):
    __slots__ = ("failure",)
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    failure: str
    def __init__(self, failure: _Optional[str] = ...) -> None: ...

class FailureReport(_message.Message):
    __slots__ = ("worker", "failure", "pid", "generation")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    worker: int
    failure: str
    pid: int
    generation: GenerationId
    def __init__(self, worker: _Optional[int] = ..., failure: _Optional[str] = ..., pid: _Optional[int] = ..., generation: _Optional[_Union[GenerationId, _Mapping]] = ...) -> None: ...

class CompleteRequest(_message.Message):
    __slots__ = ("worker", "weights_digest", "result", "pid", "generation")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    worker: int
    weights_digest: str
    result: str
    pid: int
    generation: GenerationId
    def __init__(self, worker: _Optional[int] = ..., weights_digest: _Optional[str] = ..., result: _Optional[str] = ..., pid: _Optional[int] = ..., generation: _Optional[_Union[GenerationId, _Mapping]] = ...) -> None: ...

class CompleteReply(_message.Message):
    __slots__ = ("failure", "regroup")
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    REGROUP_FIELD_NUMBER: _ClassVar[int]
    failure: str
    regroup: bool
    def __init__(self, failure: _Optional[str] = ..., regroup: _Optional[bool] = ...) -> None: ...

class ExitReport(_message.Message):
    __slots__ = ("slot", "pid", "host", "exit_code", "signal", "step", "phase", "lane", "epoch", "samples", "sample_count")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    slot: int
    pid: int
    host: str
    exit_code: int
    signal: int
    step: int
    phase: str
    lane: int
    epoch: int
    samples: _containers.RepeatedScalarFieldContainer[int]
    sample_count: int
    def __init__(self, slot: _Optional[int] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., exit_code: _Optional[int] = ..., signal: _Optional[int] = ..., step: _Optional[int] = ..., phase: _Optional[str] = ..., lane: _Optional[int] = ..., epoch: _Optional[int] = ..., samples: _Optional[_Iterable[int]] = ..., sample_count: _Optional[int] = ...) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class ResizeRequest(_message.Message):
    __slots__ = ("workers", "servers", "reason")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    workers: int
    servers: int
    reason: str
    def __init__(self, workers: _Optional[int] = ..., servers: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class ResizeReply(_message.Message):
    __slots__ = ("refusal",)
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    refusal: str
    def __init__(self, refusal: _Optional[str] = ...) -> None: ...

class SaveRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: str
    def __init__(self, request: _Optional[str] = ...) -> None: ...

class SaveReply(_message.Message):
    __slots__ = ("refusal", "step")
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    refusal: str
    step: int
    def __init__(self, refusal: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class OutcomeRequest(_message.Message):
    __slots__ = ("timeout", "processes", "workers")
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    timeout: float
    processes: _containers.RepeatedCompositeFieldContainer[Process]
    workers: int
    def __init__(self, timeout: _Optional[float] = ..., processes: _Optional[_Iterable[_Union[Process, _Mapping]]] = ..., workers: _Optional[int] = ...) -> None: ...

class OutcomeReply(_message.Message):
    __slots__ = ("ended", "failure", "result", "expelled", "vacant", "workers")
    ENDED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    EXPELLED_FIELD_NUMBER: _ClassVar[int]
    VACANT_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    ended: bool
    failure: str
    result: str
    expelled: _containers.RepeatedCompositeFieldContainer[Process]
    vacant: _containers.RepeatedCompositeFieldContainer[Vacancy]
    workers: int
    def __init__(self, ended: _Optional[bool] = ..., failure: _Optional[str] = ..., result: _Optional[str] = ..., expelled: _Optional[_Iterable[_Union[Process, _Mapping]]] = ..., vacant: _Optional[_Iterable[_Union[Vacancy, _Mapping]]] = ..., workers: _Optional[int] = ...) -> None: ...

class Process(_message.Message):
    __slots__ = ("slot", "pid")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    slot: int
    pid: int
    def __init__(self, slot: _Optional[int] = ..., pid: _Optional[int] = ...) -> None: ...

class Vacancy(_message.Message):
    __slots__ = ("slot", "after", "restore")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    RESTORE_FIELD_NUMBER: _ClassVar[int]
    slot: int
    after: float
    restore: bool
    def __init__(self, slot: _Optional[int] = ..., after: _Optional[float] = ..., restore: _Optional[bool] = ...) -> None: ...

class EventsRequest(_message.Message):
    __slots__ = ("offset", "follow")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    offset: int
    follow: bool
    def __init__(self, offset: _Optional[int] = ..., follow: _Optional[bool] = ...) -> None: ...

class EventsReply(_message.Message):
    __slots__ = ("lines", "offset")
    LINES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    lines: _containers.RepeatedScalarFieldContainer[str]
    offset: int
    def __init__(self, lines: _Optional[_Iterable[str]] = ..., offset: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("workers", "wanted", "wanted_servers")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    WANTED_SERVERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerState]
    wanted: int
    wanted_servers: int
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerState, _Mapping]]] = ..., wanted: _Optional[int] = ..., wanted_servers: _Optional[int] = ...) -> None: ...

class WorkerState(_message.Message):
    __slots__ = ("worker", "pid", "host", "step", "phase", "waits_for", "silent_s", "leaving")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    SILENT_S_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    worker: int
    pid: int
    host: str
    step: int
    phase: str
    waits_for: str
    silent_s: float
    leaving: bool
    def __init__(self, worker: _Optional[int] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., step: _Optional[int] = ..., phase: _Optional[str] = ..., waits_for: _Optional[str] = ..., silent_s: _Optional[float] = ..., leaving: _Optional[bool] = ...) -> None: ...
