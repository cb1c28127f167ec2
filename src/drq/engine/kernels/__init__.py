"""Convolutions of the paper's encoder as CUDA kernels, close to the memory's speed; and small things that PyTorch
takes many launches for, in one or two each: storing a transition, gathering a batch, bias and ReLU or
max-pool, Adam. `residual` has those of Rainbow's encoder, of 64 and 128 channels, which arithmetic limits more.

What limits a convolution of 32 channels is moving bytes: a library re-reads every pixel nine times through the
second-level cache, and adds bias and ReLU in further passes. These kernels hold a tile and its margin in shared memory,
read it there nine times, and multiply on the tensor cores; the first layer reads single uint8 frames straight from the
replay, stacks and shifts them while loading, and serves two networks at once. They are CUDA C++, compiled at first use
by the NVRTC inside PyTorch; `reference` is the same in plain PyTorch. `benchmarks/kernels.py` measures both.
"""

from .activation import bias_kernels, bias_pool, bias_relu
from .adam import Adam, adam_kernels
from .conv_pool import conv_pool, conv_pool_gradient_kernels, conv_pool_suits
from .conv_same import Weights
from .encoder import encode_views, encode_views_two, prepare, supported
from .gathering import MOST_VIEWS, stacked_kernel, stacked_views, transitions, transitions_kernel
from .residual import InTurn, Passes, Side, encode_passes, launch_all, most_together
from .runtime import MOST_ELEMENTS, KernelError, available, compile_together
from .storing import Store, store_kernel

__all__ = [
    "MOST_ELEMENTS",
    "MOST_VIEWS",
    "Adam",
    "InTurn",
    "KernelError",
    "Passes",
    "Side",
    "Store",
    "Weights",
    "adam_kernels",
    "available",
    "bias_kernels",
    "bias_pool",
    "bias_relu",
    "compile_together",
    "conv_pool",
    "conv_pool_gradient_kernels",
    "conv_pool_suits",
    "encode_passes",
    "encode_views",
    "encode_views_two",
    "launch_all",
    "most_together",
    "prepare",
    "stacked_kernel",
    "stacked_views",
    "store_kernel",
    "supported",
    "transitions",
    "transitions_kernel",
]
