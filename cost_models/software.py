"""What the software costs on top of the hardware: a named profile a generation, not a factor a model.

- ``gap_s``: between two kernels of a full queue (start and drain), GPU time; measured as 1 to 2 us on V100 to H100 in
  public profiles.
- ``element_wise_traffic``: share of the element-wise and normalisation bytes that reaches memory. Eager kernels move
  every operand (1.0); torch.compile fuses chains, about 0.45 of the bytes of a Llama block remain.
- ``dispatch``: how many times ``Device.launch_s`` the host spends on one operator; the device waits when the kernels
  of a layer are shorter than that. CUDA graphs make it 0.
- ``attention``: rate of the fused core over FlashAttention-2's. Version 1 and its Triton port reached 100 to 120 TFLOPS
  on A100 where version 2 reaches 190 (Dao 2023, figure 4), so 0.55; cuDNN's and version 3 on Hopper about 1.5.
- ``tensor_overlap``: share of the tensor axis's collectives that hides behind the products they belong to (user
  buffers, asynchronous tensor parallelism). Our own runtime waits for them: 0.
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


EAGER = Software(name="eager")
EAGER_FLASH_1 = Software(name="eager, FlashAttention 1 (2023)", attention=0.55)
TRANSFORMER_ENGINE = Software(
    name="Transformer Engine (2024)", element_wise_traffic=0.5, dispatch=0.6, attention=1.5, tensor_overlap=0.6
)
COMPILED = Software(name="compiled", element_wise_traffic=0.45, dispatch=0.6)
COMPILED_ASYNC_TENSOR = Software(
    name="compiled, asynchronous tensor parallelism", element_wise_traffic=0.45, dispatch=0.6, tensor_overlap=0.3
)
