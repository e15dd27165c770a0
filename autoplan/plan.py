"""Strategy, Stage and Plan: what was decided, as plain data with versioned JSON.

Imports nothing of ours but the error family; a file that is read is checked by :mod:`autoplan.consistency`. A *data*
axis splits the batch, a *tensor* axis splits matrices, a *pipeline* axis splits layers. Rank order is fixed here,
because the cost models' placement of axes on the hierarchy and the runtime's groups must agree: tensor is innermost
(nearest links), then context, then data, then pipeline.
A plan file holds no clock and no host: equal inputs give equal bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from autoplan.errors import PlanFileError
from autoplan.plan_file import DIGEST_SINCE, REVISION, NoRevisionError, digest_of, dump, migrate, too_new
from autoplan.whole_file import write_whole

if TYPE_CHECKING:  # at run time only where a file is read: a third of what `autoplan --help` would import
    from pydantic import ConfigDict, TypeAdapter

SCHEMA_VERSION = 1
# Axes whose collectives layers wait for: together they are the step's term ``tensor_communication``.
AXES_IN_LAYERS = ("tensor", "context", "expert")
_STRICT: ConfigDict = {"extra": "forbid", "strict": False}


class Coordinates(NamedTuple):
    """Where a rank stands on the mesh."""

    pipeline: int
    data: int
    tensor: int
    context: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """Degrees of every axis and how the batch runs through them.

    ``micro_batch_size`` is samples in one micro-batch on one data-parallel rank, so the global batch is
    ``data * micro_batch_size * micro_batches``. ``zero_stage``: 0 nothing, 1 optimizer state, 2 and gradients,
    3 and parameters sharded over the data axis (Rajbhandari et al. 2020).
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    virtual_stages: int = 1
    context: int = 1
    expert: int = 1
    zero_stage: int = 0
    micro_batch_size: int = 1
    micro_batches: int = 1
    schedule: str = "1f1b"
    sequence_parallel: bool = False

    @property
    def gpus(self) -> int:
        """GPUs that the plan uses (expert parallelism lives inside data and context)."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def global_batch(self) -> int:
        """Samples in one optimizer step."""
        return self.data * self.micro_batch_size * self.micro_batches

    @property
    def axes(self) -> tuple[str, ...]:
        """The kinds of parallelism in use, sharded state included."""
        degrees = {
            "data": self.data,
            "tensor": self.tensor,
            "pipeline": self.pipeline,
            "context": self.context,
            "expert": self.expert,
        }
        used = tuple(name for name, degree in degrees.items() if degree > 1)
        return (*used, "zero") if self.zero_stage and self.data > 1 else used

    def coordinates(self, rank: int) -> Coordinates:
        """Mesh coordinates of ``rank``; ``rank`` must be below ``gpus``."""
        stage, rest = divmod(rank, self.data * self.context * self.tensor)
        replica, tensor = divmod(rest, self.tensor)
        data, context = divmod(replica, self.context)
        return Coordinates(stage, data, tensor, context)

    def rank(self, at: Coordinates) -> int:
        """Inverse of :meth:`coordinates`."""
        return ((at.pipeline * self.data + at.data) * self.context + at.context) * self.tensor + at.tensor

    @property
    def over_replicas(self) -> Strategy:
        """The same ranks with one axis of all that hold the same weights, data and context, in place of data."""
        return dataclasses.replace(self, data=self.data * self.context, context=1)

    def describe(self) -> str:
        """Short name such as ``data 2 x tensor 4, ZeRO-1``."""
        degrees = [
            f"{name} {getattr(self, name)}"
            for name in ("data", "pipeline", "tensor", "context", "expert")
            if getattr(self, name) > 1
        ]
        text = " x ".join(degrees) or "one GPU"
        return f"{text}, ZeRO-{self.zero_stage}" if self.zero_stage and self.data > 1 else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One pipeline stage: layers ``first_layer`` to ``last_layer``, both included.

    ``recompute`` counts the layers under each policy (none, selective, full), ``layer_recompute`` names each layer's.
    ``memory_terms`` are bytes on the worst GPU of the stage and sum to ``peak_memory_bytes``. Times are for one
    micro-batch (``send_s``: of its activations to the next stage, or of their gradients back), but for
    ``synchronise_s`` and ``optimizer_s``, which come once a step, after the last micro-batch. ``weight_gradients_s`` is
    the part of ``backward_s`` that a zero-bubble schedule puts off, else 0. Stages that share a GPU repeat its memory.
    ``forward_terms`` and ``backward_terms`` are seconds that sum to ``forward_s`` and ``backward_s`` (empty in older
    files); ``hidden_s`` is what transfers of the data axis take in a step beside the computation. ``flops`` are the
    model's own, without recompute: forward and backward of one micro-batch, by all GPUs that share it (0 in older
    files). ``device`` names the cluster's group that runs the stage, "" where all GPUs are of one kind.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    first_layer: int
    last_layer: int
    recompute: dict[str, int]
    peak_memory_bytes: float
    memory_terms: dict[str, float]
    forward_s: float
    backward_s: float
    parameters: int
    layer_recompute: tuple[str, ...] = ()
    send_s: float = 0.0
    synchronise_s: float = 0.0
    optimizer_s: float = 0.0
    weight_gradients_s: float = 0.0
    forward_terms: dict[str, float] = field(default_factory=dict)
    backward_terms: dict[str, float] = field(default_factory=dict)
    hidden_s: float = 0.0
    flops: float = 0.0
    device: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What the cost models say of one step. ``time_terms`` are seconds and sum to ``step_time_s``.

    ``host_load_bytes``: of a node's memory while each of its processes holds the whole model, as it is given to
    ``compile`` (nothing, where parameters are on meta).
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    step_time_s: float
    tokens_per_s: float
    model_tflops_per_gpu: float
    mfu: float
    peak_memory_bytes: float
    bubble_fraction: float
    exposed_communication_s: float
    time_terms: dict[str, float]
    host_load_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Proof of the search: ``status`` is "optimal" only when it was proven, else "feasible".

    The search minimises the closed form of the step time under 1F1B and GPipe, over all splits into stages, and the
    simulated step under interleaved and zero-bubble schedules, of the most even split alone; the schedule simulator
    then ranks the ``confirmed`` candidates that come near the least. Of what is minimised, ``objective_s`` is the
    chosen plan's, ``best_s`` the least, ``objective_bound_s`` what no candidate goes below, and ``gap`` the part of
    ``best_s`` that is not proven. In the simulator, no candidate's step is shorter than ``lower_bound_s``, and the
    chosen plan's is at most ``simulated_gap`` of itself longer (2% of that may be the price of less parallelism).
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    status: str
    lower_bound_s: float
    gap: float
    considered: int
    pruned_by_memory: int
    pruned_by_bound: int
    solved: int
    solver: str
    objective_s: float = 0.0
    best_s: float = 0.0
    objective_bound_s: float = 0.0
    simulated_gap: float = 0.0
    confirmed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis of the mesh in words and numbers, for ``explain``.

    ``bytes_per_step`` is what one GPU sends in a step; ``exposed_s`` is the part of its time that nothing hides. Both
    are of the stage with the longest period. ``link``: where groups of GPUs have different ones, ``LINK on GROUP; LINK
    on GROUP`` (:meth:`link_on`).
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: str
    degree: int
    splits: str
    collective: str
    times_per_step: int
    bytes_per_step: float
    exposed_s: float
    link: str

    def link_on(self, group: str) -> str:
        """The link that GPUs of ``group`` communicate over."""
        on = f" on {group}"
        return next((part.removesuffix(on) for part in self.link.split("; ") if part.endswith(on)), self.link)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """The best plan of a family that lost. ``step_time_s`` is None where none of the family fits."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    family: str
    strategy: Strategy
    step_time_s: float | None
    peak_memory_bytes: float
    short_by_bytes: float
    why_not: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherAnswer:
    """The plan that would be made under another ``condition``, such as "24.0 GiB more on each GPU".

    ``quantity`` is what changes (``memory_bytes`` of a GPU, ``intra_bytes_per_s`` or ``inter_bytes_per_s`` of its links
    inside a node and between nodes), ``value`` what it would be; ``step_time_s`` is None where nothing fits.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    condition: str
    quantity: str
    value: float
    strategy: Strategy | None
    step_time_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """Where another family's plan would win: with ``quantity`` (``intra_bytes_per_s`` or ``inter_bytes_per_s``) at
    ``factor`` times what it is, ``value``, ``strategy`` takes ``step_time_s`` and the plan longer. With
    ``memory_bytes``: where a plan that does not fit would, and how long it then takes, whether that wins or not.

    All keep their stages; a search there may find better ones, and so a plan that wins sooner. Without a strategy:
    none does at ``factor`` times, nor at 1 / ``factor``.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    quantity: str
    value: float
    factor: float
    strategy: Strategy | None
    step_time_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSummary:
    """The model a plan was made for. ``fingerprint`` is a hash of its graph: operators, shapes, dtypes, edges.

    ``layer_kinds``: of layers that are alike one hash, and which they are, such as "1-32" or "0, 33"; {} in older
    files. ``edges``: (from, to) of layers that hand a value on; () where each hands to the next alone, or nothing is
    known.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: str
    parameters: int
    trainable_parameters: int
    tokens_per_sample: int
    dtype: str
    layers: tuple[str, ...]
    fingerprint: str
    layer_kinds: dict[str, str] = field(default_factory=dict)
    edges: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary:
    """Nodes of one kind in a cluster of several. ``gpus_used`` of its GPUs run the plan, as ranks from ``first_rank``
    on (0 where none does). ``peak_flops``: FLOP/s of one in the plan's precision (0 in older files)."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: str
    device: str
    nodes: int
    gpus_per_node: int
    memory_bytes: float
    gpus_used: int
    first_rank: int
    peak_flops: float = 0.0

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSummary:
    """The cluster a plan was made for. With ``groups`` it has several kinds; ``nodes`` and ``gpus_per_node`` then count
    all its GPUs in parts that every group is made of, and ``memory_bytes`` is the largest GPU's. ``fingerprint`` is a
    hash of every figure of it that plans are made from ("" in older files). ``peak_flops``: what one GPU computes in
    the plan's precision at most, FLOP/s, which ``mfu`` is a share of (0 in older files, and where groups say it)."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    spec: str
    device: str
    nodes: int
    gpus_per_node: int
    memory_bytes: float
    groups: tuple[GroupSummary, ...] = ()
    fingerprint: str = ""
    peak_flops: float = 0.0

    def describe(self, times: str = " x ") -> str:
        """The machines in a few words, such as ``2 x 8 H100-80GB-SXM`` or ``8 H100-80GB-SXM + 2 x 4 old``; ``times``
        goes between nodes and the GPUs of one."""
        parts = [(group.nodes, group.gpus_per_node, group.name) for group in self.groups]
        named = parts or [(self.nodes, self.gpus_per_node, self.device)]
        return " + ".join(f"{f'{nodes}{times}' if nodes > 1 else ''}{gpus} {name}" for nodes, gpus, name in named)

    @property
    def groups_used(self) -> tuple[GroupSummary, ...]:
        """The groups that run the plan, in rank order; () where all machines are of one kind."""
        return tuple(sorted((g for g in self.groups if g.gpus_used), key=lambda group: group.first_rank))

    @property
    def ranks_of_groups(self) -> str:
        """Which ranks run on which kind, in words."""
        return ", ".join(f"{g.first_rank} to {g.first_rank + g.gpus_used - 1} on {g.name}" for g in self.groups_used)

    @property
    def machines_used(self) -> tuple[tuple[int, int], ...]:
        """(machines, GPUs of each) of every group that is used, in rank order; () where all are of one kind."""
        return tuple((-(-group.gpus_used // group.gpus_per_node), group.gpus_per_node) for group in self.groups_used)

    def memory_of(self, stage: Stage) -> float:
        """Bytes of the GPUs that run ``stage``: of the smallest, where they are of several kinds."""
        named = [group.memory_bytes for group in self.groups if group.name in stage.device.split(" + ")]
        return min(named, default=self.memory_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A complete decision with its reasons. ``seconds`` is printed, never saved.

    ``compiled``: stages run under torch.compile, and are priced so (False in older files).
    ``crossings``: at which speed of links a plan that lost would win, of what was found on the way (() in older files,
    and where keys were forced). ``other_answers``: what the decision would be on other machines, where that was asked.
    ``first_revision``: of the file as it was first written; :attr:`unchecked` says what that leaves open.
    ``digest``: of all the rest, written with it, so that a file which was edited is known by it ("" in older files).
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    schema: int = SCHEMA_VERSION
    revision: int = REVISION
    first_revision: int = REVISION
    feasible: bool = True
    gpus: int
    gpus_used: int
    global_batch: int
    precision: str
    optimizer: str
    compiled: bool = False
    model: ModelSummary
    cluster: ClusterSummary
    strategy: Strategy
    forced: dict[str, Any] = field(default_factory=dict)
    stages: tuple[Stage, ...]
    predicted: Predicted
    certificate: Certificate
    case: str
    axes: tuple[Axis, ...]
    alternatives: tuple[Alternative, ...]
    assumptions: tuple[str, ...]
    crossings: tuple[Crossing, ...] = ()
    other_answers: tuple[OtherAnswer, ...] = ()
    digest: str = field(default="", compare=False)
    seconds: dict[str, float] = field(default_factory=dict, compare=False)

    @property
    def rank_stages(self) -> list[tuple[Stage, ...]]:
        """The stages of each pipeline rank: several with virtual stages."""
        return [self.stages[rank :: self.strategy.pipeline] for rank in range(self.strategy.pipeline)]

    @property
    def busiest(self) -> tuple[Stage, ...]:
        """The stages of the rank that works longest."""
        return max(self.rank_stages, key=lambda own: sum(stage.forward_s + stage.backward_s for stage in own))

    @property
    def unchecked(self) -> str:
        """What cannot be known of a plan whose file is an older one; "" where all of it was checked on reading."""
        if self.first_revision >= DIGEST_SINCE:
            return ""
        return (
            f"it was written as revision {self.first_revision}, before plan files had a digest; its parts agree where "
            "that can be known, and an edit of the rest goes unnoticed"
        )

    def to_dict(self, *, with_seconds: bool = False) -> dict[str, Any]:
        """The plan as JSON-ready data, keys in the order of the fields, with its digest."""
        data = json.loads(json.dumps(dataclasses.asdict(self)))
        if not with_seconds:
            del data["seconds"]
        return data | {"digest": digest_of(data)}

    def to_json(self, *, with_seconds: bool = False) -> str:
        """JSON text of :meth:`to_dict`, as :mod:`autoplan.plan_file` lays it out, with a final newline."""
        return dump(self.to_dict(with_seconds=with_seconds))

    @classmethod
    def from_json(cls, text: str, *, where: str = "plan") -> Plan:
        """Parse and check, also that the parts agree; files of older revisions are brought to this one's.

        Raises :class:`PlanFileError` naming the field.
        """
        try:
            data = json.loads(text, object_pairs_hook=_once)
        except (ValueError, RecursionError) as error:
            line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
            raise PlanFileError(
                f"not JSON: {error.msg if isinstance(error, json.JSONDecodeError) else error}",
                where=f"{where}{line}",
                attempt="write the file again with `autoplan plan MODEL --gpus SPEC -o plan.json`",
            ) from None
        version = data.get("schema") if isinstance(data, dict) else None
        if version != SCHEMA_VERSION:
            raise PlanFileError(
                f"this is no plan of schema {SCHEMA_VERSION}: "
                + (f"its schema is {version!r}" if version is not None else "it has no `schema`"),
                where=where,
                legal=f"a file that `autoplan plan -o` wrote, of schema {SCHEMA_VERSION}",
                attempt="make one with `autoplan plan MODEL --gpus SPEC -o plan.json`",
            )
        if data.get("feasible") is False:
            raise PlanFileError(
                "this file says that nothing fits; it holds no plan",
                where=where,
                attempt="see its `suggestions`, and plan again",
            )
        written = data
        try:
            data = migrate(data)
        except NoRevisionError as error:
            raise PlanFileError(
                f"{error}, and no revision of plan files",
                where=where,
                legal=f"a whole number: revisions 1 to {REVISION}; left out, it is 1",
                attempt="plan again, or mend the field",
            ) from None
        except ValueError as error:
            raise PlanFileError(
                f"this plan file is of another version of autoplan: {error}",
                where=where,
                legal=f"revisions 1 to {REVISION}",
                attempt="read it with a newer autoplan, or plan again with this one",
            ) from None
        problem = _read(written, data)
        if isinstance(problem, Plan):
            return problem
        raise PlanFileError(f"field `{problem[0]}`: {problem[1]}", where=where, attempt=_PLAN_AGAIN)

    def save(self, path: str | Path) -> Path:
        """Write the plan; beside and renamed, so that a reader never sees half of it."""
        write_whole(path, self.to_json())
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file; raises :class:`PlanFileError`."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not a text file"
            raise PlanFileError(
                f"cannot read the plan: {reason}",
                where=str(path),
                attempt="make one with `autoplan plan MODEL --gpus SPEC -o plan.json`",
            ) from None
        return cls.from_json(text, where=str(path))

    def explain(self) -> str:
        """What was chosen, and why not less or more, as text of 80 columns."""
        from autoplan.explain import explain  # explain reads plans; a plan only lends it its name

        return explain(self)

    def _repr_html_(self) -> str:
        from autoplan.report.notebook import plan_html  # reports read plans; a notebook asks plans to show themselves

        return plan_html(self)


# One who edits a file wants another plan: the way to it says what may be said, and prices the rest anew.
_PLAN_AGAIN = (
    "take the edit back, or plan again: `autoplan plan MODEL --gpus SPEC --strategy KEY=VALUE -o plan.json` makes the "
    "plan that you want, with the figures that go with it"
)


def _read(written: dict[str, Any], data: dict[str, Any]) -> Plan | tuple[str, str]:
    """``data``, what a file has ``written`` brought to the newest revision, as a plan; or the field that is wrong, and
    how."""
    from pydantic import ValidationError

    from autoplan.consistency import first_problem, missing  # only where a file is read: it knows the schedules

    try:
        plan = _adapter().validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        return ".".join(str(part) for part in first["loc"]) or "plan", first["msg"]
    revision = written.get("revision", 1)
    if newer := too_new(written):
        return "revision", f"{revision}, but files have a `{newer[0]}` since revision {newer[1]}"
    problem = first_problem(plan)
    if problem is None and revision == REVISION:
        problem = next(missing(written, plan.to_dict()), None)
    if problem is None and (plan.digest or revision >= DIGEST_SINCE) and plan.digest != digest_of(written):
        problem = "digest", "is of other contents: some field was changed after autoplan wrote the file"
    return problem or plan


@functools.cache
def _adapter() -> TypeAdapter[Plan]:
    from pydantic import TypeAdapter

    return TypeAdapter(Plan)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object none of whose keys is there twice: of two values, neither can be trusted."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key `{next(name for name in names if names.count(name) > 1)}` is there twice")
    return found
