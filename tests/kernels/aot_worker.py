"""Compiles every launch of every KernelSpec for one architecture and prints a JSON report.

Runs in a process of its own, since triton decides at import between compiling and interpreting.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import sys

import torch

from fuselm.kernels.aot import compile_only
from fuselm.kernels.attention.api import prefer_hopper
from fuselm.kernels.specs.base import KernelSpec
from fuselm.kernels.specs.registry import SPECS


def compile_cases(spec: KernelSpec, arch: int, generator: torch.Generator) -> None:
    """Forward and backward of the spec's cases; of the first for what is not Hopper, to save time."""
    for case in spec.aot_cases if arch == 90 else spec.aot_cases[:1]:
        inputs = spec.make_inputs(case, torch.bfloat16, torch.device("cpu"), generator)
        outputs = spec.function(**inputs, backend="triton")
        outputs = [outputs] if isinstance(outputs, torch.Tensor) else outputs
        torch.stack([o.float().sum() for o in outputs if o.requires_grad]).sum().backward()


def main() -> None:
    arch = int(sys.argv[1])
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # nobody reads it here
    gc.disable()  # what the compiler leaves is little
    generator = torch.Generator().manual_seed(0)
    report = {}
    for spec in SPECS:
        if arch not in spec.architectures:
            continue
        with compile_only(arch) as compiled:
            compile_cases(spec, arch, generator)
            if spec.name == "attention" and arch == 90:  # what runs where the Hopper kernels do not
                with prefer_hopper(False):
                    compile_cases(spec, arch, generator)
        report[spec.name] = [dataclasses.asdict(kernel) for kernel in compiled]
    print(json.dumps(report))


if __name__ == "__main__":
    main()
