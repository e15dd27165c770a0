"""What the software costs on top of the hardware: a named profile a generation, not a factor a model.

- ``gap_s``: between two kernels of a full queue (start and drain), GPU time; measured as 1 to 2 us on V100 to H100 in
  public profiles.
- ``element_wise_traffic``: share of the element-wise and normalisation bytes that reaches memory. Eager kernels move
  every operand (1.0), and autocast of 2023 casts some once more (1.25); torch.compile fuses chains, about 0.45 of the
  bytes of a Llama block remain.
- ``dispatch``: how many times ``Device.launch_s`` the host spends on one operator; the device waits when the kernels
  of a layer are shorter than that. CUDA graphs make it 0.
- ``attention``: rate of the fused core over FlashAttention-2's. Version 1 and its Triton port reached 100 to 120 TFLOPS
  on A100 where version 2 reaches 190 (Dao 2023, figure 4), so 0.58; cuDNN's and version 3 on Hopper about 1.5.
- ``tensor_overlap``: share of the tensor axis's collectives that hides behind the products they belong to (user
  buffers, asynchronous tensor parallelism). Our own runtime waits for them: 0.
- ``data_overlap``: whether the data axis's collectives run beside the compute. Megatron's of 2021 did not.
- ``data_links``: share of the links' rate that the data axis's collectives reach. NCCL on large buckets: 1. DeepSpeed
  of 2021 and 2022 launched one blocking collective a parameter or a rank's slice, with copies around it: about a rail
  of eight, 0.09 to 0.17 (its ZeRO-3 of Narayanan et al. 2021 takes the same 66.7 s on 768 and on 1536 GPUs, twice the
  GPUs and half the compute: all that remains are the gathers).
- ``accumulation``: passes over the gradients, in units of :func:`compute.gradient_accumulation_s`, a micro-batch. 1:
  read, read, write; 0: the weight product adds in place (Megatron since 2022); DeepSpeed's 16-bit pipeline engine: 3.
- ``recompute_stops_early``: torch's checkpoint (since 2.0, not reentrant) ends a recompute as soon as the last saved
  tensor is there: the last product of a layer is not run again.
- ``step_s``: of the host, once a step, while the device waits: the norm for clipping is read back, an optimizer that is
  not fused goes over the tensors one by one. 30 ms in Composer of 2023: its steps of one micro-batch are longer than
  1/n of those of n by as much, whatever the model.
- ``expert_overlap``: share of dispatch and combine that runs beside another micro-batch's compute, where virtual
  stages give a rank a second one to run (Megatron's combined forward and backward needs them).
- ``expert_wait_s``, ``expert_launch_s``: of the host, a layer with experts in each direction: routing without dropped
  tokens reads back how many each expert got before it can launch the products, and the device runs dry; then each
  local expert's products and casts are launched one by one. 1 ms and 0.07 ms an expert in Megatron Bridge to 26.04
  [Empirical: Qwen3-30B's layers take 8.8, 12.6 and 22 ms with micro-batches of 1, 4 and 8, a constant and a slope, and
  32 local experts cost DeepSeek-V3 5 ms more than 4]. Graphs: 0.
- ``routed_passes``: reads or writes of all routed rows, a layer in each direction, that no product and no activation
  does: permuted, into and out of the dispatch buffers, sorted by expert, cast, and all of it back. 10 where each is a
  kernel [Empirical], half of it where permutation and casts are fused into the products (since 26.06).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """One generation of software; see the module for the fields."""

    name: str
    gap_s: float = 1.5e-6
    element_wise_traffic: float = 1.0
    dispatch: float = 1.0
    attention: float = 1.0
    tensor_overlap: float = 0.0
    data_overlap: bool = True
    data_links: float = 1.0
    accumulation: float = 1.0
    recompute_stops_early: bool = False
    step_s: float = 0.0
    expert_overlap: float = 0.0
    expert_wait_s: float = 0.0
    expert_launch_s: float = 0.0
    routed_passes: float = 0.0


EAGER = Software(name="eager")
EAGER_FLASH_1 = Software(
    name="eager FSDP, FlashAttention 1 (2023)",
    element_wise_traffic=1.25,
    attention=0.58,
    recompute_stops_early=True,
    step_s=0.03,
)
MEGATRON_2021 = Software(name="Megatron-LM (2021)", data_overlap=False)
MEGATRON_2022 = Software(
    name="Megatron-LM (2022), gradients added in the weight product", data_overlap=False, accumulation=0.0
)
ONEFLOW = Software(
    name="OneFlow (2021), fused element-wise kernels", element_wise_traffic=0.75, dispatch=0.6, data_overlap=False
)
DEEPSPEED_ZERO_3 = Software(name="DeepSpeed ZeRO-3 (2021)", data_links=0.092)
DEEPSPEED_2021 = Software(name="DeepSpeed pipeline engine, ZeRO-1 (2021)", data_overlap=False, data_links=0.17)
DEEPSPEED_2022 = Software(
    name="DeepSpeed pipeline engine, ZeRO-1 (2022)", data_overlap=False, data_links=0.17, accumulation=3.0
)
TRANSFORMER_ENGINE = Software(
    name="Transformer Engine (2024)",
    element_wise_traffic=0.5,
    dispatch=0.6,
    attention=1.5,
    tensor_overlap=0.6,
    accumulation=0.0,
)
COMPILED = Software(name="compiled", element_wise_traffic=0.45, dispatch=0.6)
COMPILED_ASYNC_TENSOR = Software(
    name="compiled, asynchronous tensor parallelism", element_wise_traffic=0.45, dispatch=0.6, tensor_overlap=0.3
)
BRIDGE = Software(
    name="Megatron Bridge (25.09 to 26.04)",
    element_wise_traffic=0.5,
    dispatch=0.6,
    attention=1.5,
    tensor_overlap=0.8,
    accumulation=0.0,
    expert_overlap=0.6,
    expert_wait_s=1.0e-3,
    expert_launch_s=7.0e-5,
    routed_passes=10.0,
)
BRIDGE_GRAPHS = Software(
    name="Megatron Bridge (since 26.06), CUDA graphs",
    element_wise_traffic=0.5,
    dispatch=0.0,
    attention=1.5,
    tensor_overlap=0.8,
    accumulation=0.0,
    expert_overlap=0.6,
    routed_passes=5.0,
)


def mode(*, compiled: bool) -> Software:
    """What our own programs run on: torch in eager mode, or stages under torch.compile.

    A compiled stage's activations are priced as eager mode saves them: torch's partitioner keeps fewer bytes (of a
    Llama block 0.71, of a GPT-2 block 0.57, measured with torch 2.13), but which hangs on its version and on sizes.
    """
    return COMPILED if compiled else EAGER
