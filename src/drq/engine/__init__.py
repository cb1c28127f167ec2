"""Devices, precision, compilation, CUDA graphs, kernels: the only room that knows about them."""
