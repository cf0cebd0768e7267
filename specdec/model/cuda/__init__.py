"""What a CUDA device needs beside the rest of `specdec.model`: its kernels, and graphs of whole forwards.

Nothing here is imported unless a model is on such a device; Triton comes with CUDA builds of torch.
"""
