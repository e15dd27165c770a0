"""The layer graph: what the cost models and the search know of a model, as plain data.

Every quantity is for the *forward* of **one sample** unless the name says otherwise; an operator that is not
``batched`` (rotary tables, masks, parameter reshapes) costs the same for any micro-batch. Shapes and dtypes are
those of the trace, so bytes are exact. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import networkx as nx

OperatorKind = Literal[
    "gemm",
    "grouped_gemm",
    "attention",
    "convolution",
    "embedding",
    "normalization",
    "softmax",
    "cross_entropy",
    "elementwise",
    "reduction",
    "copy",
    "view",
    "other",
]
CollectiveName = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """``groups`` products [m, k] x [k, n]. Batched operators: ``m`` (or ``groups``, if ``batch_in_groups``) grows
    with the micro-batch."""

    m: int
    n: int
    k: int
    groups: int = 1
    batch_in_groups: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Scaled dot-product attention of one sample: ``heads`` queries heads over ``key_value_heads``."""

    heads: int
    key_value_heads: int
    query_length: int
    key_length: int
    head_dim: int
    value_dim: int
    causal: bool
    masked: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One node of the graph, priced by shape.

    ``read_bytes``/``written_bytes`` are activations moved by the forward; ``parameter_bytes`` are read whole.
    ``saved_bytes`` are what the backward keeps of *this operator's output or internals* (a value that two
    operators save is counted once, at its producer; views own nothing). ``core`` marks the attention core, which
    selective recompute drops (Korthikanti et al. 2022). ``backward_flops`` counts the gradients that are needed.
    """

    name: str
    target: str
    kind: OperatorKind
    dtype: str
    batched: bool = True
    flops: float = 0.0
    backward_flops: float = 0.0
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    parameter_bytes: float = 0.0
    saved_bytes: float = 0.0
    core: bool = False
    needs_backward: bool = True
    gemm: Gemm | None = None
    attention: Attention | None = None
    module_path: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a layer; ``elements`` on one rank. ``shared`` names the tied group, "" if none. ``expert``: of
    an expert, which an expert axis gives to some ranks alone. ``summed``: under a tensor degree, ranks hold summands of
    its gradient, which are summed once a step."""

    role: str
    elements: int
    element_bytes: int
    trainable: bool = True
    shared: str = ""
    expert: bool = False
    summed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective over the tensor axis, or, with ``ranks``, over another ``axis``: so many ranks that are ``stride``
    apart.

    ``bytes_per_sample`` (or, for ``batched=False``, whole) is the full tensor: what an all-reduce reduces, what an
    all-gather ends with and what a reduce-scatter starts from.
    """

    name: CollectiveName
    phase: Literal["forward", "backward"]
    bytes_per_sample: float
    batched: bool = True
    operator: str = ""
    ranks: int = 0
    stride: int = 1
    axis: Literal["tensor", "context", "expert"] = "tensor"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """What all layers of one kind have in common: their operators, in graph order, and parameters.

    The kind under a tensor degree is again a LayerKind: local operators and parameters, and ``collectives``.
    ``input_bytes`` is the activations that enter the layer, per sample: what full recompute keeps. ``checkpointed``:
    the model itself asks that its layers be recomputed.
    """

    operators: tuple[Operator, ...]
    parameters: tuple[Parameter, ...] = ()
    collectives: tuple[Collective, ...] = ()
    input_bytes: float = 0.0
    checkpointed: bool = False

    def policy(self, chosen: str) -> str:
        """The recompute policy of its layers where ``chosen`` is what memory leaves them."""
        return "full" if self.checkpointed else chosen

    @property
    def saved_bytes(self) -> float:
        """Activations kept for the backward, bytes per sample (batched operators only)."""
        return sum(op.saved_bytes for op in self.operators if op.batched)

    @property
    def flops(self) -> float:
        """Forward FLOPs per sample (batched operators only)."""
        return sum(op.flops for op in self.operators if op.batched)

    @property
    def parameter_elements(self) -> int:
        return sum(p.elements for p in self.parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer: a name from the user's module tree, its kind's index, its graph nodes in order, and the names of
    its parameters, aligned with its kind's ``parameters``. Equal kinds have node lists that correspond one to
    one."""

    name: str
    kind: int
    nodes: tuple[str, ...]
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """One value that layer ``source`` makes and layer ``targets`` (ascending, all after ``source``) read.

    Only values that must be sent between stages: what depends on no parameter is recomputed where it is used.
    ``batched`` False: the value is the same size for any micro-batch (a relative position bias).
    """

    value: str
    source: int
    targets: tuple[int, ...]
    bytes_per_sample: float
    differentiable: bool = True
    batched: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGraph:
    """The model as layers in topological order. ``name`` is the model's. ``keep_order``: pairs of layers (earlier,
    later) that touch one memory which either writes in place: they stay in that order, whatever values say.
    ``layer_digests``: of each layer's own graph, as ``fingerprint`` is of the whole; () where they were not taken."""

    name: str
    layers: tuple[Layer, ...]
    kinds: tuple[LayerKind, ...]
    edges: tuple[Edge, ...]
    tokens_per_sample: int
    dtype: str
    fingerprint: str
    keep_order: tuple[tuple[int, int], ...] = ()
    layer_digests: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """Distinct parameter elements: tied ones once."""
        return self._count(lambda p: True)

    @property
    def trainable_parameters(self) -> int:
        return self._count(lambda p: p.trainable)

    def _count(self, wanted: Callable[[Parameter], bool]) -> int:
        seen: set[str] = set()
        total = 0
        for layer in self.layers:
            for parameter in self.kinds[layer.kind].parameters:
                if parameter.shared in seen or not wanted(parameter):
                    continue
                if parameter.shared:
                    seen.add(parameter.shared)
                total += parameter.elements
        return total

    def crossing(self, cut: int) -> Iterable[Edge]:
        """Values that cross between layer ``cut`` - 1 and layer ``cut`` (1 <= cut < number of layers)."""
        return (edge for edge in self.edges if edge.source < cut <= edge.targets[-1])

    def crossing_bytes(self, cut: int) -> float:
        """Bytes per sample that cross ``cut`` forward; each value once."""
        return sum(edge.bytes_per_sample for edge in self.crossing(cut))

    def digraph(self) -> nx.DiGraph:
        """The graph in networkx: nodes are layer indices, edges carry ``bytes_per_sample``."""
        import networkx as nx

        graph: nx.DiGraph = nx.DiGraph(name=self.name)
        for index, layer in enumerate(self.layers):
            graph.add_node(index, layer=layer, kind=self.kinds[layer.kind])
        for edge in self.edges:
            for target in edge.targets:
                known = graph.get_edge_data(edge.source, target, {"bytes_per_sample": 0.0})
                graph.add_edge(edge.source, target, bytes_per_sample=known["bytes_per_sample"] + edge.bytes_per_sample)
        return graph
